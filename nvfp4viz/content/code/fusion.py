import numpy as np
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.errors import InputError
from nvfp4viz.moe.fusion import ba_layout, find_row, gate_up_layout, qkv_layout, qkvz_layout, trace_row
from nvfp4viz.moe.fusion_bits import check_layout
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
        found = trace_row(layout, rank=$rank, row=$row % layout.rank_rows)  # a smaller matrix: counted round
        places = find_row(layout, found.part, found.part_row)
        print(f"{name}: {layout.rank_rows} rows a rank; {found}; on (rank, row) {places}")
        print("  outputs, and those that differ from the separate products:", check_layout(layout))
    except InputError as error:
        print(f"{name}: {error}")

# one scale for q, k and v of a real layer
opened = open_checkpoint(ensure("tiny-moe-bf16"))
weights = {part: np.asarray(opened.read(f"model.layers.$layer.self_attn.{part}_proj.weight")) for part in "qkv"}
for way, parts in share_scale(weights).items():
    print(way, {name: f"x {part.factor:.4g}, {part.summary.sqnr_db:.2f} dB" for name, part in parts.items()})
