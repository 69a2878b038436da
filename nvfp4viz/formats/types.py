"""The records that describe a number format and one of its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Klass = Literal["zero", "subnormal", "normal", "infinite", "nan"]


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A floating-point format, as a card that a page can print."""

    name: str  # id, e.g. "e2m1"
    bits: int  # width of a code
    exponent_bits: int
    mantissa_bits: int
    signed: bool
    bias: int
    max_value: float  # largest finite magnitude
    min_normal: float  # smallest normal magnitude
    min_subnormal: float  # smallest non-zero magnitude (equals min_normal where there are no subnormals)
    has_infinity: bool
    nan_codes: tuple[int, ...]  # for BF16, whose NaNs are many: the canonical one alone
    has_zero: bool


@dataclass(frozen=True, slots=True)
class ExplainedValue:
    """One code taken apart: what a bit editor, a number line or a sentence needs."""

    format: str
    code: int
    bits: str  # all bits, most significant first
    sign: int  # 0 or 1 (0 where the format has no sign)
    exponent_field: int
    mantissa_field: int
    exponent: int | None  # the power of two that scales the significand; None for NaN and infinities
    significand: float | None
    klass: Klass
    value: float
    formula: str  # e.g. "(-1)^0 × 2^(2-1) × (1 + 1/2) = 3"
