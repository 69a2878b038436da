"""compressed-tensors ``nvfp4-pack-quantized`` (llm-compressor, Red Hat AI, auto-round).

The same four tensors as ModelOpt under other names, and the second-level scales the other way up: a file stores
2688/amax, to divide by, usually with shape ``[1]``.  A dead expert shows as +inf (2688/0), which is an effective
multiplier of zero.
"""

from nvfp4viz.checkpoint.dialects.per_expert import PerExpertDialect

COMPRESSED_TENSORS = PerExpertDialect(
    id="compressed-tensors",
    suffixes={
        "weight": "weight_packed",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    },
    divisors=True,
)
