"""The K = 32 tensor-core product as a Numba kernel: the same bits as ``quant/tensor_core_k32.py``, fast.

Integers throughout: a product of two significands has at most 8 bits, shifted to 25 fractional places it stays below
2^27, and 33 such terms below 2^33.  The inner loops run over the 32 products of a step, which lie side by side.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numba as nb
import numpy as np

from nvfp4viz.quant.jit import inline, kernel, read_only
from nvfp4viz.quant.tensor_core_step import CANONICAL_NAN

_NAN = np.uint32(CANONICAL_NAN).view(np.float32)
_STEP = 32
_UNIT_BITS = 6  # a significand is in eighths, so a product is in 64ths
_PLACES = 25

_I4_2 = read_only(nb.i4, 2)
_U1_2 = read_only(nb.u1, 2)
_F4_2 = read_only(nb.f4, 2)


@inline
def _infinite_terms(a_significand, a_special, b_significand, b_special, m, n, at):
    """0 without special products, else 1 or -1 for an infinity and 2 for NaN."""
    sign = 0
    for k in range(at, at + _STEP):
        left, right = a_special[m, k], b_special[n, k]
        if left == 0 and right == 0:
            continue
        if left == 2 or right == 2:
            return 2
        # The significand of an infinity is its sign, so a zero here is a finite zero: infinity times zero.
        product = a_significand[m, k] * b_significand[n, k]
        now = 1 if product > 0 else -1
        if product == 0 or sign == -now:
            return 2
        sign = now
    return sign


@inline
def _step(a_significand, a_exponent, b_significand, b_exponent, scale, m, n, at, acc):
    """Rules 3 to 6 for one output and 32 finite products."""
    bits = np.float32(acc).view(np.int32)
    field = (bits >> 23) & 255
    size = np.int64(bits & 0x7FFFFF) | (np.int64(1 << 23) if field > 0 else np.int64(0))
    e = np.int32((field if field > 1 else 1) - 127)
    top = e
    # Numba adds two int32 as int64; the int32() around each sum keeps eight lanes in a vector register.
    for k in range(at, at + _STEP):
        here = np.int32(np.int32(a_exponent[m, k] + b_exponent[n, k]) + scale)
        top = here if here > top else top
    down = np.int64(top - e)
    down = down if down < 63 else np.int64(63)
    size = (size << (_PLACES - 23)) >> down
    total = -size if bits < 0 else size
    for k in range(at, at + _STEP):
        shift = np.int32(top - np.int32(np.int32(a_exponent[m, k] + b_exponent[n, k]) + scale))
        shift = shift if shift < np.int32(31) else np.int32(31)
        product = np.int32(a_significand[m, k] * b_significand[n, k])
        size32 = np.int32(-product) if product < np.int32(0) else product
        term = np.int32(np.int32(size32 << np.int32(_PLACES - _UNIT_BITS)) >> shift)
        total += np.int32(-term) if product < np.int32(0) else term
    unit = np.int64((np.int64(top) - _PLACES + 1023) << 52)
    value = np.float64(total) * unit.view(np.float64)
    # Keep 24 bits of the 53, or, below f32's normal range, whole multiples of 2^-149: both toward zero.
    normal = np.int64(np.float64(value).view(np.int64) & np.int64(-(1 << 29))).view(np.float64)
    subnormal = np.trunc(value * 2.0**149) * 2.0**-149
    result = np.float32(subnormal if abs(value) < 2.0**-126 else normal)
    return np.float32(0) if total == 0 else result


@kernel(
    nb.void(
        _I4_2, _I4_2, _U1_2, _U1_2, _I4_2, _U1_2, _I4_2, _I4_2, _U1_2, _U1_2, _I4_2, _U1_2,
        _F4_2, nb.b1, nb.f4[:, ::1], nb.i8, nb.i8,
    )
)  # fmt: skip
def product_k32(
    a_significand, a_exponent, a_special, a_any, a_scale, a_scale_nan,
    b_significand, b_exponent, b_special, b_any, b_scale, b_scale_nan,
    c, has_c, out, part, parts,
):  # fmt: skip
    """Every ``parts``-th row of the result, from ``part`` on.

    Element arrays are ``(rows, steps*32)``; scales, and whether any element of a step is special, ``(rows, steps)``.
    """
    rows, columns = out.shape
    steps = a_scale.shape[1]
    for m in range(part, rows, parts):
        for n in range(columns):
            acc = c[m, n] if has_c else np.float32(0)
            nan = acc != acc
            for s in range(steps):
                if a_scale_nan[m, s] or b_scale_nan[n, s]:
                    nan = True
                if nan:
                    break
                at = s * _STEP
                infinite = 0
                if a_any[m, s] or b_any[n, s]:
                    infinite = _infinite_terms(a_significand, a_special, b_significand, b_special, m, n, at)
                if abs(acc) == np.inf:
                    own = 1 if acc > 0 else -1
                    nan = infinite == 2 or infinite == -own
                elif infinite == 2:
                    nan = True
                elif infinite != 0:
                    acc = np.float32(np.inf) if infinite > 0 else np.float32(-np.inf)
                else:
                    scale = np.int32(a_scale[m, s] + b_scale[n, s])
                    acc = _step(a_significand, a_exponent, b_significand, b_exponent, scale, m, n, at, acc)
            out[m, n] = _NAN if nan else acc
