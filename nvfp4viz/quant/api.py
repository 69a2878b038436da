"""Quantise and dequantise: validation, the choice of a path, and nothing else.

Three paths give the same bits, and tests force that: ``reference`` (scalars, for reading), ``numpy`` (whole arrays),
and ``numba`` (compiled, two threads; ``quant/fast.py``), which is also ``auto``.  The seam is two functions::

    fast.quantize_rows(rows (R, K) bf16|f32, recipe, global_scale f32 as stored) -> (packed, scales)
    fast.dequantize_tensor(q, dtype) -> array of q.shape
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import bf16_to_f32, f32_to_bf16, pack_nibbles
from nvfp4viz.formats.paths import Path, by_reference
from nvfp4viz.quant import decode, mxfp4, nvfp4
from nvfp4viz.quant.recipes import Recipe, find_recipe
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.types import Block, QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
ONE = np.float32(1)
PORTION = 1 << 17
"""Elements that the NumPy path works on together."""


def quantize(
    x: Array, *, recipe: str, global_scale: npt.ArrayLike | None = None, path: Path = "auto"
) -> QuantizedTensor:
    """Quantise a tensor along its last axis.

    Parameters
    ----------
    x : (..., K) bfloat16, float16 or float32
        K a multiple of the recipe's block size.  FP16 is widened, which is exact, and then treated as float32.
    recipe
        A name of ``NVFP4_RECIPES`` or ``MXFP4_RECIPES``; `nvfp4viz.quant.recipes` says how they differ.
    global_scale
        As the recipe stores it; by default the recipe's own from the tensor's maximum.  Any float32 is taken, also
        0, NaN and ±Inf: what happens then is what this project is about.  MXFP4 has none.
    path
        ``"reference"`` (scalar), ``"numpy"``, ``"numba"`` or ``"auto"``, which is Numba.  All give the same bits.

    Raises
    ------
    FormatError
        ``recipe.unknown``, ``recipe.no-global-scale``, ``quantize.dtype``, ``quantize.f16``, ``quantize.empty``,
        ``quantize.block``, ``quantize.global-scale``, ``quantize.global-number``, ``path.unknown``.

    Examples
    --------
    >>> q = quantize(np.float32([[6, -3, 0.25] + [0] * 13]), recipe="ieee", global_scale=1)
    >>> q.packed.tobytes().hex(), q.scales.tolist()
    ('d700000000000000', [[56]])
    """
    found = find_recipe(recipe)
    array = _checked(x, found)
    stored = _stored_scale(array, found, global_scale)
    rows = array.reshape(-1, array.shape[-1])
    packed, scales = _quantize_rows(rows, found, stored, path)
    lead = array.shape[:-1]
    return QuantizedTensor(
        _frozen(packed.reshape(*lead, -1)),
        _frozen(scales.reshape(*lead, -1)),
        stored,
        recipe,
        found.block_size,
        array.shape,
    )


def dequantize(q: QuantizedTensor, dtype: npt.DTypeLike = np.float32, path: Path = "auto") -> Array:
    """Values of a quantised tensor: ``code · (block scale · decode scale)``, in this order of products.

    `nvfp4viz.quant.decode` says how packages differ.  A NaN is always 0x7FC00000 (BF16: 0x7FC0).

    Parameters
    ----------
    q
        NVFP4 or MXFP4.
    dtype
        float32, or bfloat16 (the float32 value rounded once).

    Raises
    ------
    FormatError
        ``quantize.dtype``, ``path.unknown``
    """
    wanted = np.dtype(dtype)
    if wanted not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=wanted)
    if path in ("auto", "numba"):
        from nvfp4viz.quant import fast

        return _frozen(fast.dequantize_tensor(q, wanted))
    values = decode.dequantize_reference(q) if by_reference(path) else decode.decode_blocks(q)
    return _frozen(f32_to_bf16(values) if wanted == BFLOAT16 else values)


def _checked(x: Array, found: Recipe) -> Array:
    array = np.asarray(x)
    if array.dtype not in (BFLOAT16, FLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=array.dtype)
    if array.dtype == FLOAT16 and found.name == "compressed-tensors":  # it rounds scales to the tensor's type
        raise FormatError("quantize.f16", recipe=found.name)
    if array.size == 0 or array.ndim == 0:
        raise FormatError("quantize.empty", shape=array.shape)
    if array.shape[-1] % found.block_size:
        raise FormatError("quantize.block", k=array.shape[-1], block=found.block_size, recipe=found.name)
    return array


def _stored_scale(array: Array, found: Recipe, given: npt.ArrayLike | None) -> np.float32:
    if found.scheme == "mxfp4":
        if given is not None:
            raise FormatError("recipe.no-global-scale", name=found.name)
        return ONE
    if given is None:
        return global_scale(amax(array), found.name, array.dtype)
    return as_global_scale(given)


def as_global_scale(given: npt.ArrayLike) -> np.float32:
    """One float32 from whatever a caller calls a global scale.

    Raises
    ------
    FormatError
        ``quantize.global-scale`` unless it is single; ``quantize.global-number`` unless it is a number.
    """
    try:
        with np.errstate(over="ignore", under="ignore"):
            number = np.asarray(given, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError("quantize.global-number", got=repr(given)[:40]) from error
    if number.size != 1:
        raise FormatError("quantize.global-scale", shape=number.shape)
    return np.float32(number.reshape(())[()])


def _quantize_rows(rows: Array, found: Recipe, stored: np.float32, path: Path) -> tuple[U8, U8]:
    if by_reference(path):
        return _rows_by_reference(rows, found, stored)
    if path in ("auto", "numba"):
        from nvfp4viz.quant import fast

        wide = rows.astype(np.float32) if rows.dtype == FLOAT16 else rows
        return fast.quantize_rows(wide, found.name, stored)
    return quantize_rows_numpy(rows, found.name, stored)


def quantize_rows_numpy(rows: Array, recipe: str, stored: np.float32) -> tuple[U8, U8]:
    """The NumPy path for ``rows (R, K)``: packed ``(R, K//2)`` and scales ``(R, K//n)``.

    Rows are taken in portions that fit a cache: the intermediate arrays are several times the input.
    """
    found = find_recipe(recipe)
    bf16 = rows.dtype == BFLOAT16
    count, columns = rows.shape
    packed = np.empty((count, columns // 2), np.uint8)
    scales = np.empty((count, columns // found.block_size), np.uint8)
    portion = max(1, PORTION // columns)
    for first in range(0, count, portion):
        part = rows[first : first + portion]
        values = bf16_to_f32(part) if bf16 else np.ascontiguousarray(part, np.float32)
        blocks = values.reshape(len(part), -1, found.block_size)
        if found.scheme == "mxfp4":
            bytes_, codes = mxfp4.quantize_blocks(recipe, blocks)
        else:
            bytes_, codes = nvfp4.quantize_blocks(recipe, blocks, stored, bf16)
        scales[first : first + portion] = bytes_
        packed[first : first + portion] = pack_nibbles(codes.reshape(len(part), -1))
    return packed, scales


def reference_block(x: Array, found: Recipe, stored: np.float32) -> Block:
    """One block of 16 or 32 elements through the scalar reference."""
    elements = [np.float32(v) for v in x]
    with np.errstate(all="ignore"):
        if found.scheme == "mxfp4":
            from nvfp4viz.quant.reference_mxfp4 import MXFP4_REFERENCES

            return MXFP4_REFERENCES[found.name](elements)
        from nvfp4viz.quant.reference import NVFP4_REFERENCES

        return NVFP4_REFERENCES[found.name](elements, stored, x.dtype == BFLOAT16)


def _rows_by_reference(rows: Array, found: Recipe, stored: np.float32) -> tuple[U8, U8]:
    blocks = rows.reshape(len(rows), -1, found.block_size)
    scales = np.zeros(blocks.shape[:2], np.uint8)
    codes = np.zeros(blocks.shape, np.uint8)
    for r, b in np.ndindex(*scales.shape):
        block = reference_block(blocks[r, b], found, stored)
        scales[r, b], codes[r, b] = block.byte, block.codes
    return pack_nibbles(codes.reshape(len(rows), -1)), scales


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
