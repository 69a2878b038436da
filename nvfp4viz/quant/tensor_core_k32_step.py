"""The tensor core's K = 32 step, bit for bit: ``kind::mxf8f6f4``, FP8 times FP4 or FP8, one UE8M0 scale a side.

The same model as ``quant/tensor_core_step.py`` (Xie, Wang, Yang and Yang, MMA-Sim), whose rules differ here in three
places: **every product is a term of its own**, the sum is cut **25** bits below its largest exponent instead of 35,
and an element can be NaN or, in E5M2, infinite.

1. a NaN scale, a NaN ``c`` or a NaN product gives the canonical NaN ``0x7FFFFFFF``, and so do infinities of both
   signs; infinities of one sign give that infinity.  A product of infinity and zero is NaN;
2. each element splits into significand and exponent: a subnormal keeps its format's smallest exponent, **a zero has
   significand 0 and exponent -126**, whatever its format;
3. a term has significand ``s(a) * s(b)`` and exponent ``e(a) + e(b) + e(scale_a) + e(scale_b)``, unnormalised;
4. ``c`` splits in the same way;
5. the 33 terms are shifted to the largest of their exponents and truncated toward zero at 25 fractional bits;
6. their exact sum is normalised and truncated toward zero to f32; an exact zero is +0, 2^128 and more an infinity.

This module follows the rules with Python integers; ``quant/tensor_core_k32.py`` computes whole matrices, with equal
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, get_args

import numpy as np

from nvfp4viz.errors import FormatError
from nvfp4viz.quant.tensor_core_step import (
    CANONICAL_NAN,
    U8,
    ZERO_EXPONENT,
    AlignedSum,
    AlignedTerm,
    align,
    check_codes,
    split_f32,
    split_ue8m0,
    truncate_to_f32,
)

Element = Literal["e4m3", "e5m2", "e2m1"]
ELEMENTS: tuple[Element, ...] = get_args(Element)

STEP_K32 = 32
"""Products in one step, all under one scale a side."""
FRACTION_BITS_K32 = 25
"""Where an aligned term is cut off."""
_FIELDS: dict[str, tuple[int, int, int]] = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
"""Exponent bits, mantissa bits, bias."""


@dataclass(frozen=True, slots=True)
class ProductTerm(AlignedTerm):
    """One of the 33 terms of a step: 32 products, then the accumulator."""

    fraction_bits: ClassVar[int] = FRACTION_BITS_K32


@dataclass(frozen=True, slots=True)
class StepTraceK32(AlignedSum):
    """A step of 32 products, each a term of its own; ``elements`` are the formats of the two sides."""

    fraction_bits: ClassVar[int] = FRACTION_BITS_K32

    elements: tuple[Element, Element]


def known_element(name: str) -> None:
    """Refuse an element format that the step does not have (``mma.element``)."""
    if name not in ELEMENTS:
        raise FormatError("mma.element", element=name, known=", ".join(ELEMENTS))


def split_element(code: int, element: Element) -> tuple[Fraction, int] | float:
    """Signed significand and exponent of a finite element; a float NaN or infinity for one that is not.

    >>> split_element(0x7E, "e4m3"), split_element(0x81, "e4m3"), split_element(0x01, "e2m1")
    ((Fraction(7, 4), 8), (Fraction(-1, 8), -6), (Fraction(1, 2), 0))
    >>> split_element(0x80, "e4m3"), split_element(0x7F, "e4m3"), split_element(0xFC, "e5m2")
    ((Fraction(0, 1), -126), nan, -inf)
    """
    exponent_bits, mantissa_bits, bias = _FIELDS[element]
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    field = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << mantissa_bits) - 1)
    if element == "e4m3" and field == 15 and fraction == 7:
        return math.nan
    if element == "e5m2" and field == 31:
        return math.nan if fraction else sign * math.inf
    if field == 0:
        if fraction == 0:
            return Fraction(0), ZERO_EXPONENT
        return Fraction(sign * fraction, 1 << mantissa_bits), 1 - bias
    return Fraction(sign * ((1 << mantissa_bits) + fraction), 1 << mantissa_bits), field - bias


def _float_product(a: tuple[Fraction, int] | float, b: tuple[Fraction, int] | float) -> float:
    """The product where one side is not finite, by IEEE's rules; only signs and zeros of finite sides matter."""
    x, y = (side if isinstance(side, float) else float(side[0]) for side in (a, b))
    return x * y


