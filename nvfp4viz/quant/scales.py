"""From a tensor to its maximum, and from the maximum to the global scale that a recipe stores."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import bf16_to_f32, f32_to_bf16
from nvfp4viz.quant.recipes import find_recipe

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def amax(x: Array) -> np.float32:
    """Largest magnitude of a tensor, as float32.  NaN if any element is NaN, as ``torch.amax`` does; 0 if empty.

    Works on the bit patterns: magnitudes of one sign are ordered like integers, and a NaN is larger than infinity.
    Read with a sign the greatest is the largest positive number, read without one it is the largest negative one's, if
    there is any: so no copy of the magnitudes is made.
    """
    array = np.asarray(x)
    if array.size == 0:
        return np.float32(0)
    if array.dtype == BFLOAT16:
        bits16 = np.ascontiguousarray(array).view(np.uint16)
        top = max(int(bits16.view(np.int16).max()), int(bits16.max()) & 0x7FFF) << 16
    else:
        bits32 = np.ascontiguousarray(array, np.float32).view(np.uint32)
        top = max(int(bits32.view(np.int32).max()), int(bits32.max()) & 0x7FFFFFFF)
    bits = np.uint32(0x7FC00000 if top > 0x7F800000 else top)
    return np.float32(bits.view(np.float32))


def global_scale(amax: npt.ArrayLike, recipe: str, dtype: npt.DTypeLike = np.float32) -> np.float32:
    """The global scale that a recipe stores for a tensor with this maximum.

    Parameters
    ----------
    amax
        Largest magnitude of the tensor (of one expert's projection, of one layer, …).
    recipe
        A name of ``NVFP4_RECIPES``.
    dtype
        Of the tensor.  compressed-tensors takes the reciprocal in it, so a BF16 tensor gets a coarser scale.

    Returns
    -------
    float32
        ``amax/2688`` for ``modelopt`` and ``torchao``, ``2688/amax`` for the others.

    Notes
    -----
    ``scalar / tensor`` in torch is a reciprocal followed by a product, two roundings; compressed-tensors and vLLM's
    online packing inherit that.  vLLM clamps the maximum to at least 1e-8, compressed-tensors turns an infinite scale
    into 1.

    Raises
    ------
    FormatError
        ``recipe.no-global-scale`` for an MXFP4 recipe.

    Examples
    --------
    >>> float(global_scale(2688.0, "modelopt")), float(global_scale(5376.0, "ieee"))
    (1.0, 0.5)
    """
    found = find_recipe(recipe)
    if found.scheme != "nvfp4":
        raise FormatError("recipe.no-global-scale", name=recipe)
    top, full = np.float32(np.asarray(amax, np.float32).reshape(())[()]), np.float32(2688)
    with np.errstate(all="ignore"):
        if recipe in ("modelopt", "torchao"):
            return np.float32(top / full)
        if recipe == "vllm-emulation":
            low = top if np.isnan(top) else max(top, np.float32(1e-8))
            return np.float32(full * np.float32(np.float32(1) / low))
        if recipe == "compressed-tensors":
            return _compressed_tensors_scale(top, np.dtype(dtype) == BFLOAT16)
        return np.float32(full / top)


def _compressed_tensors_scale(top: np.float32, bf16: bool) -> np.float32:
    """``generate_gparam``: 2688 · (1/amax) with both steps in the tensor's dtype; no scale for zero or NaN tensors."""

    def rounded(value: np.float32) -> np.float32:
        return np.float32(bf16_to_f32(f32_to_bf16(value))[()]) if bf16 else value

    scale = rounded(np.float32(2688) * rounded(np.float32(1) / top))
    return scale if np.isfinite(scale) else np.float32(1)
