"""Layouts that are recognised by name, and audited for their files and coverage only, until they are read in full."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from nvfp4viz.checkpoint.header import TensorEntry

_FUSED = re.compile(r"experts\.(?:gate_up_proj|down_proj)_(?:weight_scale|weight_scale_2|input_scale)$")
_STACKED = re.compile(
    r"(?:\bmoe|experts)\.(?:gate_proj|up_proj|down_proj|w13_weight|w2_weight)\.?(?:weight_scale_2|scale2)$"
)
_GPT_OSS = re.compile(r"experts\.(?:gate_up_proj|down_proj)_(?:blocks|scales)$")
_QUARK_ALIAS = re.compile(r"\.(?:weight_quantizer|input_quantizer)\.scale$")


def recognise_other(census: Set[tuple[str, str]], tensors: Mapping[str, TensorEntry]) -> tuple[str, str] | None:
    """Dialect and scheme of a layout that no per-expert dialect claims.

    Parameters
    ----------
    census
        Pairs (suffix, dtype) of per-expert tensors.
    tensors
        All tensors; only names and types are looked at.
    """
    if ("scale", "F8_E8M0") in census or (("weight", "I8") in census and ("scale", "U8") in census):
        return "deepseek-v4", "MXFP4"
    if ("weight", "U8") in census and ("weight_scale", "U8") in census:
        return "quark", "MXFP4"
    for name, entry in tensors.items():
        # One look decides: these suffixes occur in no other layout.
        if _GPT_OSS.search(name):
            return "gpt-oss", "MXFP4"
        if _FUSED.search(name):
            return "modelopt-fused", _activation(tensors, "_input_scale")
        if _STACKED.search(name) and entry.shape and entry.shape[0] > 1:
            return "modelopt-stacked", _activation(tensors, ".input_scale")
        if _QUARK_ALIAS.search(name):
            return "quark", "MXFP4"
    return None


def _activation(tensors: Mapping[str, TensorEntry], suffix: str) -> str:
    return "W4A4" if any(name.endswith(suffix) for name in tensors) else "W4A16"
