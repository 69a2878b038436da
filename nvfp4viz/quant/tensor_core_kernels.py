"""The tensor-core product as a Numba kernel: the same bits as ``quant/tensor_core.py``, fast.

Floats carry the integers, because the vector units multiply floats fastest, and every one of them is exact:

* a code times 2 times a scale significand times 8 is an integer of at most 12 * 15 = 180; a dot of 16 products of two
  of those stays below 2^19, so f32 holds every partial sum, in any order, with or without fused multiply-add;
* multiplying by a power of two and truncating to an integer is exact for a 24-bit significand;
* the sum of five aligned terms is below 2^49, so f64 holds it.

Only the last line rounds, and it truncates as rule 7 says.  ``tests/quant/test_tensor_core.py`` forces equal bits.

Layout: the other operand is decoded, 64 rows of N and one step of K at a time, into a 16 KiB tile with N innermost, so
that all loops run over N and the tile stays in the first-level cache while every row of A passes over it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numba as nb
import numpy as np

from nvfp4viz.quant.jit import inline, kernel, read_only
from nvfp4viz.quant.tensor_core_step import (
    CANONICAL_NAN,
    GROUP,
    STEP,
    ZERO_EXPONENT,
)

TILE = 64
"""Columns of the result worked on together."""

_NAN = np.uint32(CANONICAL_NAN).view(np.float32)


_F4 = read_only(nb.f4, 1)
_F4_2 = read_only(nb.f4, 2)
_I4 = read_only(nb.i4, 1)
_I8 = read_only(nb.i8, 1)
_U1 = read_only(nb.u1, 1)
_U1_2 = read_only(nb.u1, 2)
_U1_3 = read_only(nb.u1, 3)


@kernel(nb.void(_U1_2, _U1_2, _F4, _I4, _F4, nb.i8, nb.f4[::1], nb.i4[::1], nb.u1[::1]))
def expand_rows(packed, scales, significands, exponents, pairs, block_groups, values, row_exponents, row_nan):
    """Decode A: ``values (rows*steps*64)``, ``row_exponents (rows*steps*4)``, ``row_nan (rows)``, zero-padded."""
    rows, half = packed.shape
    groups = half // 8
    padded = (groups + 3) // 4 * 4
    for row in range(rows):
        for g in range(padded):
            at = (row * padded + g) * GROUP
            if g >= groups:
                row_exponents[row * padded + g] = 2 * ZERO_EXPONENT
                for j in range(GROUP):
                    values[at + j] = 0.0
                continue
            scale = scales[row, g // block_groups]
            significand = significands[scale]
            row_exponents[row * padded + g] = exponents[scale]
            row_nan[row] |= np.uint8(significand < 0)
            for j in range(8):
                byte = np.int64(packed[row, g * 8 + j]) * 2
                values[at + 2 * j] = pairs[byte] * significand
                values[at + 2 * j + 1] = pairs[byte + 1] * significand


@inline
def _doubled(code):
    """Twice the value of an E2M1 code, by arithmetic: a table would be read one element at a time."""
    size = np.int32(code & np.int32(7))
    over4 = np.int32(size - np.int32(4))
    over6 = np.int32(size - np.int32(6))
    size = np.int32(size + (over4 if over4 > np.int32(0) else np.int32(0)))  # 4, 5, 6 stand for 4, 6, 8
    over6 = over6 if over6 > np.int32(0) else np.int32(0)
    size = np.int32(size + np.int32(over6 + over6))  # and 7 for 12
    sign = np.int32(np.int32(code & np.int32(8)) << np.int32(28))
    return np.int32(np.float32(size).view(np.int32) | sign).view(np.float32)


@inline
def _expand_tile(
    packed,
    scales,
    first,
    count,
    step,
    significands,
    exponents,
    block_groups,
    columns,
    tile,
    tile_significands,
    tile_exponents,
    tile_nan,
):
    """Decode one step of ``count`` rows of B, N innermost: ``tile (64, TILE)``, ``tile_exponents (4, TILE)``.

    ``columns (32, TILE)`` and ``tile_significands (4, TILE)`` are room to work in.
    """
    half = packed.shape[1]
    valid = min(32, half - step * 32)
    if valid < 32:
        columns[valid * TILE :] = 0
        tile_significands[valid // 8 * TILE :] = 0
        tile_exponents[valid // 8 * TILE :] = 2 * ZERO_EXPONENT
    for n in range(count):
        row = first + n
        for j in range(valid):
            columns[j * TILE + n] = packed[row, step * 32 + j]
        for g in range(valid // 8):
            scale = scales[row, (step * 4 + g) // block_groups]
            significand = significands[scale]
            tile_significands[g * TILE + n] = significand
            tile_exponents[g * TILE + n] = exponents[scale]
            tile_nan[n] |= np.uint8(significand < 0)
    for j in range(32):
        g = j // 8
        for n in range(TILE):
            byte = np.int32(columns[j * TILE + n])
            significand = tile_significands[g * TILE + n]
            tile[2 * j * TILE + n] = _doubled(byte) * significand
            tile[(2 * j + 1) * TILE + n] = _doubled(np.int32(byte >> 4)) * significand


@inline
def _dots(a, at, tile, g, dots):
    """``dots[g, n] = Σ_k a[k] * tile[k, n]`` over the 16 elements of group ``g``: integers below 2^19."""
    # Eight elements at a time: eight broadcast values and the sum fit the sixteen vector registers.
    for half in range(2):
        a0, a1, a2, a3 = a[at], a[at + 1], a[at + 2], a[at + 3]
        a4, a5, a6, a7 = a[at + 4], a[at + 5], a[at + 6], a[at + 7]
        base = (g * GROUP + half * 8) * TILE
        for n in range(TILE):
            b = base + n
            even = a0 * tile[b] + a1 * tile[b + TILE] + a2 * tile[b + 2 * TILE] + a3 * tile[b + 3 * TILE]
            odd = a4 * tile[b + 4 * TILE] + a5 * tile[b + 5 * TILE] + a6 * tile[b + 6 * TILE] + a7 * tile[b + 7 * TILE]
            dots[g * TILE + n] = even + odd if half == 0 else dots[g * TILE + n] + (even + odd)
        at += 8


@inline
def _power(exponent):
    """2**exponent as f32, for exponents of normal numbers."""
    return np.int32(np.int32(exponent + 127) << 23).view(np.float32)


@inline
def _align(value, exponent, top, fraction_bits):
    """``value * 2**(exponent - top + fraction_bits)`` truncated to an integer.

    A term 90 binades down has no bit left, and stopping there keeps the power of two a normal number.
    """
    down = np.int32(exponent - top)
    down = down if down > np.int32(-90) else np.int32(-90)
    return np.trunc(value * _power(np.int32(down + fraction_bits)))


# Numba adds two int32 as int64; the int32() around each sum keeps eight lanes in a vector register instead of four.
@inline
def _accumulate(dots, e0, e1, e2, e3, tile_exponents, acc, acc_at, terms, tops):
    """Rules 5 to 7 for one row of A and one tile."""
    for n in range(TILE):
        bits = np.float32(acc[acc_at + n]).view(np.int32)
        field = np.int32(np.int32(bits >> 23) & 255)
        size = np.float32(np.int32(np.int32(bits & 0x7FFFFF) | (np.int32(1 << 23) if field > 0 else np.int32(0))))
        signed = -size if bits < 0 else size
        e = np.int32((field if field > np.int32(1) else np.int32(1)) - 127)
        x0 = np.int32(e0 + tile_exponents[n])
        x1 = np.int32(e1 + tile_exponents[TILE + n])
        x2 = np.int32(e2 + tile_exponents[2 * TILE + n])
        x3 = np.int32(e3 + tile_exponents[3 * TILE + n])
        x01 = x0 if x0 > x1 else x1
        x23 = x2 if x2 > x3 else x3
        top = x01 if x01 > x23 else x23
        top = top if top > e else e
        terms[n] = _align(signed, e, top, 12)
        terms[TILE + n] = _align(dots[n], x0, top, 27)
        terms[2 * TILE + n] = _align(dots[TILE + n], x1, top, 27)
        terms[3 * TILE + n] = _align(dots[2 * TILE + n], x2, top, 27)
        terms[4 * TILE + n] = _align(dots[3 * TILE + n], x3, top, 27)
        tops[n] = top
    for n in range(TILE):
        total = np.float64(0.0) + np.float64(terms[n])  # 0.0 first: an exact zero sum is +0 even if every term is -0
        total += np.float64(terms[TILE + n])
        total += np.float64(terms[2 * TILE + n])
        total += np.float64(terms[3 * TILE + n])
        total += np.float64(terms[4 * TILE + n])
        unit = np.int64((np.int64(tops[n]) - 35 + 1023) << 52)
        value = total * np.int64(unit).view(np.float64)
        # Keep 24 bits of the 53, or, below f32's normal range, whole multiples of 2^-149: both toward zero.
        normal = np.int64(np.float64(value).view(np.int64) & np.int64(-(1 << 29))).view(np.float64)
        subnormal = np.trunc(value * 2.0**149) * 2.0**-149
        result = np.float32(subnormal if abs(value) < 2.0**-126 else normal)
        before = acc[acc_at + n]
        acc[acc_at + n] = result if abs(before) < np.inf else before


@kernel(
    nb.void(_F4, _I4, _U1, _I8, _I8, _U1_3, _U1_3, _F4_2, nb.b1, nb.f4[:, ::1], _F4, _I4, nb.i8, nb.i8, nb.i8),
)
def product(
    a, a_exponents, a_nan, order, starts, b_packed, b_scales, c, has_c, out, significands, exponents,
    block_groups, part, parts,
):  # fmt: skip
    """Every ``parts``-th tile, from ``part`` on, of all experts.

    ``order`` lists the rows of A by expert and ``starts`` where each expert's rows begin in it.
    """
    experts, columns, half = b_packed.shape
    steps = (half + 31) // 32
    tiles = (columns + TILE - 1) // TILE
    tile = np.zeros(STEP * TILE, np.float32)
    tile_exponents = np.zeros(4 * TILE, np.int32)
    tile_nan = np.zeros(TILE, np.uint8)
    columns_of_bytes = np.zeros(32 * TILE, np.uint8)
    tile_significands = np.zeros(4 * TILE, np.float32)
    dots = np.empty(4 * TILE, np.float32)
    terms = np.empty(5 * TILE, np.float32)
    tops = np.empty(TILE, np.int32)
    most = 0
    for expert in range(experts):
        most = max(most, starts[expert + 1] - starts[expert])
    acc = np.zeros(most * TILE, np.float32)
    job = 0
    for expert in range(experts):
        low, high = starts[expert], starts[expert + 1]
        if low == high:
            continue
        for tile_index in range(tiles):
            job += 1
            if job % parts != part:
                continue
            first = tile_index * TILE
            count = min(TILE, columns - first)
            tile_nan[:] = 0
            for i in range(high - low):
                for n in range(count):
                    acc[i * TILE + n] = c[order[low + i], first + n] if has_c else np.float32(0)
            for step in range(steps):
                _expand_tile(
                    b_packed[expert], b_scales[expert], first, count, step, significands, exponents,
                    block_groups, columns_of_bytes, tile, tile_significands, tile_exponents, tile_nan,
                )  # fmt: skip
                for i in range(high - low):
                    at = (order[low + i] * steps + step) * 4
                    for g in range(4):
                        _dots(a, (at + g) * GROUP, tile, g, dots)
                    _accumulate(
                        dots, a_exponents[at], a_exponents[at + 1], a_exponents[at + 2], a_exponents[at + 3],
                        tile_exponents, acc, i * TILE, terms, tops,
                    )  # fmt: skip
            for i in range(high - low):
                row = order[low + i]
                for n in range(count):
                    value = acc[i * TILE + n]
                    # A NaN scale anywhere, or a NaN in c, ends as the canonical NaN whatever came between.
                    out[row, first + n] = _NAN if a_nan[row] or tile_nan[n] or value != value else value
