import numpy as np
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.errors import InputError
from nvfp4viz.moe.fusion import ba_layout, find_row, gate_up_layout, qkv_layout, qkvz_layout, trace_row
from nvfp4viz.moe.fusion_arrays import misplaced_channels
from nvfp4viz.moe.fusion_bits import check_layout, measure_fusions
from nvfp4viz.quant.shared_scale import share_scale
from sample_checkpoints import ensure

# where a row of a rank comes from, and which ranks hold it
makers = {
    "qkv": lambda: qkv_layout(*$attention, tp=$tp),
    "w13": lambda: gate_up_layout($intermediate, tp=$tp),
    "qkvz, flat": lambda: qkvz_layout(*$deltanet, tp=$tp),
    "qkvz, interleaved": lambda: qkvz_layout(*$deltanet, tp=$tp, order="interleaved"),
    "ba, interleaved": lambda: ba_layout(*$deltanet[:2], tp=$tp, order="interleaved"),
}
for name, make in makers.items():
    try:
        layout = make()
        rank, row = $rank, $row % layout.rank_rows  # a smaller matrix: counted round
        if name == "qkvz, interleaved":  # where the other order has the row just found
            rank, row = find_row(layout, found.part, found.part_row)[0]
        found = trace_row(layout, rank=rank, row=row)
        places = find_row(layout, found.part, found.part_row)
        print(f"{name}: {layout.rank_rows} rows a rank; {found}; on (rank, row) {places}")
        print("  outputs, and those that differ from the separate products:", check_layout(layout))
        if name.startswith("qkvz"):
            wrong, channels = misplaced_channels(layout)
            print(f"  taken as it comes, {wrong:,} of {channels:,} channels meet another channel's kernel")
    except InputError as error:
        print(f"{name}: {error}")

# what changes bits: a scale that three weights must share, or a rounding that a fused kernel leaves out
opened, prefix = open_checkpoint(ensure("tiny-moe-bf16")), "model.layers.$layer"
qkv = {name: np.asarray(opened.read(f"{prefix}.self_attn.{name}_proj.weight")) for name in "qkv"}
w13 = np.asarray(opened.read(f"{prefix}.experts.gate_up_proj"))[:$experts]
for name, part in share_scale(qkv)["max"].items():
    print(f"{name}: own scale {part.own_scale:.4g}, served with {part.used_scale:.4g}")
for one in measure_fusions(qkv, w13):
    if one.differ:
        print(f"{one.id}: {one.differ:,} of {one.values:,} differ")
