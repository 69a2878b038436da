"""Which dialect a projection's tensors speak: by suffixes and element types; the configuration settles only ties."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4viz.checkpoint.dialects.compressed_tensors import COMPRESSED_TENSORS, COMPRESSED_TENSORS_MXFP4
from nvfp4viz.checkpoint.dialects.modelopt import (
    INKLING,
    MODELOPT,
    MODELOPT_FUSED,
    MODELOPT_MXFP4,
    MODELOPT_STACKED,
)
from nvfp4viz.checkpoint.dialects.mxfp4 import DEEPSEEK_V4, GPT_OSS, QUARK, QUARK_NVFP4, QUARK_QUANTIZER
from nvfp4viz.checkpoint.dialects.per_expert import E8M0, Dialect
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES

PACKED = ("U8", "I8", "F4")
FP8 = ("F8_E4M3", "F8_E5M2")


UNREAD = "?"
"""The element type of a tensor that is known by its name, and lies in a file that cannot be read."""


def recognise(
    types: Mapping[str, str], arrangement: str, method: str | None, *, whole: bool = True, label: str | None = None
) -> Dialect | None:
    """The dialect of one projection.

    Parameters
    ----------
    types
        Element type by suffix; `UNREAD` where nobody knows it.
    arrangement
        ``"expert"``, ``"stacked"`` or ``"fused"``.
    method
        The configuration's `quant_method`, asked only where two dialects share suffixes and types.
    whole
        These are all of its tensors: what is not among them does not lie in a file that was not given.
    label
        The algorithm that the configuration gives all experts, asked only for types that cannot be read.

    Returns
    -------
    dialect
        None where these tensors alone do not tell, as for a weight without any scale.

    >>> recognise({"weight": "I8", "scale": "U8"}, "expert", None).id
    'deepseek-v4'
    >>> recognise({"weight": "U8", "weight_scale_2": UNREAD}, "expert", None).id
    'modelopt'
    >>> lost = {"weight": UNREAD, "weight_scale": "U8"}
    >>> recognise(lost, "expert", "quark"), recognise(lost, "expert", "quark", label="MXFP4").id
    (None, 'quark')
    """
    if arrangement == "fused":
        return _fused(types, method or "", whole)
    if arrangement == "stacked":
        return _stacked(types)
    found = _per_expert(types, method or "", whole)
    if found is not None or label != "MXFP4" or UNREAD not in types.values():
        return found
    # Bytes of powers of two scale six and eight bits as well, and codes say nothing of blocks: the configuration does.
    due = {"weight": PACKED[0], "weight_scale": E8M0[0]}
    known = {suffix: due.get(suffix, dtype) if dtype == UNREAD else dtype for suffix, dtype in types.items()}
    return _per_expert(known, method or "", whole)


def _fused(types: Mapping[str, str], method: str, whole: bool) -> Dialect | None:
    # An activation scale is called the same in both.
    if "blocks" in types or "scales" in types or ({*types} == {"input_scale"} and method.startswith("quark")):
        return GPT_OSS
    quantised = {"weight_scale", "weight_scale_2", "input_scale"} & set(types)
    # FP8 has scales of the same name, and the weight that would tell may not have been read.
    weight = types.get("", None if whole else UNREAD)
    if weight == UNREAD and "weight_scale_2" not in types and types.get("weight_scale") != "F8_E4M3":
        return None
    return MODELOPT_FUSED if quantised and weight not in FP8 else None


def _stacked(types: Mapping[str, str]) -> Dialect | None:
    if "scale2" in types:
        return INKLING
    if "weight_scale_2" in types or (types.get("weight") in PACKED and types.get("weight_scale") == "F8_E4M3"):
        return MODELOPT_STACKED
    return None


def _per_expert(types: Mapping[str, str], method: str, whole: bool) -> Dialect | None:
    weight, scale = types.get("weight"), types.get("weight_scale")
    if "weight_global_scale" in types or ("weight_packed" in types and scale == "F8_E4M3"):
        return COMPRESSED_TENSORS
    if "weight_packed" in types and scale in E8M0:
        return COMPRESSED_TENSORS_MXFP4
    # A block scale that cannot be read, and no second level anywhere.
    one_level = whole and scale == UNREAD
    if types.get("weight_packed") in PACKED and one_level:
        return COMPRESSED_TENSORS_MXFP4
    if "input_scale_2" in types or ("weight_scale_2" in types and method.startswith("quark")):
        return QUARK_NVFP4
    if types.get("weight_scale_2") in (*SCALE_BYTES, UNREAD):
        return MODELOPT
    if weight in PACKED:
        if types.get("scale") in (*E8M0, UNREAD):
            return DEEPSEEK_V4
        if scale in E8M0:
            return MODELOPT_MXFP4 if method.startswith("modelopt") else QUARK
        if "weight_quantizer.scale" in types:
            return QUARK_QUANTIZER
        if one_level and method.startswith(("quark", "mxfp4")):
            return QUARK
        if scale == "F8_E4M3":
            # The scales' type says NVFP4, the configuration says otherwise, and no second level contradicts it.
            if not method.startswith(("quark", "mxfp4")) or "input_scale" in types:
                return MODELOPT
            return QUARK if whole else QUARK_NVFP4
        return None
    if weight in (None, UNREAD) and types.get("scale") == "F8_E8M0":
        return DEEPSEEK_V4
    return None
