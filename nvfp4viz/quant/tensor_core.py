"""The Blackwell block-scaled tensor-core product, bit for bit.

The arithmetic is the model of Xie, Wang, Yang and Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and
Matrix Cores" (arXiv 2511.10909), restated as seven rules.  One instruction step takes 64 products of E2M1 values, four
scales a side and an accumulator ``c``, and returns the next accumulator:

1. a NaN scale or a NaN ``c`` gives the canonical NaN ``0x7FFFFFFF``;
2. the sign of a UE4M3 scale is ignored;
3. the products are summed exactly in four dots of 16;
4. each dot is multiplied by the significands of its two scales and carries the sum of their exponents, without
   renormalisation;
5. ``c`` splits into significand and exponent in the same way;
6. the five terms are shifted to the largest of the five exponents and truncated toward zero at 35 fractional bits;
7. their exact sum is normalised and truncated toward zero to f32.

A GEMM applies the step to 64-element slices of K in increasing k.  Real libraries may split K otherwise; ours does not.

:func:`mma_step_trace` follows the rules one by one with Python integers; :func:`mma_matmul` computes whole matrices
with the same bits, in int64 arrays (``path="numpy"``) or in a Numba kernel (``quant/tensor_core_fast.py``).

**K that is not a multiple of 64** is completed with code 0 and scale byte 0.  Such a group has significand 0 and exponent
−126 − 126 (UE4M3) or −127 − 127 (UE8M0), below −126, the smallest exponent ``c`` can have.  It never sets the
exponent of rule 6, so it changes nothing.

**Overflow** is not among the rules, because UE4M3 scales cannot reach it.  UE8M0 scales can: a sum of 2^128 or more
becomes the infinity of its sign, as in the authors' public code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError

Kind = Literal["nvfp4", "mxfp4"]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

STEP = 64
"""Products in one instruction step."""
GROUP = 16
"""Products in one exact partial dot, whatever the block size of the scales."""
FRACTION_BITS = 35
"""Where an aligned term is cut off."""
F32_FRACTION_BITS = 23
F32_MIN_EXPONENT = -126
F32_MAX_EXPONENT = 127
ZERO_EXPONENT = -126
"""The exponent of every operand that is zero, whatever its format."""
CANONICAL_NAN = 0x7FFFFFFF

BLOCK_SIZE: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
"""Elements that share a scale."""

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each E2M1 code: integers, so that a product of two codes is an integer number of quarters."""


# ------------------------------------------------------------------------------------------- the rules, one by one


