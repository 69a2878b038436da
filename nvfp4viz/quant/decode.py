"""Back from bytes to values: ``value = element · multiplier``, one float32 product, for every recipe.

The multiplier depends on the scale byte and the global scale alone, so it is a table of 256; packages differ in how
they compute it and in what code 8 (−0) means:

* NVFP4: ``s · g``, with ``g`` the decode scale.  compressed-tensors stores the encode scale and divides, ``s / G``.
* ModelOpt's NVFP4 reads code 8 as +0.
* MXFP4: ``2^(byte − 127)`` and NaN for 255, except that ModelOpt computes ``exp2(128)`` there, which is ∞.

The other order, ``(element · s) · g`` as FlashInfer's CPU function has it, differs by one ulp in 8.6 % of float32
values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import decode_e2m1, decode_e4m3, decode_ue8m0
from nvfp4viz.quant.recipes import find_recipe
from nvfp4viz.quant.types import QuantizedTensor

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
_BYTES = np.arange(256, dtype=np.uint8)
_CODES = np.arange(16, dtype=np.uint8)
_NAN = np.float32(np.nan)


def multipliers(q: QuantizedTensor) -> F32:
    """(256,) float32: what an element under each scale byte is multiplied by.

    >>> tensor = QuantizedTensor(np.zeros(8, np.uint8), np.uint8([0x38]), np.float32(0.5), "modelopt", 16, (16,))
    >>> float(multipliers(tensor)[0x38])
    0.5
    """
    with np.errstate(all="ignore"):
        if find_recipe(q.recipe).scheme == "mxfp4":
            table = decode_ue8m0(_BYTES)
            if q.recipe == "modelopt-mxfp4":
                table[255] = np.inf
            return table
        values = decode_e4m3(_BYTES)
        return values / q.global_scale if q.recipe == "compressed-tensors" else values * q.decode_scale


def element_values(recipe: str) -> F32:
    """(16,) float32: the value of each code as the recipe's own decoder reads it."""
    values = decode_e2m1(_CODES)
    if recipe == "modelopt":
        values[8] = 0.0
    return values


def decode_blocks(q: QuantizedTensor) -> F32:
    """Values of a quantised tensor in NumPy, shape ``q.shape``; every NaN is the canonical quiet one."""
    codes = q.codes().reshape(*q.scales.shape, q.block_size)
    with np.errstate(all="ignore"):
        values = element_values(q.recipe)[codes] * multipliers(q)[q.scales][..., None]
    return canonical_nan(values.reshape(q.shape), q)


def canonical_nan(values: Array, q: QuantizedTensor) -> Array:
    """``values`` (float32 or BF16, changed in place) with the canonical quiet NaN for every NaN.

    The sign of a NaN would tell which CPU made it.  One can only be in a block whose multiplier is no number.
    """
    hit = np.flatnonzero(~np.isfinite(multipliers(q))[q.scales.reshape(-1)])
    if len(hit):
        blocks = values.reshape(-1, q.block_size)
        some = blocks[hit]
        some[np.isnan(some)] = np.nan
        blocks[hit] = some
    return values


def dequantize_reference(q: QuantizedTensor) -> F32:
    """The same, one element after another."""
    mx = find_recipe(q.recipe).scheme == "mxfp4"
    codes = q.codes().reshape(-1, q.block_size)
    values = np.zeros(codes.shape, np.float32)
    with np.errstate(all="ignore"):
        for b, byte in enumerate(q.scales.reshape(-1).tolist()):
            if mx:
                scale = np.float32(np.inf) if q.recipe == "modelopt-mxfp4" and byte == 255 else decode_ue8m0(byte)[()]
            elif q.recipe == "compressed-tensors":
                scale = decode_e4m3(byte)[()] / q.global_scale
            else:
                scale = decode_e4m3(byte)[()] * q.decode_scale
            for i, code in enumerate(codes[b].tolist()):
                element = np.float32(0) if q.recipe == "modelopt" and code == 8 else decode_e2m1(code)[()]
                value = element * scale
                values[b, i] = _NAN if np.isnan(value) else value
    return values.reshape(q.shape)
