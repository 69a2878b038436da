"""The tensor-core product of whole matrices, in int64 arrays or in a Numba kernel, with equal bits.

``quant/tensor_core_step.py`` states the seven rules and follows them one by one for a single element; a test forces
the same bits from all three.  A GEMM applies the step to 64-element slices of K in increasing k.  Real libraries may
split K otherwise; ours does not.

**K that is not a multiple of 64** is completed with code 0 and scale byte 0.  Such a group has significand 0 and
exponent −126 − 126 (UE4M3) or −127 − 127 (UE8M0), below −126, the smallest exponent ``c`` can have.  It never sets the
exponent of rule 6, so it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats.paths import ArrayPath, by_numpy
from nvfp4viz.quant.tensor_core_step import (
    BLOCK_SIZE,
    CANONICAL_NAN,
    E2M1_DOUBLED,
    F32,
    F32_FRACTION_BITS,
    F32_MIN_EXPONENT,
    FRACTION_BITS,
    GROUP,
    U8,
    ZERO_EXPONENT,
    Kind,
    block_size,
    split_ue4m3,
    split_ue8m0,
)

I64 = npt.NDArray[np.int64]


def scale_tables(kind: Kind) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
    """For all 256 scale bytes: eight times the significand, the exponent, and whether it is NaN.

    >>> eighths, exponents, nans = scale_tables("nvfp4")
    >>> int(eighths[0x7E]), int(exponents[0x7E]), [hex(byte) for byte in nans.nonzero()[0]]
    (14, 8, ['0x7f', '0xff'])
    """
    split = split_ue4m3 if kind == "nvfp4" else split_ue8m0
    parts = [split(byte) for byte in range(256)]
    eighths = np.array([0 if p is None else int(p[0] * 8) for p in parts], np.int64)
    exponents = np.array([ZERO_EXPONENT if p is None else p[1] for p in parts], np.int64)
    return eighths, exponents, np.array([p is None for p in parts], np.bool_)


def _check_operand(packed: U8, scales: U8, kind: Kind, side: str) -> None:
    block = block_size(kind)
    if packed.dtype != np.uint8 or scales.dtype != np.uint8:
        raise FormatError("mma.dtype", side=side, packed=packed.dtype, scales=scales.dtype)
    k = packed.shape[-1] * 2
    if k % block or scales.shape != (*packed.shape[:-1], k // block):
        raise FormatError("mma.scales", side=side, packed=packed.shape, scales=scales.shape, block=block, kind=kind)


def mma_matmul(
    a_packed: U8,
    a_scales: U8,
    b_packed: U8,
    b_scales: U8,
    c: F32 | None = None,
    kind: Kind = "nvfp4",
    path: ArrayPath = "auto",
) -> F32:
    """``c + A @ B.T`` as the tensor core computes it, in 64-element steps of increasing k.

    Parameters
    ----------
    a_packed : (M, K//2) uint8
        E2M1 codes, the even element in the low nibble.
    a_scales : (M, K//16) uint8
        UE4M3 bytes; for ``kind="mxfp4"`` UE8M0 bytes of shape ``(M, K//32)``.
    b_packed, b_scales : (N, K//2), (N, K//16) uint8
        The other operand, K-major like the first.
    c : (M, N) float32, optional
        The first accumulator; zero when omitted.
    kind
        ``"nvfp4"`` or ``"mxfp4"``.
    path
        ``"numpy"`` (int64 arrays), ``"numba"`` (the kernel), or ``"auto"``, which takes the kernel.  Equal bits.

    Returns
    -------
    (M, N) float32, without any global scale.

    Raises
    ------
    FormatError
        ``mma.kind``, ``mma.dtype``, ``mma.scales``, ``mma.shape`` or ``path.unknown``.
    """
    _check_operand(a_packed, a_scales, kind, "a")
    _check_operand(b_packed, b_scales, kind, "b")
    if a_packed.ndim != 2 or b_packed.ndim != 2 or a_packed.shape[1] != b_packed.shape[1]:
        raise FormatError("mma.shape", a=a_packed.shape, b=b_packed.shape)
    if c is not None and (c.shape != (len(a_packed), len(b_packed)) or c.dtype != np.float32):
        raise FormatError("mma.accumulator", shape=c.shape, dtype=c.dtype, m=len(a_packed), n=len(b_packed))
    if by_numpy(path):
        return _matmul_numpy(a_packed, a_scales, b_packed, b_scales, c, kind)
    from nvfp4viz.quant.tensor_core_fast import matmul_numba

    return matmul_numba(a_packed, a_scales, b_packed, b_scales, c, kind)


def mma_grouped(
    a_packed: U8,
    a_scales: U8,
    row_expert: npt.NDArray[Any],
    b_packed: U8,
    b_scales: U8,
    kind: Kind = "nvfp4",
    path: ArrayPath = "auto",
) -> F32:
    """Each row times the matrix of its own expert: the routed rows of a mixture-of-experts layer in one call.

    Parameters
    ----------
    a_packed, a_scales : (M, K//2), (M, K//16) uint8
        One row for every (token, chosen expert).
    row_expert : (M,) integers
        Which expert each row meets, in any order.
    b_packed, b_scales : (E, N, K//2), (E, N, K//16) uint8
        The experts' weights.

    Returns
    -------
    (M, N) float32: row ``m`` equals ``mma_matmul`` of that row and ``b[row_expert[m]]``.

    Raises
    ------
    FormatError
        As :func:`mma_matmul`, and ``mma.expert`` for an index outside ``0 … E-1``.
    """
    _check_operand(a_packed, a_scales, kind, "a")
    _check_operand(b_packed, b_scales, kind, "b")
    if a_packed.ndim != 2 or b_packed.ndim != 3 or a_packed.shape[1] != b_packed.shape[2]:
        raise FormatError("mma.shape", a=a_packed.shape, b=b_packed.shape)
    if row_expert.shape != (len(a_packed),):
        raise FormatError("mma.row-expert", shape=row_expert.shape, rows=len(a_packed))
    if len(row_expert) and (int(row_expert.min()) < 0 or int(row_expert.max()) >= len(b_packed)):
        raise FormatError("mma.expert", low=row_expert.min(), high=row_expert.max(), experts=len(b_packed))
    if by_numpy(path):
        out = np.zeros((len(a_packed), b_packed.shape[1]), np.float32)
        for expert in np.unique(row_expert):
            rows = row_expert == expert
            out[rows] = _matmul_numpy(a_packed[rows], a_scales[rows], b_packed[expert], b_scales[expert], None, kind)
        return out
    from nvfp4viz.quant.tensor_core_fast import grouped_numba

    return grouped_numba(a_packed, a_scales, row_expert, b_packed, b_scales, kind)


def _expand(packed: U8, scales: U8, kind: Kind) -> tuple[F32, I64, npt.NDArray[np.bool_]]:
    """An operand as ``16 * code value * scale significand`` (exact in f32), group exponents, and rows with a NaN scale.

    Returns ``(rows, steps*4, 16)`` float32, ``(rows, steps*4)`` int64 and ``(rows,)`` bool, padded to whole steps.
    """
    rows, groups = len(packed), packed.shape[1] * 2 // GROUP
    padded = -(-groups // 4) * 4
    eighths, exponents, nans = scale_tables(kind)
    doubled = np.array(E2M1_DOUBLED, np.float32)
    values = np.zeros((rows, padded, GROUP), np.float32)
    pairs = packed.reshape(rows, groups, GROUP // 2)
    values[:, :groups, 0::2] = doubled[pairs & 0xF]
    values[:, :groups, 1::2] = doubled[pairs >> 4]
    group_scales = np.zeros((rows, padded), np.uint8)
    group_scales[:, :groups] = np.repeat(scales, BLOCK_SIZE[kind] // GROUP, axis=1)
    values *= eighths[group_scales].astype(np.float32)[:, :, None]
    return values, exponents[group_scales], np.any(nans[scales], axis=1, keepdims=False).reshape(rows)


def _shift_right(signed: I64, shift: I64) -> I64:
    """Truncate ``signed / 2**shift`` toward zero; shifts of 63 and more leave nothing."""
    size = np.abs(signed) >> np.minimum(shift, 63)
    return np.where(signed < 0, -size, size)


def _matmul_numpy(a_packed: U8, a_scales: U8, b_packed: U8, b_scales: U8, c: F32 | None, kind: Kind) -> F32:
    a, a_exponents, a_nan = _expand(a_packed, a_scales, kind)
    b, b_exponents, b_nan = _expand(b_packed, b_scales, kind)
    start = np.zeros((len(a), len(b)), np.float32) if c is None else c
    acc = start.copy()
    for step in range(a.shape[1] // 4):
        groups = range(4 * step, 4 * step + 4)
        # |dot| <= 16 * 180 * 180 < 2^24: BLAS may add in any order and stays exact.  Unit: 2^-8.
        dots = [(a[:, g] @ b[:, g].T).astype(np.int64) for g in groups]
        exponents = [a_exponents[:, g, None] + b_exponents[:, g] for g in groups]
        acc = accumulate_int64(dots, exponents, acc)
    acc[np.isnan(start) | a_nan[:, None] | b_nan] = np.uint32(CANONICAL_NAN).view(np.float32)
    return acc


def accumulate_int64(
    terms: Sequence[I64], exponents: Sequence[I64], acc: F32, *, unit_bits: int = 8, fraction_bits: int = FRACTION_BITS
) -> F32:
    """Rules 5 to 7 on arrays: ``terms`` in units of ``2**-unit_bits``, one accumulator per element.

    The aligned terms and their sum must stay below 2^53 units of ``2**-fraction_bits``.
    """
    bits = acc.view(np.uint32).astype(np.int64)
    field = (bits >> 23) & 0xFF
    significand = (bits & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0)
    significand = np.where(bits >> 31 == 1, -significand, significand)
    exponent = np.maximum(field, 1) - 127

    top = exponent
    for e in exponents:
        top = np.maximum(top, e)
    total = _shift_right(significand << (fraction_bits - F32_FRACTION_BITS), top - exponent)
    for term, e in zip(terms, exponents, strict=True):
        total = total + _shift_right(term << (fraction_bits - unit_bits), top - e)

    # float64 holds the total exactly, and frexp finds its top bit.
    size = np.abs(total)
    length = np.frexp(size.astype(np.float64))[1].astype(np.int64)
    unit = top - fraction_bits
    drop = np.maximum(length - 24, F32_MIN_EXPONENT - F32_FRACTION_BITS - unit)
    drop = np.clip(drop, 0, 63)
    size = (size >> drop) << drop
    with np.errstate(over="ignore"):
        result = np.ldexp(size.astype(np.float64), unit).astype(np.float32)
    result = np.where(total < 0, -result, result)
    return np.where(field == 255, acc, result)