def mma_step_k32_trace(
    a: Sequence[int] | U8,
    b: Sequence[int] | U8,
    a_scale: int,
    b_scale: int,
    c: float | np.float32,
    elements: tuple[Element, Element] = ("e4m3", "e2m1"),
) -> StepTraceK32:
    """One K = 32 step, following the rules literally with exact integers and fractions.

    Parameters
    ----------
    a, b
        32 elements a side, one code each (E2M1 codes 0 to 15, FP8 bytes).
    a_scale, b_scale
        One UE8M0 byte a side.
    c
        The accumulator, an f32.
    elements
        The formats of the sides.

    Raises
    ------
    FormatError
        ``mma.element``, ``mma.step-size-k32``; ``format.code-range``: a code or a scale that has more bits than its
        format.
    """
    for name in elements:
        known_element(name)
    if len(a) != STEP_K32 or len(b) != STEP_K32:
        raise FormatError("mma.step-size-k32", got=len(a), other=len(b), step=STEP_K32)
    for codes, element in zip((a, b), elements, strict=True):
        check_codes(codes, element.upper(), 15 if element == "e2m1" else 255)
    check_codes((a_scale, b_scale), "UE8M0", 255)
    c_bits = int(np.float32(c).view(np.uint32))
    scales = split_ue8m0(int(a_scale)), split_ue8m0(int(b_scale))
    if scales[0] is None or scales[1] is None or (c_bits & 0x7FFFFFFF) > 0x7F800000:
        return StepTraceK32("nan", (), None, 0, CANONICAL_NAN, elements)
    scale_exponent = scales[0][1] + scales[1][1]

    parts: list[tuple[Fraction, int]] = []
    infinite: list[float] = [float(np.float32(c))] if (c_bits & 0x7FFFFFFF) == 0x7F800000 else []
    for x, y in zip(a, b, strict=True):
        left, right = split_element(int(x), elements[0]), split_element(int(y), elements[1])
        if isinstance(left, float) or isinstance(right, float):
            infinite.append(_float_product(left, right))
        else:
            parts.append((left[0] * right[0], left[1] + right[1] + scale_exponent))
    if infinite:
        total = sum(infinite)
        if math.isnan(total):
            return StepTraceK32("nan", (), None, 0, CANONICAL_NAN, elements)
        return StepTraceK32("inf", (), None, 0, 0x7F800000 if total > 0 else 0xFF800000, elements)

    parts.append(split_f32(c_bits))
    top = max(exponent for _, exponent in parts)
    terms = tuple(ProductTerm(s, e, top - e, align(s, e, top, FRACTION_BITS_K32)) for s, e in parts)
    aligned = sum(term.aligned for term in terms)
    return StepTraceK32(None, terms, top, aligned, truncate_to_f32(aligned, top - FRACTION_BITS_K32), elements)


def mma_step_k32_reference(
    a: Sequence[int] | U8,
    b: Sequence[int] | U8,
    a_scale: int,
    b_scale: int,
    c: float | np.float32,
    elements: tuple[Element, Element] = ("e4m3", "e2m1"),
) -> np.float32:
    """The result of :func:`mma_step_k32_trace`: the next accumulator.

    >>> ones_fp8, ones_fp4 = [0x38] * 32, [0x2] * 32
    >>> float(mma_step_k32_reference(ones_fp8, ones_fp4, 127, 127, 0.5))
    32.5
    >>> float(mma_step_k32_reference(ones_fp8, ones_fp4, 128, 126, 2.0**25))   # a K = 64 step would keep all of it
    33554464.0
    """
    return mma_step_k32_trace(a, b, a_scale, b_scale, c, elements).result
