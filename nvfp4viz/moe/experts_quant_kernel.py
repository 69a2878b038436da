"""Numba kernel for ``scaled_fp4_experts_quant``; importing this module compiles it or loads it from the cache.

`nvfp4viz.quant`'s kernel builds a table per global scale, which pays for large tensors.  In generation a layer
quantises four rows with four different scales, so this one goes through the recipe's seven operations element by
element, NaN rules included (`numerics-vllm.md` 1.1 and 1.2).
"""

# mypy: ignore-errors

from __future__ import annotations

import numba as nb
import numpy as np

from nvfp4viz.quant.jit import inline, kernel, read_only


@inline
def _rcp(x, delta):
    """``rcp.approx.ftz.f32``; `delta` is the measured table of `nvfp4viz.quant.rcp`."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(bits & np.uint32(0x80000000))
    exponent = np.int64(np.uint32(bits >> np.uint32(23)) & np.uint32(0xFF))
    mantissa = np.int64(bits & np.uint32(0x7FFFFF))
    if exponent == 255:
        return np.uint32(0x7FFFFFFF if mantissa else sign).view(np.float32)
    if exponent == 0:
        return np.uint32(sign | np.uint32(0x7F800000)).view(np.float32)
    one = np.uint32(np.uint32(mantissa) | np.uint32(0x3F800000)).view(np.float32)
    inverse = np.float32(np.float32(1) / one)
    result = np.int64(inverse.view(np.uint32)) + delta[mantissa] - ((exponent - 127) << 23)
    result = 0 if result < 0x00800000 else result
    return np.uint32(np.uint32(result) | sign).view(np.float32)


@inline
def _e4m3(s):
    """E4M3 byte: nearest, ties to even, saturating, NaN to 0x7F."""
    bits = np.int64(np.float32(s).view(np.uint32))
    size = bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return 0x7F
    sign = (bits >> 24) & 0x80
    if size < 0x3C800000:
        # Below 2^-6 the step is 2^-9: the last place of a number just above 2^14, so the addition rounds.
        moved = np.float32(np.float32(abs(s)) + np.float32(16384.0))
        return sign | (np.int64(moved.view(np.uint32)) - 0x46800000)
    byte = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    return sign | min(byte, 0x7E)


@inline
def _e2m1(y):
    """E2M1 code: nearest, ties to even, saturating, NaN to +6, the sign of a zero kept."""
    bits = np.int64(np.float32(y).view(np.uint32))
    size = bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return 7
    sign = (bits >> 28) & 8
    if size < 0x3F800000:
        # Below 1 the step is 0.5: the last place of a number just above 2^22.
        moved = np.float32(np.float32(abs(y)) + np.float32(4194304.0))
        return sign | (np.int64(moved.view(np.uint32)) & 3)
    code = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - (126 << 1)
    return sign | min(code, 7)


@kernel(
    nb.void(
        read_only(nb.u2, 2), read_only(nb.f4, 1), nb.f4, read_only(nb.i1, 1), read_only(nb.f4, 1),
        nb.u1[:, ::1], nb.u1[:, ::1],
    )
)  # fmt: skip
def quantize_rows(x, gscale, sixth, delta, e4m3_values, packed, scales):
    """Rows of BF16 bits (R, K), each with its own encode scale, to packed codes and scale bytes."""
    rows, columns = x.shape
    for r in range(rows):
        g = gscale[r]
        inverse_g = _rcp(g, delta)
        for b in range(columns // 16):
            top, numbers = 0, 0
            for j in range(16):
                size = np.int64(x[r, b * 16 + j]) & 0x7FFF
                if size <= 0x7F80:
                    numbers += 1
                    top = max(top, size)
            amax = np.uint32(np.uint32(top) << np.uint32(16)).view(np.float32) if numbers else np.float32(np.nan)
            byte = _e4m3(np.float32(g * np.float32(amax * sixth)))
            scales[r, b] = byte
            s = e4m3_values[byte]
            o = np.float32(0) if s == 0 else _rcp(np.float32(s * inverse_g), delta)
            for j in range(8):
                even = np.uint32(np.uint32(x[r, b * 16 + 2 * j]) << np.uint32(16)).view(np.float32)
                odd = np.uint32(np.uint32(x[r, b * 16 + 2 * j + 1]) << np.uint32(16)).view(np.float32)
                packed[r, b * 8 + j] = _e2m1(np.float32(even * o)) | (_e2m1(np.float32(odd * o)) << 4)
