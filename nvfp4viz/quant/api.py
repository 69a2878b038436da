"""Quantise and dequantise: validation, the choice of a path, and nothing else."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import bf16_to_f32, decode_e2m1, decode_e4m3, decode_ue8m0, f32_to_bf16, pack_nibbles
from nvfp4viz.quant.mxfp4 import MXFP4_BLOCKS
from nvfp4viz.quant.nvfp4 import NVFP4_BLOCKS
from nvfp4viz.quant.recipes import Recipe, find_recipe
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.types import QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Path = Literal["auto", "reference", "numpy", "numba"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ONE = np.float32(1)


def quantize(
    x: Array, *, recipe: str, global_scale: npt.ArrayLike | None = None, path: Path = "auto"
) -> QuantizedTensor:
    """Quantise a tensor along its last axis.

    Parameters
    ----------
    x : (..., K) bfloat16 or float32
        K a multiple of the recipe's block size.
    recipe
        A name of ``NVFP4_RECIPES`` or ``MXFP4_RECIPES``; `nvfp4viz.quant.recipes` says how they differ.
    global_scale
        As the recipe stores it; by default the recipe's own from the tensor's maximum.  Any float32 is taken, also
        0, NaN and ±Inf: what happens then is what this project is about.  MXFP4 has none.
    path
        ``"reference"`` (scalar), ``"numpy"``, ``"numba"``, or ``"auto"``: Numba where it knows the recipe.  All give
        the same bits.

    Raises
    ------
    FormatError
        ``recipe.unknown``, ``recipe.no-global-scale``, ``quantize.dtype``, ``quantize.empty``, ``quantize.block``,
        ``quantize.path``.

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

    Parameters
    ----------
    q
        NVFP4 or MXFP4.
    dtype
        float32, or bfloat16 (the float32 value rounded once).

    Raises
    ------
    FormatError
        ``quantize.dtype``, ``quantize.path``
    """
    wanted = np.dtype(dtype)
    if wanted not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=wanted)
    _check_path(path)
    found = find_recipe(q.recipe)
    decode = q.decode_scale if found.scheme == "nvfp4" else ONE
    if path in ("auto", "numba"):
        fast = _fast()
        flat = q.packed.reshape(-1, q.packed.shape[-1]), q.scales.reshape(-1, q.scales.shape[-1])
        done = fast and fast.dequantize_rows(*flat, decode, wanted, q.recipe)
        if done is not None:
            return _frozen(done.reshape(q.shape))
    if path == "reference":
        from nvfp4viz.quant.reference import dequantize_reference

        values = dequantize_reference(q, decode)
    else:
        block_scales = decode_e4m3(q.scales) if found.scheme == "nvfp4" else decode_ue8m0(q.scales)
        codes = q.codes().reshape(*q.scales.shape, found.block_size)
        with np.errstate(all="ignore"):
            values = (decode_e2m1(codes) * (block_scales * decode)[..., None]).reshape(q.shape)
    return _frozen(f32_to_bf16(values) if wanted == BFLOAT16 else values)


def _checked(x: Array, found: Recipe) -> Array:
    array = np.asarray(x)
    if array.dtype not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=array.dtype)
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
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.asarray(given, np.float32).reshape(())[()])


def _check_path(path: str) -> None:
    if path not in ("auto", "reference", "numpy", "numba"):
        raise FormatError("quantize.path", path=path)


def _quantize_rows(rows: Array, found: Recipe, stored: np.float32, path: Path) -> tuple[U8, U8]:
    _check_path(path)
    if path in ("auto", "numba"):
        fast = _fast()
        done = fast and fast.quantize_rows(rows, found.name, stored)
        if done is not None:
            return done
    if path == "reference":
        from nvfp4viz.quant.reference import quantize_reference

        return quantize_reference(rows, found.name, stored)
    bf16 = rows.dtype == BFLOAT16
    values = bf16_to_f32(rows) if bf16 else np.ascontiguousarray(rows)
    blocks = values.reshape(len(rows), -1, found.block_size)
    with np.errstate(all="ignore"):
        if found.scheme == "mxfp4":
            scales, codes = MXFP4_BLOCKS[found.name](blocks)
        else:
            scales, codes = NVFP4_BLOCKS[found.name](blocks, stored, bf16)
    return pack_nibbles(codes.reshape(len(rows), -1)), scales


def _fast() -> Any:
    try:
        from nvfp4viz.quant import fast
    except ImportError:  # TEMPORARY until quant/fast.py lands
        return None
    return fast


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
