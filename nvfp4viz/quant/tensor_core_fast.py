"""The tensor-core product as a Numba kernel: the same bits as ``quant/tensor_core.py``, fast.

Floats carry the integers, because the vector units multiply floats fastest, and every one of them is exact:

* a code times 2 times a scale significand times 8 is an integer of at most 12 * 15 = 180; a dot of 16 products of two of
  those stays below 2^19, so f32 holds every partial sum, in any order, with or without fused multiply-add;
* multiplying by a power of two and truncating to an integer is exact for a 24-bit significand;
* the sum of five aligned terms is below 2^49, so f64 holds it.

Only the last line rounds, and it truncates as rule 7 says.  ``tests/quant/test_tensor_core.py`` forces equal bits.

Layout: the other operand is decoded, 64 rows of N and one step of K at a time, into a 16 KiB tile with N innermost, so
that all loops run over N and the tile stays in the first-level cache while every row of A passes over it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from nvfp4viz.quant.tensor_core import (
    BLOCK_SIZE,
    CANONICAL_NAN,
    E2M1_DOUBLED,
    GROUP,
    STEP,
    ZERO_EXPONENT,
    Kind,
    scale_tables,
)
from nvfp4viz.quant.threads import run_halves

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

TILE = 64
"""Columns of the result worked on together."""
THREADING_PAYS = 1 << 20
"""Multiply-adds below which handing half the work to a second thread costs more than it saves."""

_NAN = np.uint32(CANONICAL_NAN).view(np.float32)


# Inputs may be shared, read-only arrays; a writable array also fits a read-only signature.
_F4 = nb.types.Array(nb.f4, 1, "C", readonly=True)
_F4_2 = nb.types.Array(nb.f4, 2, "C", readonly=True)
_I4 = nb.types.Array(nb.i4, 1, "C", readonly=True)
_I8 = nb.types.Array(nb.i8, 1, "C", readonly=True)
_U1 = nb.types.Array(nb.u1, 1, "C", readonly=True)
_U1_2 = nb.types.Array(nb.u1, 2, "C", readonly=True)
_U1_3 = nb.types.Array(nb.u1, 3, "C", readonly=True)


@nb.njit(nb.void(_U1_2, _U1_2, _F4, _I4, _F4, nb.i8, nb.f4[::1], nb.i4[::1], nb.u1[::1]), nogil=True, cache=True)
def _expand_rows(packed, scales, significands, exponents, pairs, block_groups, values, row_exponents, row_nan):  # type: ignore[no-untyped-def]
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


@nb.njit(nogil=True, inline="always")
def _expand_tile(packed, scales, first, count, step, significands, exponents, pairs, block_groups, tile, tile_exponents, tile_nan):  # type: ignore[no-untyped-def]
    """Decode one step of ``count`` rows of B, N innermost: ``tile (64, TILE)``, ``tile_exponents (4, TILE)``."""
    groups = packed.shape[1] // 8
    for n in range(count):
        row = first + n
        for g in range(4):
            group = step * 4 + g
            if group >= groups:
                tile_exponents[g * TILE + n] = 2 * ZERO_EXPONENT
                for j in range(GROUP):
                    tile[(g * GROUP + j) * TILE + n] = 0.0
                continue
            scale = scales[row, group // block_groups]
            significand = significands[scale]
            tile_exponents[g * TILE + n] = exponents[scale]
            tile_nan[n] |= np.uint8(significand < 0)
            for j in range(8):
                byte = np.int64(packed[row, group * 8 + j]) * 2
                at = (g * GROUP + 2 * j) * TILE + n
                tile[at] = pairs[byte] * significand
                tile[at + TILE] = pairs[byte + 1] * significand


@nb.njit(nogil=True, inline="always")
def _dots(a, at, tile, g, dots):  # type: ignore[no-untyped-def]
    """``dots[g, n] = Σ_k a[k] * tile[k, n]`` over the 16 elements of group ``g``: integers below 2^19."""
    a0, a1, a2, a3 = a[at], a[at + 1], a[at + 2], a[at + 3]
    a4, a5, a6, a7 = a[at + 4], a[at + 5], a[at + 6], a[at + 7]
    a8, a9, a10, a11 = a[at + 8], a[at + 9], a[at + 10], a[at + 11]
    a12, a13, a14, a15 = a[at + 12], a[at + 13], a[at + 14], a[at + 15]
    base = g * GROUP * TILE
    for n in range(TILE):
        b = base + n
        even = a0 * tile[b] + a1 * tile[b + TILE] + a2 * tile[b + 2 * TILE] + a3 * tile[b + 3 * TILE]
        odd = a4 * tile[b + 4 * TILE] + a5 * tile[b + 5 * TILE] + a6 * tile[b + 6 * TILE] + a7 * tile[b + 7 * TILE]
        even += a8 * tile[b + 8 * TILE] + a9 * tile[b + 9 * TILE] + a10 * tile[b + 10 * TILE] + a11 * tile[b + 11 * TILE]
        odd += a12 * tile[b + 12 * TILE] + a13 * tile[b + 13 * TILE] + a14 * tile[b + 14 * TILE] + a15 * tile[b + 15 * TILE]
        dots[g * TILE + n] = even + odd


@nb.njit(nogil=True, inline="always")
def _power(exponent):  # type: ignore[no-untyped-def]
    """2**exponent as f32, for exponents of normal numbers."""
    return np.int32(np.int32(exponent + 127) << np.int32(23)).view(np.float32)


@nb.njit(nogil=True, inline="always")
def _accumulate(dots, e0, e1, e2, e3, tile_exponents, acc, acc_at, terms, tops):  # type: ignore[no-untyped-def]
    """Rules 5 to 7 for one row of A and one tile."""
    for n in range(TILE):
        bits = np.float32(acc[acc_at + n]).view(np.int32)
        field = (bits >> np.int32(23)) & np.int32(255)
        hidden = np.int32(1 << 23) if field > 0 else np.int32(0)
        size = np.float32((bits & np.int32(0x7FFFFF)) | hidden)
        signed = -size if bits < 0 else size
        e = max(field, np.int32(1)) - np.int32(127)
        x0 = e0 + tile_exponents[n]
        x1 = e1 + tile_exponents[TILE + n]
        x2 = e2 + tile_exponents[2 * TILE + n]
        x3 = e3 + tile_exponents[3 * TILE + n]
        top = max(max(max(x0, x1), max(x2, x3)), e)
        far = top - np.int32(90)  # a term 90 binades down has no bit left; the bound keeps _power's result normal
        terms[n] = np.trunc(signed * _power(np.int32(12) + max(e, far) - top))
        terms[TILE + n] = np.trunc(dots[n] * _power(np.int32(27) + max(x0, far) - top))
        terms[2 * TILE + n] = np.trunc(dots[TILE + n] * _power(np.int32(27) + max(x1, far) - top))
        terms[3 * TILE + n] = np.trunc(dots[2 * TILE + n] * _power(np.int32(27) + max(x2, far) - top))
        terms[4 * TILE + n] = np.trunc(dots[3 * TILE + n] * _power(np.int32(27) + max(x3, far) - top))
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


@nb.njit(
    nb.void(
        _F4, _I4, _U1, _I8, _I8, _U1_3, _U1_3, _F4_2, nb.b1, nb.f4[:, ::1], _F4, _I4, _F4, nb.i8, nb.i8, nb.i8
    ),
    nogil=True,
    cache=True,
)
def _product(
    a, a_exponents, a_nan, order, starts, b_packed, b_scales, c, has_c, out, significands, exponents, pairs,
    block_groups, part, parts,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Every ``parts``-th tile, from ``part`` on, of all experts.

    ``order`` lists the rows of A by expert and ``starts`` where each expert's rows begin in it.
    """
    experts, columns, half = b_packed.shape
    steps = (half + 31) // 32
    tiles = (columns + TILE - 1) // TILE
    tile = np.zeros(STEP * TILE, np.float32)
    tile_exponents = np.zeros(4 * TILE, np.int32)
    tile_nan = np.zeros(TILE, np.uint8)
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
                    b_packed[expert], b_scales[expert], first, count, step, significands, exponents, pairs,
                    block_groups, tile, tile_exponents, tile_nan,
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