@dataclass(frozen=True, slots=True)
class Term:
    """One of the five terms of a step: four scaled dots, and the accumulator.

    Attributes
    ----------
    dot
        The exact dot of 16 E2M1 products; ``None`` for the accumulator.
    a_significand, b_significand
        Significands of the two scales; ``None`` for the accumulator.
    significand, exponent
        The term's value is ``significand * 2**exponent``.
    shift
        How far the term is moved right to reach the step's exponent.
    aligned
        The truncated term in units of ``2**(max_exponent - 35)``.
    lost
        What truncation cut off (0 when nothing), as a value: ``significand * 2**exponent`` minus the truncated term.
    """

    dot: Fraction | None
    a_significand: Fraction | None
    b_significand: Fraction | None
    significand: Fraction
    exponent: int
    shift: int
    aligned: int
    lost: Fraction


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Everything that happens in one instruction step for one output element.

    Attributes
    ----------
    kind
        ``"nvfp4"`` or ``"mxfp4"``.
    special
        ``"nan"`` or ``"inf"`` when rule 1 or an infinite ``c`` decided the result; then there are no terms.
    terms
        The four dots in order of k, then the accumulator.
    max_exponent
        The exponent E to which all terms are aligned; ``None`` if ``special``.
    total
        Sum of the aligned terms, in units of ``2**(max_exponent - 35)``.
    exact
        The sum of all terms without any truncation.
    result_bits
        The next accumulator, as f32 bits.
    """

    kind: str
    special: str | None
    terms: tuple[Term, ...]
    max_exponent: int | None
    total: int
    exact: Fraction
    result_bits: int

    @property
    def result(self) -> np.float32:
        """The next accumulator."""
        return np.uint32(self.result_bits).view(np.float32)


def split_ue4m3(byte: int) -> tuple[Fraction, int] | None:
    """Significand and exponent of a UE4M3 scale, its sign ignored; ``None`` for NaN.

    >>> split_ue4m3(0x39), split_ue4m3(0x01), split_ue4m3(0x80), split_ue4m3(0xFF)
    ((Fraction(9, 8), 0), (Fraction(1, 8), -6), (Fraction(0, 1), -126), None)
    """
    field, fraction = (byte >> 3) & 0xF, byte & 0x7
    if field == 15 and fraction == 7:
        return None
    if field == 0:
        return (Fraction(fraction, 8), -6) if fraction else (Fraction(0), ZERO_EXPONENT)
    return Fraction(8 + fraction, 8), field - 7


def split_ue8m0(byte: int) -> tuple[Fraction, int] | None:
    """Significand and exponent of a UE8M0 scale (there is no zero); ``None`` for NaN.

    >>> split_ue8m0(0), split_ue8m0(127), split_ue8m0(255)
    ((Fraction(1, 1), -127), (Fraction(1, 1), 0), None)
    """
    return None if byte == 0xFF else (Fraction(1), byte - 127)


def split_f32(bits: int) -> tuple[Fraction, int]:
    """Signed significand and exponent of a finite f32, given as bits.

    >>> split_f32(0xC0400000), split_f32(0x00000001), split_f32(0x80000000)
    ((Fraction(-3, 2), 1), (Fraction(1, 8388608), -126), (Fraction(0, 1), -126))
    """
    sign = -1 if bits >> 31 else 1
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if field == 0:
        return Fraction(sign * fraction, 1 << 23), F32_MIN_EXPONENT
    return Fraction(sign * ((1 << 23) + fraction), 1 << 23), field - 127


def truncate_to_f32(total: int, unit_exponent: int) -> int:
    """Bits of ``total * 2**unit_exponent`` truncated toward zero to f32; a zero total gives +0.

    >>> hex(truncate_to_f32(3, 0)), hex(truncate_to_f32(-((1 << 25) - 1), 0)), hex(truncate_to_f32(3, -150))
    ('0x40400000', '0xcbffffff', '0x1')
    """
    magnitude = abs(total)
    if magnitude == 0:
        return 0
    sign = 0x80000000 if total < 0 else 0
    exponent = max(magnitude.bit_length() - 1 + unit_exponent, F32_MIN_EXPONENT)
    if exponent > F32_MAX_EXPONENT:
        return sign | 0x7F800000
    drop = exponent - F32_FRACTION_BITS - unit_exponent
    significand = magnitude >> drop if drop >= 0 else magnitude << -drop
    # A significand below 2^23 is subnormal, and its field is 0: subtracting the hidden bit does both cases at once.
    return sign | (((exponent + 127) << 23) + significand - (1 << 23))


def _align(significand: Fraction, exponent: int, max_exponent: int) -> int:
    """Rule 6 for one term: an integer number of ``2**(max_exponent - 35)``, cut off toward zero."""
    shifted = significand * 2**FRACTION_BITS / 2 ** (max_exponent - exponent)
    size = abs(shifted.numerator) // shifted.denominator
    return -size if shifted < 0 else size


def mma_step_trace(
    a_codes: Sequence[int] | U8,
    b_codes: Sequence[int] | U8,
    a_scales: Sequence[int] | U8,
    b_scales: Sequence[int] | U8,
    c: float | np.float32,
    kind: Kind = "nvfp4",
) -> StepTrace:
    """One instruction step, following the seven rules literally with exact integers and fractions.

    Parameters
    ----------
    a_codes, b_codes
        64 E2M1 codes a side.
    a_scales, b_scales
        Scale bytes: 4 UE4M3 a side for ``"nvfp4"``, 2 UE8M0 a side for ``"mxfp4"`` (one for 32 elements).
    c
        The accumulator, an f32.
    kind
        Which instruction.
    """
    block = _block_size(kind)
    split = split_ue4m3 if kind == "nvfp4" else split_ue8m0
    if len(a_codes) != STEP or len(b_codes) != STEP:
        raise FormatError("mma.step-size", got=len(a_codes), other=len(b_codes))
    if len(a_scales) * block != STEP or len(b_scales) * block != STEP:
        raise FormatError("mma.step-scales", kind=kind, expected=STEP // block, got=len(a_scales))
    c_bits = int(np.float32(c).view(np.uint32))
    a_split = [split(int(byte)) for byte in a_scales]
    b_split = [split(int(byte)) for byte in b_scales]

    if any(s is None for s in a_split + b_split) or (c_bits & 0x7FFFFFFF) > 0x7F800000:
        return StepTrace(kind, "nan", (), None, 0, Fraction(0), CANONICAL_NAN)
    if (c_bits & 0x7FFFFFFF) == 0x7F800000:
        return StepTrace(kind, "inf", (), None, 0, Fraction(0), c_bits)

    parts: list[tuple[Fraction | None, Fraction | None, Fraction | None, Fraction, int]] = []
    for start in range(0, STEP, GROUP):
        quarters = sum(
            E2M1_DOUBLED[int(a_codes[k])] * E2M1_DOUBLED[int(b_codes[k])] for k in range(start, start + GROUP)
        )
        dot = Fraction(quarters, 4)
        a_scale, b_scale = a_split[start // block], b_split[start // block]
        assert a_scale is not None
        assert b_scale is not None
        significand = dot * a_scale[0] * b_scale[0]
        parts.append((dot, a_scale[0], b_scale[0], significand, a_scale[1] + b_scale[1]))
    parts.append((None, None, None, *split_f32(c_bits)))

    top = max(exponent for *_, exponent in parts)
    terms = []
    for dot_or_none, sa, sb, significand, exponent in parts:
        aligned = _align(significand, exponent, top)
        lost = significand * Fraction(2) ** exponent - aligned * Fraction(2) ** (top - FRACTION_BITS)
        terms.append(Term(dot_or_none, sa, sb, significand, exponent, top - exponent, aligned, lost))
    total = sum(term.aligned for term in terms)
    exact = sum((t.significand * Fraction(2) ** t.exponent for t in terms), Fraction(0))
    return StepTrace(kind, None, tuple(terms), top, total, exact, truncate_to_f32(total, top - FRACTION_BITS))


def mma_step_reference(
    a_codes: Sequence[int] | U8,
    b_codes: Sequence[int] | U8,
    a_scales: Sequence[int] | U8,
    b_scales: Sequence[int] | U8,
    c: float | np.float32,
    kind: Kind = "nvfp4",
) -> np.float32:
    """The result of :func:`mma_step_trace`: the next accumulator.

    >>> ones = [2] * 64                                 # E2M1 code 2 is 1.0, UE4M3 byte 0x38 is 1.0
    >>> float(mma_step_reference(ones, ones, [0x38] * 4, [0x38] * 4, 0.5))
    64.5
    >>> float(mma_step_reference(ones, ones, [0xB8] * 4, [0x38] * 4, 0.5))   # a negative scale acts as its magnitude
    64.5
    """
    return mma_step_trace(a_codes, b_codes, a_scales, b_scales, c, kind).result


# ---------------------------------------------------------------------------------------------- whole matrices


def _block_size(kind: str) -> int:
    if kind not in BLOCK_SIZE:
        raise FormatError("mma.kind", kind=kind, known=", ".join(BLOCK_SIZE))
    return BLOCK_SIZE[kind]


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
    block = _block_size(kind)
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
    path: Literal["auto", "numpy", "numba"] = "auto",
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
        ``mma.kind``, ``mma.dtype``, ``mma.scales`` or ``mma.shape``.
    """
    _check_operand(a_packed, a_scales, kind, "a")
    _check_operand(b_packed, b_scales, kind, "b")
    if a_packed.ndim != 2 or b_packed.ndim != 2 or a_packed.shape[1] != b_packed.shape[1]:
        raise FormatError("mma.shape", a=a_packed.shape, b=b_packed.shape)
    if c is not None and (c.shape != (len(a_packed), len(b_packed)) or c.dtype != np.float32):
        raise FormatError("mma.accumulator", shape=c.shape, dtype=c.dtype, m=len(a_packed), n=len(b_packed))
    if path == "numpy":
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
    path: Literal["auto", "numpy", "numba"] = "auto",
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
    if len(row_expert) and not (0 <= int(row_expert.min()) and int(row_expert.max()) < len(b_packed)):
        raise FormatError("mma.expert", low=row_expert.min(), high=row_expert.max(), experts=len(b_packed))
    if path == "numpy":
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
    return values, exponents[group_scales], nans[scales].any(axis=1)


