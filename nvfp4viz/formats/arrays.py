"""The same conversions for arrays, in NumPy.  Bit-equal to ``scalar.py``, which tests force.

Everything works on the bit patterns of float32, because comparisons on floats lose what matters here: the sign of a
zero, the sign of a NaN (x86 makes negative NaNs), and signalling NaNs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats.cards import E2M1_VALUES, E4M3_VALUES, UE8M0_VALUES

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)


def _bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    array = np.asarray(x)
    if array.dtype != np.float32:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).view(np.uint32).reshape(array.shape)


def encode_e2m1(x: npt.ArrayLike) -> U8:
    """E2M1 codes (0–15) of float32 values; see ``e2m1_code_scalar`` for the rules.  Shape kept.

    >>> encode_e2m1(np.float32([0.25, 0.75, 2.5, -0.0, 1e9, np.nan])).tolist()
    [0, 2, 4, 8, 7, 7]
    """
    bits = _bits(x)
    magnitude = bits & _ABS
    # Float bit patterns of one sign are ordered like the numbers, so the midpoints are integer thresholds.  At a tie
    # the even code wins: a midpoint with the even code on its left stays there (>), else it moves right (>=).
    code = np.zeros(bits.shape, np.uint8)
    for midpoint, inclusive in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        threshold = np.float32(midpoint).view(np.uint32)
        code += (magnitude >= threshold) if inclusive else (magnitude > threshold)
    code |= ((bits >> np.uint32(28)) & np.uint32(8)).astype(np.uint8)
    return np.where(magnitude > _INF, np.uint8(7), code)


def decode_e2m1(codes: npt.ArrayLike) -> F32:
    """Values of E2M1 codes, shape kept; only the low four bits of each code count."""
    out: F32 = E2M1_VALUES[np.asarray(codes, np.uint8) & np.uint8(15)]
    return out


def encode_e4m3(x: npt.ArrayLike, saturate: bool = True) -> U8:
    """E4M3FN bytes of float32 values; see ``e4m3_byte_scalar`` for the rules.  Shape kept.

    >>> [hex(b) for b in encode_e4m3(np.float32([448, 1e9, 2.0**-10, -(2.0**-9), np.nan]))]
    ['0x7e', '0x7e', '0x0', '0x81', '0x7f']
    """
    bits = _bits(x)
    magnitude = bits & _ABS
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    # Normal results: add half of the dropped 20 bits (less one where the kept last bit is even), drop them, rebias
    # from 127 to 7.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = rounded.astype(np.int64) - ((127 - 7) << 3)
    # Subnormal results are multiples of 2^-9: scaling by 2^9 is exact in float64 and rint ties to even.
    small = magnitude < np.float32(2.0**-6).view(np.uint32)
    values = np.where(small, magnitude, 0).astype(np.uint32).view(np.float32).astype(np.float64)
    byte = np.where(small, np.rint(values * 512.0).astype(np.int64), normal)
    top = np.float32(448.0).view(np.uint32)
    if saturate:
        byte = np.where(magnitude > top, 0x7E, byte)
    else:
        limit = np.float32(464.0).view(np.uint32)
        byte = np.where(magnitude > limit, 0x7F, np.where(magnitude > top, 0x7E, byte))
    return np.where(magnitude > _INF, np.uint8(0x7F), byte.astype(np.uint8) | sign)


def decode_e4m3(values: npt.ArrayLike) -> F32:
    """Values of E4M3FN bytes, shape kept; 0x7F and 0xFF are NaN."""
    out: F32 = E4M3_VALUES[np.asarray(values, np.uint8)]
    return out


def widen_e2m1(codes: npt.ArrayLike) -> U8:
    """E4M3 bytes with the values of E2M1 codes, shape kept: what the tensor core makes of FP4 beside FP8.

    Exact, since E4M3 has more of everything: the sign moves to bit 7, the exponent is rebiased from 1 to 7, the
    mantissa bit becomes the upper one of three.  E2M1's one subnormal, 0.5, is a normal number of E4M3.

    >>> [hex(byte) for byte in widen_e2m1([0x1, 0x3, 0x7, 0x8, 0xF])]
    ['0x30', '0x3c', '0x4c', '0x80', '0xcc']
    """
    array = np.asarray(codes, np.uint8)
    sign, magnitude = (array & np.uint8(8)) << np.uint8(4), array & np.uint8(7)
    normal = ((magnitude >> np.uint8(1)) + np.uint8(6)) << np.uint8(3) | (magnitude & np.uint8(1)) << np.uint8(2)
    subnormal = np.where(magnitude == 1, np.uint8(6 << 3), np.uint8(0))
    widened: U8 = sign | np.where(magnitude > 1, normal, subnormal)
    return widened


def encode_ue8m0(x: npt.ArrayLike) -> U8:
    """UE8M0 bytes of the smallest powers of two not below ``x``; see ``ue8m0_byte_scalar``.  Shape kept."""
    bits = _bits(x)
    magnitude = bits & _ABS
    field = magnitude >> np.uint32(23)
    up = (magnitude & np.uint32(0x7FFFFF)) != 0
    byte = np.minimum(field + up, np.uint32(254))
    # Float32 subnormals: exponent field 0 means 2^-126 · fraction, and 2^-127 itself is the fraction 0.5.
    byte = np.where(field == 0, (magnitude > np.uint32(0x400000)).astype(np.uint32), byte)
    bad = (magnitude > _INF) | ((bits != magnitude) & (magnitude != 0))
    return np.where(bad, np.uint32(255), byte).astype(np.uint8)


def decode_ue8m0(values: npt.ArrayLike) -> F32:
    """Values of UE8M0 bytes, shape kept: 2^(byte-127), byte 255 is NaN, byte 0 is 2^-127 (a float32 subnormal)."""
    out: F32 = UE8M0_VALUES[np.asarray(values, np.uint8)]
    return out


def f32_to_bf16(x: npt.ArrayLike) -> npt.NDArray[ml_dtypes.bfloat16]:
    """BF16 of float32 values, to nearest even; NaNs become quiet and keep sign and top bits.  Shape kept."""
    bits = _bits(x)
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs are converted, not refused
        rounded = values.astype(ml_dtypes.bfloat16)
        nan = values != values
    if not nan.any():
        return rounded
    # ml_dtypes gives every NaN the same bits.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet.astype(np.uint16), rounded.view(np.uint16)).view(ml_dtypes.bfloat16)


def bf16_to_f32(x: npt.ArrayLike) -> F32:
    """Float32 of BF16 values, exact: the bits move up and nothing else happens (a signalling NaN stays one)."""
    out: F32 = np.asarray(x, ml_dtypes.bfloat16).astype(np.float32)
    return out