@cache
def _tables(kind: Kind) -> tuple[F32, I32, F32, int]:
    """Scale significands times 8 (−1 marks NaN), exponents, the two doubled values of each byte, groups a scale."""
    eighths, exponents, nans = scale_tables(kind)
    significands = np.where(nans, -1, eighths).astype(np.float32)
    byte = np.arange(256)
    doubled = np.array(E2M1_DOUBLED, np.float32)
    pairs = np.ascontiguousarray(np.stack([doubled[byte & 15], doubled[byte >> 4]], axis=1).ravel())
    tables = (significands, exponents.astype(np.int32), pairs)
    for table in tables:
        table.flags.writeable = False
    return (*tables, BLOCK_SIZE[kind] // GROUP)


def _run(
    a_packed: U8,
    a_scales: U8,
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    b_packed: U8,
    b_scales: U8,
    c: F32 | None,
    kind: Kind,
) -> F32:
    significands, exponents, pairs, block_groups = _tables(kind)
    rows, half = a_packed.shape
    columns = b_packed.shape[1]
    steps = -(-half // 32)
    values = np.empty(rows * steps * STEP, np.float32)
    row_exponents = np.empty(rows * steps * 4, np.int32)
    row_nan = np.zeros(rows, np.uint8)
    _expand_rows(a_packed, a_scales, significands, exponents, pairs, block_groups, values, row_exponents, row_nan)
    out = np.empty((rows, columns), np.float32)
    start = out if c is None else c

    def part(index: int, count: int) -> None:
        _product(
            values, row_exponents, row_nan, order, starts, b_packed, b_scales, start, c is not None, out,
            significands, exponents, pairs, block_groups, index, count,
        )  # fmt: skip

    if rows * columns * half * 2 < THREADING_PAYS:
        part(0, 1)
    else:
        run_halves(part)
    return out


def matmul_numba(
    a_packed: U8, a_scales: U8, b_packed: U8, b_scales: U8, c: F32 | None, kind: Kind
) -> F32:
    """See :func:`nvfp4viz.quant.tensor_core.mma_matmul`, which checks the arguments."""
    rows = len(a_packed)
    return _run(
        np.ascontiguousarray(a_packed),
        np.ascontiguousarray(a_scales),
        np.arange(rows, dtype=np.int64),
        np.array([0, rows], np.int64),
        np.ascontiguousarray(b_packed)[None],
        np.ascontiguousarray(b_scales)[None],
        None if c is None else np.ascontiguousarray(c),
        kind,
    )


def grouped_numba(
    a_packed: U8, a_scales: U8, row_expert: npt.NDArray[Any], b_packed: U8, b_scales: U8, kind: Kind
) -> F32:
    """See :func:`nvfp4viz.quant.tensor_core.mma_grouped`, which checks the arguments."""
    order = np.argsort(row_expert, kind="stable").astype(np.int64)
    counts = np.bincount(row_expert, minlength=len(b_packed))
    starts = np.zeros(len(b_packed) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return _run(
        np.ascontiguousarray(a_packed),
        np.ascontiguousarray(a_scales),
        order,
        starts,
        np.ascontiguousarray(b_packed),
        np.ascontiguousarray(b_scales),
        None,
        kind,
    )
