from nvfp4viz.errors import FormatError
from nvfp4viz.serving.selection import GPUS, MOE, MoeRequest, select_moe
from nvfp4viz.serving.selection_cost import rank_bytes
from nvfp4viz.serving.selection_linear import LinearRequest, select_linear
from nvfp4viz.serving.selection_mxfp4 import Mxfp4Request, select_mxfp4


def show(what, found):
    print(what, "taken:", found.winner.enum if found.winner else [row.enum for row in found.rests_with])
    for each in found.candidates:
        print("   ", each.backend.enum, each.outcome, each.check or "")
    if found.error:
        print("   ", found.error)


# the deployments on this page: each selector asks its own candidates
request = MoeRequest(
    gpu=$moe_gpu, activation=$moe_activation, scheme=$moe_scheme, parallel=$moe_parallel, flashinfer=$moe_flashinfer,
    humming=$moe_humming, swiglu_limit=$moe_swiglu_limit, marlin_8bit=$moe_marlin_8bit, choice=$moe_choice,
)
show("NVFP4 experts,", select_moe(request))
layers = select_linear(LinearRequest(
    gpu=$linear_gpu, scheme=$linear_scheme, flashinfer=$linear_flashinfer, humming=$linear_humming,
    cutlass_fp4=$linear_cutlass_fp4, batch_invariant=$linear_batch_invariant, disabled=$linear_disabled,
    choice=$linear_choice,
))
show("NVFP4 linear layers,", layers)
print("    warning:", layers.warning)
show("MXFP4 experts,", select_mxfp4(Mxfp4Request(
    gpu=$mxfp4_gpu, model=$mxfp4_model, wanted=$mxfp4_wanted, format=$mxfp4_format, flashinfer=$mxfp4_flashinfer,
    humming=$mxfp4_humming, choice=$mxfp4_choice,
)))

# what a rank stores for one layer of experts, on each backend whose layout was read
kind = {"gated": request.activation != "relu2_no_mul", "per_token": request.scheme == "W4A4-token"}
try:
    for row in MOE:
        if row.layout != "unread" and not row.open:
            stored = rank_bytes(
                row, $experts, $hidden, $intermediate, ranks=$ranks, parallel=request.parallel, **kind
            )
            said = f"{stored.total:,} bytes on a rank, {stored.padding / stored.total:.1%} of them padding"
            print(f"{row.enum}: {'stops' if stored.stops else said}")
except FormatError as error:
    print(error)

# what auto takes for experts on every GPU, and how far one input scale reaches there
for gpu in GPUS:
    winner = select_moe(MoeRequest(gpu)).winner
    print(gpu, winner.enum, winner.reach)
