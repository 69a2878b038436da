import numpy as np
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.quant.schemes import compare_rules, compare_schemes, layer_bytes, rule_binade
from sample_checkpoints import ensure

# one tensor in both schemes, and in a third that tells their differences apart
weight = open_checkpoint(ensure("tiny-moe-bf16")).read("model.layers.$layer.experts." + $w)[$expert]
for one in compare_schemes(weight, mx_recipe=$mx):
    print(f"{one.name}: {one.bits} bits, {one.summary.sqnr_db:.2f} dB, {len(one.used())} scale bytes in use")

# one block under every scale rule
block = np.float32($x)
for name, trace in compare_rules(block).items():
    print(f"{name}: byte 0x{trace.scale_byte:02X}, largest becomes {float(trace.decoded[trace.top]):g}, clips {trace.clips_top}")

# where a rule's scale steps
for run in rule_binade($exponent).runs($rule):
    print(f"{run.first:g} to {run.last:g}: byte 0x{run.scale_byte:02X}, clips {run.clips}")

# what is stored
for scheme in ("mxfp4", "nvfp4"):
    found = layer_bytes($matrices * $experts, scheme)
    print(f"{scheme}: {found.elements:,} weights in {found.total:,} bytes, {found.bits:.6g} bits each")
    print(f"    codes {found.codes:,}, block scales {found.block_scales:,}, tensor scales {found.tensor_scales:,}")
    print(f"    block scales add {found.block_scales / found.codes:.2%} to the codes")
