"""Records about one step of the tensor core: presets, the bits on their common grid, and the sentence about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

from nvfp4viz.figures.words import superscript, words
from nvfp4viz.quant import quantize, tensor_core_explain
from nvfp4viz.quant.gemm import scale_and_round
from nvfp4viz.quant.tensor_core_difference import AccumulationComparison, compare_accumulation
from nvfp4viz.quant.tensor_core_explain import TensorCoreExplanation
from nvfp4viz.quant.tensor_core_step import (
    BLOCK_SIZE,
    F32_FRACTION_BITS,
    F32_MIN_EXPONENT,
    FRACTION_BITS,
    GROUP,
    STEP,
    AlignedSum,
    Kind,
    StepTrace,
    Term,
)

KINDS: tuple[Kind, ...] = ("nvfp4", "mxfp4")
GROUPS = STEP // GROUP
BEYOND_CUT = 10
"""How many places below the cut are drawn; what lies lower is counted."""


@dataclass(frozen=True, slots=True)
class DotSettings:
    """What a step takes, as the page's link writes it: hex digits, one a code, two a scale byte.

    ``sa`` and ``sb`` are UE4M3 bytes for groups of 16; ``ua`` and ``ub`` UE8M0 bytes for 32 elements.
    """

    kind: Kind = "nvfp4"
    a: str = "0b4d1abafb339a2bca1b410acb8cf41d7eb1ca6aa8611c8bba9a4e8bf355295c"
    b: str = "51432a4a2cb22c224ed10303c3cb91371a299df14622999b1b1994cb0d21a1b3"
    sa: str = "774c2f07"
    sb: str = "6b412f01"
    ua: str = "8679"
    ub: str = "8472"
    c: float = 138611.359375


# The default was searched for among random codes: every group is exact but the last, which loses bits at the cut.
DEFAULT = DotSettings()
PRESETS: dict[str, DotSettings] = {
    "usual": DEFAULT,
    "even": DotSettings(sa="38383838", sb="38383838", ua="7f7f", ub="7f7f", c=0.0),
    "huge": DotSettings(c=2.0**60),
    "nan": DotSettings(sa="774c7f07", ua="86ff"),
    "negative": DotSettings(sa="77cc2f07"),
}


def explain(settings: DotSettings) -> TensorCoreExplanation:
    """The step that the settings describe."""
    scales = (settings.sa, settings.sb) if settings.kind == "nvfp4" else (settings.ua, settings.ub)
    a_scales, b_scales = (list(bytes.fromhex(text)) for text in scales)
    a, b = ([int(digit, 16) for digit in text] for text in (settings.a, settings.b))
    with np.errstate(over="ignore"):
        c = float(np.float32(settings.c))
    return tensor_core_explain(a, b, a_scales, b_scales, c, settings.kind)


# ------------------------------------------------------------------ what becomes of a negative scale


@dataclass(frozen=True, slots=True)
class NegativeScale:
    """A step with one negative block scale, beside the same step with its magnitude.

    Attributes
    ----------
    group
        Which group of 16 got the negative scale on its A side.
    positive, negative
        The two steps.
    """

    group: int
    positive: TensorCoreExplanation
    negative: TensorCoreExplanation

    @property
    def fate(self) -> str:
        """``"ignored"`` if the result keeps its bits, ``"nan"``, or ``"flips"``."""
        if self.negative.trace.result_bits == self.positive.trace.result_bits:
            return "ignored"
        return "nan" if self.negative.trace.special == "nan" else "flips"


def negative_scale() -> NegativeScale:
    """The usual step and the preset with a negative block scale."""
    seen = explain(PRESETS["negative"])
    group = next(index for index, byte in enumerate(seen.a_scales) if byte & 0x80)
    return NegativeScale(group, explain(DEFAULT), seen)


def epilogue(seen: TensorCoreExplanation, alpha: float) -> float:
    """The step's result times the epilogue's factor, in float32."""
    return float(scale_and_round(np.array([seen.result]), np.float32(alpha), np.float32)[0])


# ------------------------------------------------------------------ bits on a common grid


@dataclass(frozen=True, slots=True)
class BitRow:
    """A magnitude in binary, at its place on the grid of the step.

    Attributes
    ----------
    name
        The number of the dot (of the product, in a K = 32 step), ``"c"``, ``"sum"``, ``"result"``.
    sign
        -1, 0 for a zero, or 1.
    high
        Power of two of the first digit.
    digits
        From the leading one to the last one.
    cut
        Power of the lowest place that is kept.
    exponent
        Where the significand's units place lies after shifting: the term's own exponent; ``None`` for sum and result.
    """

    name: str
    sign: int
    high: int
    digits: str
    cut: int
    exponent: int | None

    @property
    def kept(self) -> str:
        """The digits at and above the cut."""
        return self.digits[: max(self.high - self.cut + 1, 0)]

    @property
    def dropped(self) -> str:
        """The digits below the cut; they are lost."""
        return self.digits[max(self.high - self.cut + 1, 0) :]


@dataclass(frozen=True, slots=True)
class BitChart:
    """All rows of a step, and the places to draw: powers of two from ``first`` down to ``last``."""

    rows: tuple[BitRow, ...]
    exponent: int
    cut: int
    first: int
    last: int


def bit_chart(trace: AlignedSum) -> BitChart | None:
    """The terms, their sum and the result in binary; ``None`` where a special value decided."""
    if trace.max_exponent is None:
        return None
    cut, terms = trace.max_exponent - trace.fraction_bits, trace.terms
    names = [*map(str, range(len(terms) - 1)), "c"]
    rows = [_row(name, term.value, cut, term.exponent) for name, term in zip(names, terms, strict=True)]
    total = trace.total * Fraction(2) ** cut
    rows.append(_row("sum", total, cut, None))
    # The float32 keeps 24 digits from its leading one on, or less below the normal range.
    lowest = max(rows[-1].high, F32_MIN_EXPONENT) - F32_FRACTION_BITS
    rows.append(_row("result", total, lowest, None))
    shown = [row for row in rows if row.sign]
    first = max([trace.max_exponent, *(row.high for row in shown)]) + 1
    deepest = min([cut, *(row.high - len(row.digits) + 1 for row in shown)])
    return BitChart(tuple(rows), trace.max_exponent, cut, first, max(deepest, cut - BEYOND_CUT))


def _row(name: str, value: Fraction, cut: int, exponent: int | None) -> BitRow:
    if value == 0:
        return BitRow(name, 0, cut, "", cut, exponent)
    lowest = -(value.denominator.bit_length() - 1)
    digits = f"{abs(value.numerator):b}"
    high = lowest + len(digits) - 1
    return BitRow(name, -1 if value < 0 else 1, high, digits.rstrip("0"), cut, exponent)


# ------------------------------------------------------------------ words and rows


def outcome(seen: TensorCoreExplanation) -> str:
    """What happened, as an id: ``nan``, ``inf``, ``exact``, ``nearer`` (to zero than the exact sum), ``farther``."""
    trace = seen.trace
    if trace.special is not None:
        return trace.special
    if math.isinf(float(trace.result)):
        return "inf"
    off = Fraction(float(trace.result)) - trace.exact
    if off == 0:
        return "exact"
    return "nearer" if (off < 0) == (trace.exact > 0) and trace.exact != 0 else "farther"


def cut_terms(seen: TensorCoreExplanation) -> list[int]:
    """Which of the five terms lose bits at the cut; 4 is the accumulator."""
    return [index for index, term in enumerate(seen.trace.terms) if term.lost]


def rounded_off(trace: StepTrace) -> Fraction:
    """What the last truncation takes from the sum of the aligned terms, with its sign."""
    assert trace.max_exponent is not None
    return trace.total * Fraction(2) ** (trace.max_exponent - FRACTION_BITS) - Fraction(float(trace.result))


def describe_step(seen: TensorCoreExplanation, lang: str) -> str:
    """What the cuts took, and how the result compares with the exact sum."""
    trace = seen.trace
    what = outcome(seen)
    if what in ("nan", "inf", "exact"):
        return words(lang, f"figures.tensor_core.describe.{what}", bits=f"0x{trace.result_bits:08X}", terms=GROUPS + 1)
    lost = sum((abs(term.lost) for term in trace.terms), Fraction(0))
    return words(
        lang,
        f"figures.tensor_core.describe.{what}",
        cut=len(cut_terms(seen)),
        terms=GROUPS + 1,
        lost=three(float(lost)),
        rounded=three(float(abs(rounded_off(trace)))),
        off=three(abs(float(Fraction(float(trace.result)) - trace.exact))),
        places=FRACTION_BITS,
    )


def three(value: float) -> str:
    """A magnitude in three significant digits.

    >>> three(0.00181198), three(1.9073486e-06), three(95197.39)
    ('0.00181', '1.91×10⁻⁶', '9.52×10⁴')
    """
    text = f"{value:.3g}"
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    return f"{digits}×10{superscript(int(exponent))}"


def term_rows(seen: TensorCoreExplanation) -> list[dict[str, object]]:
    """The five terms as rows to show or download; none where a special value decided."""
    return [
        {
            "term": "c" if term.dot is None else str(index),
            "dot": None if term.dot is None else float(term.dot),
            "a_significand": _float(term.a_significand),
            "b_significand": _float(term.b_significand),
            "significand": float(term.significand),
            "exponent": term.exponent,
            "shift": term.shift,
            "kept": float(kept(seen.trace, term)),
            "dropped": float(term.lost),
        }
        for index, term in enumerate(seen.trace.terms)
    ]


def kept(trace: StepTrace, term: Term) -> Fraction:
    """The part of a term that enters the sum."""
    assert trace.max_exponent is not None
    return term.aligned * Fraction(2) ** (trace.max_exponent - FRACTION_BITS)


def element_rows(seen: TensorCoreExplanation) -> list[dict[str, object]]:
    """The 64 elements as rows to download."""
    block = BLOCK_SIZE[seen.trace.kind]
    return [
        {
            "k": k,
            "group": k // GROUP,
            "a_code": seen.a_codes[k],
            "b_code": seen.b_codes[k],
            "a_value": seen.a_values[k],
            "b_value": seen.b_values[k],
            "product": seen.a_values[k] * seen.b_values[k],
            "a_scale_byte": seen.a_scales[k // block],
            "b_scale_byte": seen.b_scales[k // block],
        }
        for k in range(STEP)
    ]


def _float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


# ------------------------------------------------------------------ a whole GEMM

LENGTHS = (64.0, 256.0, 1024.0, 4096.0)
SPREADS = (0.0, 4.0, 8.0)
SIGNS = ("signed", "positive")
ROWS, COLUMNS = 32, 64


def sample_product(k: int, spread: int, signs: str, seed: int = 7) -> AccumulationComparison:
    """A GEMM of ``ROWS × K`` activations and ``COLUMNS × K`` weights, accumulated in every way.

    Normal values; each run of 16 along K is smaller by a power of two from 1 to ``2**-spread``, on either side, as
    channels of different sizes make it.  ``signs="positive"`` takes magnitudes.  NVFP4 as vLLM's CUDA kernel quantises.
    """
    rng = np.random.default_rng(seed)

    def operand(rows: int) -> np.ndarray:
        sizes = np.repeat(2.0 ** -rng.integers(0, spread + 1, k // GROUP), GROUP)
        values = rng.standard_normal((rows, k)) * sizes
        return np.asarray((values if signs == "signed" else np.abs(values)).astype(np.float32), ml_dtypes.bfloat16)

    a, b = (quantize(operand(rows), recipe="vllm-cuda") for rows in (ROWS, COLUMNS))
    return compare_accumulation(a, b)
