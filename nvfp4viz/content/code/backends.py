from nvfp4viz.serving.selection import GPUS, MoeRequest, select_moe

# the deployment on this page
request = MoeRequest(
    gpu=$gpu, activation=$activation, scheme=$scheme, parallel=$parallel,
    flashinfer=$flashinfer, humming=$humming, swiglu_limit=$swiglu_limit, marlin_8bit=$marlin_8bit, choice=$choice,
)
found = select_moe(request)
for each in found.candidates:
    print(each.backend.enum, each.outcome, each.check or "")
if found.error:
    print(found.error)

# what auto takes on every GPU, and how far one input scale reaches there
for gpu in GPUS:
    winner = select_moe(MoeRequest(gpu)).winner
    print(gpu, winner.enum, winner.reach)
