"""The Numba path of quantise and dequantise: the bits of ``quant/nvfp4.py`` and ``mxfp4.py``, at the speed of memory.

Importing this module loads Numba.  ``quant/api.py`` decides when to call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_to_f32, f32_to_bf16, pack_nibbles
from nvfp4viz.quant import mxfp4
from nvfp4viz.quant.decode import element_values, multipliers
from nvfp4viz.quant.fast_kernels import look_up_bf16, look_up_f32, quantize_flat, quantize_flat_mx
from nvfp4viz.quant.nvfp4 import CT_ZERO_SCALE, NVFP4_RULES, ONE_SIXTH, SIX, factor_table, quantize_blocks
from nvfp4viz.quant.rcp import rcp_approx_ftz
from nvfp4viz.quant.threads import PARTS, run_parts
from nvfp4viz.quant.types import QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCK, MX_BLOCK = 16, 32
THREADING_PAYS = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_NO_F32, _NO_BF16 = np.empty(0, np.float32), np.empty(0, np.uint16)
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How a kernel gets the scale from a block's maximum.

    One operation with ``p``, perhaps a rounding to BF16, one with ``q``; then what a zero becomes, a floor, and after
    rounding to E4M3 the byte that stands for zero.
    """

    divide_first: bool
    p: np.float32
    round_bf16: bool
    divide_then: bool
    q: np.float32
    zero_is: np.float32 = _ZERO
    low: np.float32 = _NO_FLOOR
    zero_byte: int = 0
    drop_zero_sign: bool = False


def scale_rule(recipe: str, g: np.float32, bf16: bool) -> ScaleRule:
    """The NVFP4 recipes in the kernel's terms; a test compares each with ``quant/nvfp4.py``."""
    if recipe == "ieee":
        return ScaleRule(True, SIX, False, False, g)
    if recipe == "vllm-cuda":
        return ScaleRule(False, np.float32(rcp_approx_ftz(SIX)), False, False, g)
    if recipe == "vllm-emulation":
        return ScaleRule(False, ONE_SIXTH, False, False, g, drop_zero_sign=True)
    if recipe == "modelopt":
        with np.errstate(all="ignore"):
            six_g = SIX * g
        one, floor = np.float32(1), np.float32(2.0**-9)
        return ScaleRule(True, six_g, False, False, one, zero_is=one, low=floor, drop_zero_sign=True)
    if recipe == "torchao":
        return ScaleRule(True, SIX, False, True, g, low=np.float32(2.0**-6))
    if recipe == "compressed-tensors":
        return ScaleRule(True, SIX, bf16, False, g, zero_byte=CT_ZERO_SCALE, drop_zero_sign=True)
    raise AssertionError(f"no rule for {recipe}")


ZERO_SIGNS = {"deepgemm-ceil": 1, "modelopt-mxfp4": 2}
"""MXFP4 recipes whose ties go toward zero, with what they do to the sign of a zero: drop it, or always set it."""


def quantize_rows(rows: Array, recipe: str, global_scale: np.float32) -> tuple[U8, U8]:
    """Quantise ``rows (R, K)``, BF16 or float32: packed (R, K//2) uint8, scales (R, K//n) uint8."""
    if recipe in mxfp4.MXFP4_BLOCKS:
        return _quantize_mx(rows, recipe)
    bf16 = rows.dtype == BFLOAT16
    g = np.float32(global_scale)
    rule = scale_rule(recipe, g, bf16)
    flat = np.require(rows, requirements=["C", "A"]).reshape(-1)
    blocks = len(flat) // BLOCK
    table = factor_table(recipe, g)
    divides = NVFP4_RULES[recipe].divides
    bad = np.isnan(table) | (table == 0) if divides else ~np.isfinite(table)
    packed, scales = np.empty(blocks * 8, np.uint8), np.empty(blocks, np.uint8)
    odd = np.empty(blocks, np.bool_)
    wide, narrow = (_NO_F32, flat.view(np.uint16)) if bf16 else (flat, _NO_BF16)
    counts = [0] * PARTS

    def part(index: int, parts: int) -> None:
        low, high = blocks * index // parts, blocks * (index + 1) // parts
        elements = slice(low * BLOCK, high * BLOCK)
        counts[index] = quantize_flat(
            wide[elements], narrow[elements], rule.divide_first, rule.p, rule.round_bf16, rule.divide_then, rule.q,
            rule.zero_is, rule.low, rule.zero_byte, table, bad, divides,
            np.float32(0.0) if rule.drop_zero_sign else np.float32(-0.0),
            packed[low * 8 : high * 8], scales[low:high], odd[low:high],
        )  # fmt: skip

    run_parts(part, len(flat) >= THREADING_PAYS)
    if sum(counts):
        _redo(flat, lambda x: quantize_blocks(recipe, x, g, bf16), np.flatnonzero(odd), packed, scales)
    return packed.reshape(len(rows), -1), scales.reshape(len(rows), -1)


