import ml_dtypes
import numpy as np
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.figures.blocks import outlier_pair
from nvfp4viz.quant import sweep_headroom
from nvfp4viz.quant.shared_scale import share_scale
from sample_checkpoints import ensure

# real weights that read one input
layer, expert, what = $layer, $expert, $what
opened = open_checkpoint(ensure("tiny-moe-bf16"))
if what == "expert":
    gate, up = np.split(np.asarray(opened.read(f"model.layers.{layer}.experts.gate_up_proj"))[expert], 2)
    weights = {"gate": gate, "up": up}
else:
    module, names = ("mlp", ("gate", "up")) if what == "mlp" else ("self_attn", ("q", "k", "v"))
    weights = {n: np.asarray(opened.read(f"model.layers.{layer}.{module}.{n}_proj.weight")) for n in names}

# the first of them times a power of two, which BF16 takes exactly
first = next(iter(weights))
weights[first] = (weights[first].astype(np.float32) * np.float32($stretch)).astype(ml_dtypes.bfloat16)

# five ways to share a scale
for way, parts in share_scale(weights).items():
    print(way, {name: f"x {part.factor:.4g}, {part.summary.sqnr_db:.2f} dB" for name, part in parts.items()})

# an input scale too large by a factor
for one in sweep_headroom(outlier_pair($outliers)[0], $factors):
    print(f"input x {one.factor:g}: {one.summary.sqnr_db:.2f} dB, {one.subnormal} subnormal block scales, {one.summary.zeroed} values became zero")