def _shift_right(signed: I64, shift: I64) -> I64:
    """Truncate ``signed / 2**shift`` toward zero; shifts of 63 and more leave nothing."""
    return np.sign(signed) * (np.abs(signed) >> np.minimum(shift, 63))


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
        acc = _step_int64(dots, exponents, acc)
    acc[np.isnan(start) | a_nan[:, None] | b_nan] = np.uint32(CANONICAL_NAN).view(np.float32)
    return acc


def _step_int64(dots: list[I64], exponents: list[I64], acc: F32) -> F32:
    """Rules 5 to 7 on arrays: ``dots`` in units of 2^-8, one accumulator per element."""
    bits = acc.view(np.uint32).astype(np.int64)
    field = (bits >> 23) & 0xFF
    significand = (bits & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0)
    significand = np.where(bits >> 31 == 1, -significand, significand)
    exponent = np.maximum(field, 1) - 127

    top = np.maximum.reduce([*exponents, exponent])
    total = _shift_right(significand << (FRACTION_BITS - F32_FRACTION_BITS), top - exponent)
    for dot, e in zip(dots, exponents, strict=True):
        total = total + _shift_right(dot << (FRACTION_BITS - 8), top - e)

    # |total| < 2^49, so float64 holds it exactly and frexp finds its top bit.
    size = np.abs(total)
    length = np.frexp(size.astype(np.float64))[1].astype(np.int64)
    unit = top - FRACTION_BITS
    drop = np.maximum(length - 24, F32_MIN_EXPONENT - F32_FRACTION_BITS - unit)
    drop = np.clip(drop, 0, 63)
    size = (size >> drop) << drop
    with np.errstate(over="ignore"):
        result = np.ldexp(size.astype(np.float64), unit).astype(np.float32)
    result = np.where(total < 0, -result, result)
    return np.where(field == 255, acc, result)
