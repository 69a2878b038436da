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

This module follows the rules one by one with Python integers, for reading and for checking;
``quant/tensor_core.py`` computes whole matrices with the same bits.

**Overflow** is not among the rules, because UE4M3 scales cannot reach it.  UE8M0 scales can: a sum of 2^128 or more
becomes the infinity of its sign, as in the authors' public code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError

Kind = Literal["nvfp4", "mxfp4"]
F32 = npt.NDArray[np.float32]
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
SCALE_FORMAT: dict[str, str] = {"nvfp4": "UE4M3", "mxfp4": "UE8M0"}

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each E2M1 code: integers, so that a product of two codes is an integer number of quarters."""


# ------------------------------------------------------------------------------------------- the rules, one by one


@dataclass(frozen=True, slots=True)
class AlignedTerm:
    """One term of a step, before and after it is cut.

    Attributes
    ----------
    significand, exponent
        The term's value is ``significand * 2**exponent``.
    shift
        How far the term is moved right to reach the step's exponent.
    aligned
        The truncated term in units of ``2**(max_exponent - fraction_bits)``.
    """

    fraction_bits: ClassVar[int]
    """Where a term of this instruction is cut off."""

    significand: Fraction
    exponent: int
    shift: int
    aligned: int

    @property
    def value(self) -> Fraction:
        """The term before truncation."""
        return self.significand * Fraction(2) ** self.exponent

    @property
    def lost(self) -> Fraction:
        """What truncation cut off, with the term's sign; 0 when nothing."""
        return self.value - self.aligned * Fraction(2) ** (self.exponent + self.shift - self.fraction_bits)


@dataclass(frozen=True, slots=True)
class AlignedSum:
    """Everything that happens in one instruction step for one output element.

    Attributes
    ----------
    special
        ``"nan"`` or ``"inf"`` when rule 1 or an infinity decided the result; then there are no terms.
    terms
        In order of k, then the accumulator.
    max_exponent
        The exponent E to which all terms are aligned; ``None`` if ``special``.
    total
        Sum of the aligned terms, in units of ``2**(max_exponent - fraction_bits)``.
    result_bits
        The next accumulator, as f32 bits.
    """

    fraction_bits: ClassVar[int]
    """Where a term of this instruction is cut off."""

    special: str | None
    terms: tuple[AlignedTerm, ...]
    max_exponent: int | None
    total: int
    result_bits: int

    @property
    def result(self) -> np.float32:
        """The next accumulator."""
        return np.uint32(self.result_bits).view(np.float32)

    @property
    def exact(self) -> Fraction:
        """The sum of all terms without any truncation."""
        return sum((term.value for term in self.terms), Fraction(0))


@dataclass(frozen=True, slots=True)
class Term(AlignedTerm):
    """One of the five terms of a step: four scaled dots, and the accumulator.

    Attributes
    ----------
    dot
        The exact dot of 16 E2M1 products; ``None`` for the accumulator.
    a_significand, b_significand
        Significands of the two scales; ``None`` for the accumulator.
    """

    fraction_bits: ClassVar[int] = FRACTION_BITS

    dot: Fraction | None
    a_significand: Fraction | None
    b_significand: Fraction | None


@dataclass(frozen=True, slots=True)
class StepTrace(AlignedSum):
    """A step of 64 products, whose terms are four dots and the accumulator; ``kind`` is ``"nvfp4"`` or ``"mxfp4"``."""

    fraction_bits: ClassVar[int] = FRACTION_BITS

    terms: tuple[Term, ...]
    kind: str


def block_size(kind: str) -> int:
    if kind not in BLOCK_SIZE:
        raise FormatError("mma.kind", kind=kind, known=", ".join(BLOCK_SIZE))
    return BLOCK_SIZE[kind]


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


def align(significand: Fraction, exponent: int, max_exponent: int, fraction_bits: int) -> int:
    """One term as an integer number of ``2**(max_exponent - fraction_bits)``, cut off toward zero."""
    shift = max_exponent - exponent
    size = (abs(significand.numerator) << fraction_bits) // (significand.denominator << shift)
    return -size if significand < 0 else size


def check_codes(codes: Sequence[int] | U8, name: str, limit: int) -> None:
    """Refuse what has more bits than its format, or a sign; ``limit`` is the largest code (``format.code-range``)."""
    for code in codes:
        if not 0 <= code <= limit:
            raise FormatError("format.code-range", code=code, format=name, limit=limit)


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

    Raises
    ------
    FormatError
        ``mma.kind``, ``mma.step-size``, ``mma.step-scales``; ``format.code-range``: a code or a scale that has more
        bits than its format.
    """
    block = block_size(kind)
    split = split_ue4m3 if kind == "nvfp4" else split_ue8m0
    if len(a_codes) != STEP or len(b_codes) != STEP:
        raise FormatError("mma.step-size", got=len(a_codes), other=len(b_codes))
    if len(a_scales) * block != STEP or len(b_scales) * block != STEP:
        raise FormatError("mma.step-scales", kind=kind, expected=STEP // block, got=len(a_scales))
    for codes, scales in ((a_codes, a_scales), (b_codes, b_scales)):
        check_codes(codes, "E2M1", 15)
        check_codes(scales, SCALE_FORMAT[kind], 255)
    c_bits = int(np.float32(c).view(np.uint32))
    a_split = [split(int(byte)) for byte in a_scales]
    b_split = [split(int(byte)) for byte in b_scales]
    a_doubled = [E2M1_DOUBLED[int(code)] for code in a_codes]
    b_doubled = [E2M1_DOUBLED[int(code)] for code in b_codes]

    if any(s is None for s in a_split + b_split) or (c_bits & 0x7FFFFFFF) > 0x7F800000:
        return StepTrace("nan", (), None, 0, CANONICAL_NAN, kind)
    if (c_bits & 0x7FFFFFFF) == 0x7F800000:
        return StepTrace("inf", (), None, 0, c_bits, kind)

    parts: list[tuple[Fraction | None, Fraction | None, Fraction | None, Fraction, int]] = []
    for start in range(0, STEP, GROUP):
        quarters = sum(a_doubled[k] * b_doubled[k] for k in range(start, start + GROUP))
        dot = Fraction(quarters, 4)
        a_scale, b_scale = a_split[start // block], b_split[start // block]
        assert a_scale is not None
        assert b_scale is not None
        significand = dot * a_scale[0] * b_scale[0]
        parts.append((dot, a_scale[0], b_scale[0], significand, a_scale[1] + b_scale[1]))
    parts.append((None, None, None, *split_f32(c_bits)))

    top = max(exponent for *_, exponent in parts)
    terms = tuple(
        Term(s, e, top - e, align(s, e, top, FRACTION_BITS), dot_or_none, sa, sb) for dot_or_none, sa, sb, s, e in parts
    )
    total = sum(term.aligned for term in terms)
    return StepTrace(None, terms, top, total, truncate_to_f32(total, top - FRACTION_BITS), kind)


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
