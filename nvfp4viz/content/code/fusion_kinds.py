import numpy as np
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.moe.fusion_bits import measure_fusions
from sample_checkpoints import ensure

# q, k and v of a layer, and w13 of its first experts
opened, prefix = open_checkpoint(ensure("tiny-moe-bf16")), "model.layers.$layer"
qkv = {name: np.asarray(opened.read(f"{prefix}.self_attn.{name}_proj.weight")) for name in "qkv"}
w13 = np.asarray(opened.read(f"{prefix}.experts.gate_up_proj"))[:$experts]

# each fusion against the same work done separately
for one in measure_fusions(qkv, w13):
    print(f"{one.id} ({one.kind}): {one.before} launches become {one.after}; {one.differ:,} of {one.values:,} differ")