def _quantize_mx(rows: Array, recipe: str) -> tuple[U8, U8]:
    """The same for MXFP4, whose scale is a step function of the block's maximum."""
    bf16 = rows.dtype == BFLOAT16
    flat = np.require(rows, requirements=["C", "A"]).reshape(-1)
    blocks = len(flat) // MX_BLOCK
    base, step = mxfp4.scale_steps(recipe)
    table = mxfp4.factor_table(recipe)
    packed, scales = np.empty(blocks * 16, np.uint8), np.empty(blocks, np.uint8)
    odd = np.empty(blocks, np.bool_)
    wide, narrow = (_NO_F32, flat.view(np.uint16)) if bf16 else (flat, _NO_BF16)
    counts = [0] * PARTS

    def part(index: int, parts: int) -> None:
        low, high = blocks * index // parts, blocks * (index + 1) // parts
        elements = slice(low * MX_BLOCK, high * MX_BLOCK)
        counts[index] = quantize_flat_mx(
            wide[elements], narrow[elements], base, step, table, recipe in ZERO_SIGNS, ZERO_SIGNS.get(recipe, 0),
            packed[low * 16 : high * 16], scales[low:high], odd[low:high],
        )  # fmt: skip

    run_parts(part, len(flat) >= THREADING_PAYS)
    if sum(counts):
        _redo(flat, lambda x: mxfp4.quantize_blocks(recipe, x), np.flatnonzero(odd), packed, scales)
    return packed.reshape(len(rows), -1), scales.reshape(len(rows), -1)


def _redo(
    flat: Array, numpy_path: Callable[[F32], tuple[U8, U8]], which: npt.NDArray[np.intp], packed: U8, scales: U8
) -> None:
    """The NumPy path for the blocks that the kernel only flagged: NaN, infinity, or a factor that is no number."""
    blocks = flat.reshape(len(scales), -1)
    for at in range(0, len(which), 1 << 16):  # a slice at a time: a tensor of NaN would need many copies of itself
        some = which[at : at + (1 << 16)]
        x = blocks[some]
        new_scales, codes = numpy_path((bf16_to_f32(x) if flat.dtype == BFLOAT16 else x)[None])
        scales[some] = new_scales[0]
        packed.reshape(len(scales), -1)[some] = pack_nibbles(codes[0])


def dequantize_tensor(q: QuantizedTensor, dtype: npt.DTypeLike = np.float32) -> Array:
    """Values of a quantised tensor of any recipe, as float32 or BF16, shape ``q.shape``; see ``quant/decode.py``."""
    bf16 = np.dtype(dtype) == BFLOAT16
    with np.errstate(all="ignore"):
        table = multipliers(q)[:, None] * element_values(q.recipe)
    table[np.isnan(table)] = np.nan
    values = np.ascontiguousarray(table, np.float32).reshape(-1)
    packed = np.require(q.packed, requirements="C").reshape(-1)
    if packed.ctypes.data % 8:  # mapped from a file: the kernel reads whole words
        packed = packed.copy()
    words, scales = packed.view(np.uint64), np.require(q.scales, requirements="C").reshape(-1)
    shift = q.block_size // BLOCK - 1
    out = np.empty((len(words), BLOCK), BFLOAT16 if bf16 else np.float32)

    def part(index: int, parts: int) -> None:
        low, high = (len(scales) * i // parts for i in (index, index + 1))
        blocks = slice(low << shift, high << shift)
        if bf16:
            bits = f32_to_bf16(values).view(np.uint16)
            look_up_bf16(words[blocks], scales[low:high], shift, bits, out.view(np.uint16)[blocks])
        else:
            look_up_f32(words[blocks], scales[low:high], shift, values, out[blocks])

    run_parts(part, out.size >= THREADING_PAYS)
    return out.reshape(q.shape)
