"""The recipes one block at a time, in float32 scalars, in the order in which the sources compute.

Slow on purpose: this file is for reading, and is the truth that the NumPy and Numba paths must equal bit by bit.  Every
``f32(a op b)`` is one IEEE operation in float32, which is what a GPU without fast-math and FMA contraction does.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import (
    bf16_bits_scalar,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    e2m1_code_scalar,
    e4m3_byte_scalar,
    pack_nibbles,
    ue8m0_byte_scalar,
)
from nvfp4viz.quant.rcp import rcp_approx_ftz
from nvfp4viz.quant.recipes import find_recipe
from nvfp4viz.quant.types import QuantizedTensor

F = np.float32
U8 = npt.NDArray[np.uint8]
ZERO, ONE, SIX = F(0), F(1), F(6)


def _rcp(x: np.float32) -> np.float32:
    return F(rcp_approx_ftz(x)[()])


def _decode_e4m3(byte: int) -> np.float32:
    return F(decode_e4m3(byte)[()])


def _max(x: list[np.float32], propagate_nan: bool) -> np.float32:
    numbers = [abs(v) for v in x if not math.isnan(v)]
    if not numbers or (propagate_nan and len(numbers) < len(x)):
        return F(np.nan)
    return max(numbers)


def _clamp(x: np.float32, low: float, high: float) -> np.float32:
    return x if math.isnan(x) else F(min(max(x, F(low)), F(high)))


def _bf16(x: np.float32) -> np.float32:
    return F(np.array(bf16_bits_scalar(float(x)) << 16, np.uint32).view(np.float32)[()])


def _code_without_zero_sign(y: np.float32) -> int:
    return 0 if y == 0 else e2m1_code_scalar(float(y))


def nvfp4_block(x: list[np.float32], g: np.float32, recipe: str, bf16: bool) -> tuple[int, list[int]]:
    """Scale byte and 16 codes of one block; ``g`` as the recipe stores it, ``bf16`` the tensor's dtype."""
    if recipe == "ieee":
        byte = e4m3_byte_scalar(float(g * (_max(x, False) / SIX)))
        s = _decode_e4m3(byte)
        o = ZERO if s == 0 else g / s
        return byte, [e2m1_code_scalar(float(v * o)) for v in x]
    if recipe == "vllm-cuda":
        byte = e4m3_byte_scalar(float(g * (_max(x, False) * _rcp(SIX))))
        s = _decode_e4m3(byte)
        o = ZERO if s == 0 else _rcp(s * _rcp(g))
        return byte, [e2m1_code_scalar(float(v * o)) for v in x]
    if recipe == "vllm-emulation":
        byte = e4m3_byte_scalar(float(g * (_max(x, True) * (ONE / SIX))))
        o = _inverse_or_tiny(_decode_e4m3(byte) * _inverse_or_tiny(g))
        return byte, [0 if math.isnan(v * o) else _code_without_zero_sign(v * o) for v in x]
    if recipe == "modelopt":
        scale = _max(x, True) / (SIX * g)
        scale = ONE if scale == 0 else scale
        byte = e4m3_byte_scalar(float(_clamp(scale, 2.0**-9, 448.0)))
        divisor = _decode_e4m3(byte) * g
        return byte, [_code_without_zero_sign(v / divisor) for v in x]
    if recipe == "torchao":
        byte = e4m3_byte_scalar(float(_clamp((_max(x, True) / SIX) / g, 2.0**-6, 448.0)))
        o = (ONE / g) / _decode_e4m3(byte)
        return byte, [_torchao_code(v * o) for v in x]
    assert recipe == "compressed-tensors", recipe
    sixth = _max(x, True) / SIX
    byte = e4m3_byte_scalar(float(_clamp(g * (_bf16(sixth) if bf16 else sixth), -448.0, 448.0)))
    s = _decode_e4m3(byte)
    if s == 0:
        byte, s = 0x20, F(0.125)
    divisor = s / g
    return byte, [0 if math.isnan(v / divisor) else _code_without_zero_sign(v / divisor) for v in x]


def _inverse_or_tiny(x: np.float32) -> np.float32:
    return F(1e-8) if x == 0 else ONE / x


