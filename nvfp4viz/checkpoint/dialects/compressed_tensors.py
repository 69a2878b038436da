"""compressed-tensors ``nvfp4-pack-quantized`` (llm-compressor, Red Hat AI, auto-round).

The same four tensors as ModelOpt under other names, and the second-level scales the other way up: a file stores
2688/amax, to divide by, usually with shape ``[1]``.  A dead expert shows as +inf (2688/0), which is an effective
multiplier of zero.  ``mxfp4-pack-quantized`` has E8M0 scales and no second level.
"""

from nvfp4viz.checkpoint.dialects.per_expert import Dialect

_SUFFIXES = {
    "weight": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}
_METHODS = ("compressed-tensors", "auto-round", "auto_round")
COMPRESSED_TENSORS = Dialect(id="compressed-tensors", suffixes=_SUFFIXES, divisors=True, methods=_METHODS)
COMPRESSED_TENSORS_MXFP4 = Dialect(
    id="compressed-tensors", suffixes=_SUFFIXES, block="MXFP4", divisors=True, methods=_METHODS
)
