"""The layouts in which exporters store quantised experts, and how one is told from another.

A `Dialect` says which suffix plays which role, how experts are arranged and which way up their scales are; adding one
is a record in one of these modules and a line in `recognise`.
"""

from nvfp4viz.checkpoint.dialects.compressed_tensors import COMPRESSED_TENSORS, COMPRESSED_TENSORS_MXFP4
from nvfp4viz.checkpoint.dialects.modelopt import (
    INKLING,
    MODELOPT,
    MODELOPT_FUSED,
    MODELOPT_MXFP4,
    MODELOPT_STACKED,
)
from nvfp4viz.checkpoint.dialects.mxfp4 import DEEPSEEK_V4, GPT_OSS, QUARK, QUARK_NVFP4, QUARK_QUANTIZER
from nvfp4viz.checkpoint.dialects.per_expert import (
    PROJECTIONS,
    Dialect,
    ExpertName,
    parse_expert_name,
    parse_module,
    parse_whole,
)
from nvfp4viz.checkpoint.dialects.recognise import PACKED, recognise

__all__ = [
    "COMPRESSED_TENSORS",
    "COMPRESSED_TENSORS_MXFP4",
    "DEEPSEEK_V4",
    "GPT_OSS",
    "INKLING",
    "MODELOPT",
    "MODELOPT_FUSED",
    "MODELOPT_MXFP4",
    "MODELOPT_STACKED",
    "PACKED",
    "PROJECTIONS",
    "QUARK",
    "QUARK_NVFP4",
    "QUARK_QUANTIZER",
    "Dialect",
    "ExpertName",
    "parse_expert_name",
    "parse_module",
    "parse_whole",
    "recognise",
]