def _torchao_code(y: np.float32) -> int:
    """torchao rounds by integer arithmetic on the bits, in which a NaN comes out as 1.5 with the NaN's sign."""
    if math.isnan(y):
        return 3 | (8 if np.signbit(y) else 0)
    return e2m1_code_scalar(float(y))


def _floor_log2(x: np.float32) -> int:
    return math.frexp(float(x))[1] - 1


def _ties_toward_zero(y: np.float32) -> int:
    return sum(bool(abs(y) > F(m)) for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))


def mxfp4_block(x: list[np.float32], recipe: str) -> tuple[int, list[int]]:
    """Scale byte and 32 codes of one block."""
    if recipe == "ocp-floor":
        top = _max(x, True)
        if not math.isfinite(top):
            return 255, [e2m1_code_scalar(math.nan) for _ in x]
        byte = 0 if top == 0 else min(max(_floor_log2(top) - 2 + 127, 0), 254)
        return byte, [e2m1_code_scalar(float(v * F(2.0 ** (127 - byte)))) for v in x]
    if recipe == "vllm-even":
        top = _max(x, False)
        bits = 0x7FFFFFFF if math.isnan(top) else int(top.view(np.uint32))
        exponent = ((bits + (1 << 21)) >> 23) & 0xFF
        byte = min(exponent - 2, 254) if exponent > 2 else 0
        o = ZERO if byte == 0 else F(2.0 ** (127 - byte))
        return byte, [e2m1_code_scalar(float(v * o)) for v in x]
    if recipe == "flashinfer-ceil":
        byte = ue8m0_byte_scalar(float(_max(x, False) * _rcp(SIX)))
        o = ZERO if byte == 0 or byte >= 254 else F(2.0 ** (127 - byte))
        return byte, [e2m1_code_scalar(float(v * o)) for v in x]
    if recipe == "deepgemm-ceil":
        top = _max(x, True)
        byte = ue8m0_byte_scalar(float((F(1e-4) if top < F(1e-4) else top) / SIX))
        byte = min(max(byte, 1), 254)
        o = F(2.0 ** (127 - byte))
        codes = [_ties_toward_zero(v * o) for v in x]
        return byte, [code | 8 if v * o < 0 and code else code for v, code in zip(x, codes, strict=True)]
    assert recipe == "modelopt-mxfp4", recipe
    byte = ue8m0_byte_scalar(float(_max(x, True) / SIX))
    byte = 0 if byte == 255 else byte
    scale = F(decode_ue8m0(byte)[()])
    return byte, [_ties_toward_zero(v / scale) | (0 if v / scale > 0 else 8) for v in x]


def quantize_reference(rows: npt.NDArray[Any], recipe: str, g: np.float32) -> tuple[U8, U8]:
    """Packed bytes and scale bytes of ``rows (R, K)``, block by block."""
    found = find_recipe(recipe)
    bf16 = rows.dtype == np.dtype(ml_dtypes.bfloat16)
    blocks = rows.reshape(len(rows), -1, found.block_size)
    scales = np.zeros(blocks.shape[:2], np.uint8)
    codes = np.zeros(blocks.shape, np.uint8)
    with np.errstate(all="ignore"):
        for r, b in np.ndindex(*scales.shape):
            x = [F(v) for v in blocks[r, b]]
            scales[r, b], codes[r, b] = (
                nvfp4_block(x, g, recipe, bf16) if found.scheme == "nvfp4" else mxfp4_block(x, recipe)
            )
    return pack_nibbles(codes.reshape(len(rows), -1)), scales


def dequantize_reference(q: QuantizedTensor, decode: np.float32) -> npt.NDArray[np.float32]:
    """Values ``(..., K)`` of a quantised tensor: ``code · (block scale · decode scale)``, one product after another."""
    nvfp4 = find_recipe(q.recipe).scheme == "nvfp4"
    codes = q.codes().reshape(-1, q.block_size)
    values = np.zeros(codes.shape, np.float32)
    with np.errstate(all="ignore"):
        for block, byte in enumerate(q.scales.reshape(-1)):
            scale = _decode_e4m3(int(byte)) if nvfp4 else F(decode_ue8m0(byte)[()])
            for i, code in enumerate(codes[block]):
                values[block, i] = F(decode_e2m1(code)[()]) * F(scale * decode)
    return values.reshape(q.shape)
