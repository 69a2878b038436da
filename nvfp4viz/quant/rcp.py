"""``rcp.approx.ftz.f32``: the GPU's approximate reciprocal, to the bit.

PTX promises about one ulp.  What an H200 returns was measured for all 2^32 inputs: the significand's result depends on
the significand alone, and differs from the correctly rounded 1/1.m by −1, 0 or +1 ulp; ``data/rcp_approx_h200.npz``
holds that difference for the 2^23 significands.  Subnormal inputs count as zero, subnormal results become zero.
Whether a Blackwell chip returns the same bits is not known here.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_DATA = Path(__file__).parent / "data" / "rcp_approx_h200.npz"
CANONICAL_NAN = np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = 2.0**-126


@cache
def rcp_table() -> npt.NDArray[np.int8]:
    """(2^23,) int8, read-only: ulps between the H200's reciprocal of 1.m and the correctly rounded one."""
    with np.load(_DATA) as file:
        table: npt.NDArray[np.int8] = file["delta"]
    table.setflags(write=False)
    return table


def rcp_approx_ftz_scalar(x: np.float32) -> np.float32:
    """Approximate reciprocal of one value, in the order in which the rule is stated.

    >>> hex(rcp_approx_ftz_scalar(np.float32(448)).view(np.uint32))
    '0x3b124925'
    """
    if math.isnan(x):
        return np.float32(CANONICAL_NAN.view(np.float32))
    sign = math.copysign(1.0, x)
    size = abs(float(x))
    if size < SMALLEST_NORMAL:
        return np.float32(sign * math.inf)
    if math.isinf(size):
        return np.float32(sign * 0.0)
    half, exponent = math.frexp(size)  # size = half · 2^exponent with half in [0.5, 1)
    significand, exponent = 2 * half, exponent - 1
    nearest = np.float32(1) / np.float32(significand)
    ulps = int(rcp_table()[int((significand - 1) * 2**23)])
    measured = np.int32(int(nearest.view(np.int32)) + ulps).view(np.float32)
    result = math.ldexp(float(measured), -exponent)
    return np.float32(sign * (0.0 if result < SMALLEST_NORMAL else result))


def rcp_approx_ftz(x: npt.ArrayLike) -> F32:
    """Approximate reciprocal of float32 values, shape kept.

    ±0 and subnormals give ±Inf, ±Inf gives ±0, results below 2^-126 become ±0, every NaN becomes 0x7FFFFFFF.

    >>> hex(rcp_approx_ftz(np.float32(6)).view(np.uint32))
    '0x3e2aaaab'
    """
    array = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(array).view(np.uint32).reshape(array.shape)
    sign = bits & np.uint32(0x80000000)
    exponent = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int32)
    mantissa = bits & np.uint32(0x7FFFFF)
    # 1/1.m in (0.5, 1], correctly rounded and corrected by the table; 1/(1.m · 2^e) is that, moved by the exponent.
    one = (mantissa | np.uint32(0x3F800000)).view(np.float32)
    rounded = (np.float32(1) / one).view(np.uint32).astype(np.int64) + rcp_table()[mantissa]
    result = rounded - ((exponent.astype(np.int64) - 127) << 23)
    result = np.where(result < 0x00800000, 0, result)  # a subnormal result is flushed
    result = np.where(exponent == 0, 0x7F800000, result)
    result = np.where(exponent == 255, 0, result)
    out = result.astype(np.uint32) | sign
    out = np.where((exponent == 255) & (mantissa != 0), CANONICAL_NAN, out)
    return out.astype(np.uint32).view(np.float32).reshape(array.shape)
