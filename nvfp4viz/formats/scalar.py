"""Scalar references: one value at a time, in the order in which the definitions speak.

They are slow on purpose and are the truth that the array versions of ``arrays.py`` are tested against.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left

import numpy as np

from nvfp4viz.formats.cards import E2M1_VALUES, E4M3_VALUES

E4M3_NAN = 0x7F  # CUDA's conversions write the positive NaN, whatever the NaN's sign
E2M1_FROM_NAN = 0x7  # E2M1 has no NaN: the conversion instruction writes +6


_E2M1_GRID = [float(v) for v in E2M1_VALUES[:8]]
_E4M3_GRID = [float(v) for v in E4M3_VALUES[:127]]


def _nearest_even(magnitude: float, grid: list[float]) -> int:
    """Index of the nearest grid point; of two at the same distance the even index."""
    above = bisect_left(grid, magnitude)  # the first point not below the magnitude
    if grid[above] == magnitude:
        return above
    below = above - 1
    middle = (grid[below] + grid[above]) / 2  # exact: grid points have few bits
    if magnitude == middle:
        return below if below % 2 == 0 else above
    return below if magnitude < middle else above


def e2m1_code_scalar(x: float) -> int:
    """E2M1 code of one value: round to nearest, ties to even, saturate at 6, NaN to +6, keep the sign of zero.

    Source: PTX ``cvt.rn.satfinite.e2m1x2.f32``.

    >>> [e2m1_code_scalar(v) for v in (0.25, 0.75, 2.5, -0.0, 1e9, float("nan"))]
    [0, 2, 4, 8, 7, 7]
    """
    if math.isnan(x):
        return E2M1_FROM_NAN
    sign = 8 if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x) or abs(x) > 6:
        return sign | 7
    return sign | _nearest_even(abs(x), _E2M1_GRID)


def e4m3_byte_scalar(x: float, saturate: bool = True) -> int:
    """E4M3FN byte of one value: round to nearest even; above 448 saturate, or NaN when ``saturate`` is false.

    Without saturation a value becomes NaN, with its sign, where rounding would go past 448, that is above 464.
    Source: CUDA ``__nv_fp8_e4m3(float)`` (saturating) and OCP FP8 (not saturating).

    >>> [hex(e4m3_byte_scalar(v)) for v in (448.0, 1e9, 2.0**-10, -2.0**-9, float("nan"))]
    ['0x7e', '0x7e', '0x0', '0x81', '0x7f']
    """
    if math.isnan(x):
        return E4M3_NAN
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    if abs(x) > 448:
        if saturate:
            return sign | 0x7E
        # 464 lies half way between 448 and the 480 that the NaN code would be, and 448 is the even one of the two
        return sign | (0x7E if abs(x) <= 464 else E4M3_NAN)
    return sign | _nearest_even(abs(x), _E4M3_GRID)


def bf16_bits_scalar(x: float) -> int:
    """BF16 bits of a float32 value, to nearest even; a NaN keeps its sign and top bits and becomes quiet.

    >>> hex(bf16_bits_scalar(1.00390625)), hex(bf16_bits_scalar(1.01171875))
    ('0x3f80', '0x3f82')
    """
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    if math.isnan(x):
        return (bits >> 16) | 0x0040
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return high


def widen_bf16_scalar(bits: int) -> np.float32:
    """The float32 of BF16 bits, a NaN's own bits among them.

    >>> float(widen_bf16_scalar(0x3F82))
    1.015625
    """
    return np.float32(np.array(bits << 16, np.uint32).view(np.float32)[()])


def ue8m0_byte_scalar(x: float) -> int:
    """UE8M0 byte of the smallest power of two that is not below ``x`` (the "round up" cast of block scales).

    Zero and everything below 2^-127 give byte 0; above 2^127 byte 254; NaN gives 255; a negative value has no code and
    gives 255.

    >>> [ue8m0_byte_scalar(v) for v in (1.0, 1.5, 2.0, 0.0, float("inf"))]
    [127, 128, 128, 0, 254]
    """
    if math.isnan(x) or x < 0:
        return 255
    if x == 0:
        return 0
    if math.isinf(x):
        return 254
    significand, exponent = math.frexp(x)  # x = significand · 2^exponent with 0.5 <= significand < 1
    power = exponent - 1 if significand == 0.5 else exponent
    return min(max(power + 127, 0), 254)
