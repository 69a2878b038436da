"""Figures about E2M1 codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.formats import E2M1, ExplainedValue, e2m1_code_scalar, explain


@dataclass(frozen=True, slots=True)
class Reading:
    """One nibble, read in two ways."""

    code: int
    bits: str
    value: float  # as E2M1
    integer: int  # as an unsigned 4-bit integer


def code_readings() -> tuple[Reading, ...]:
    """All sixteen nibbles as E2M1 values and as integers.

    >>> code_readings()[3]
    Reading(code=3, bits='0011', value=1.5, integer=3)
    """
    codes = range(1 << E2M1.bits)
    return tuple(Reading(code, (record := explain(E2M1, code)).bits, record.value, code) for code in codes)


def code_readings_figure(readings: Sequence[Reading], *, theme: Theme, lang: str) -> go.Figure:
    """Sixteen nibbles against what they mean: an integer climbs in a line, a float bends and folds over."""
    ink = surface(theme)
    float_colour = role("mantissa", theme).text
    codes = [f"0x{reading.code:X}" for reading in readings]
    label = {name: words(lang, f"figures.readings.{name}") for name in ("integer", "value", "code", "axis")}
    figure = go.Figure(
        [
            go.Scatter(
                x=codes,
                y=[reading.integer for reading in readings],
                name=label["integer"],
                mode="lines+markers",
                line={"color": ink.muted, "width": 1, "dash": "dot"},
                marker={"symbol": "square-open", "size": 9, "color": ink.muted},
                hovertemplate=f"{label['integer']}: %{{y}}<extra></extra>",
            ),
            go.Scatter(
                x=codes,
                y=[reading.value for reading in readings],
                name=label["value"],
                mode="lines+markers",
                line={"color": float_colour, "width": 2},
                marker={"symbol": "circle", "size": 10, "color": float_colour},
                hovertemplate=f"{label['value']}: %{{y}}<extra></extra>",
            ),
        ]
    )
    figure.layout = base_layout(
        theme,
        height=320,
        xaxis={"title": label["code"], "type": "category", "showgrid": False},
        yaxis={"title": label["axis"], "zeroline": True},
        hovermode="x unified",
    )
    return figure


def describe_code_readings(readings: Sequence[Reading], lang: str) -> str:
    """How many of the nibbles mean the same number either way."""
    same = sum(reading.value == reading.integer for reading in readings)
    return words(lang, "figures.readings.describe", same=same, count=len(readings))


@dataclass(frozen=True, slots=True)
class Rounding:
    """A number, the codes on both sides of it, and where it went."""

    x: float
    lower: float
    upper: float
    stored: float
    code: int
    bits: str
    tie: bool
    went_up: bool


def rounding_of(x: float) -> Rounding:
    """What becomes of a number between two E2M1 values.

    >>> r = rounding_of(3.5)
    >>> r.lower, r.upper, r.stored, r.tie, r.went_up
    (3.0, 4.0, 4.0, True, True)
    """
    code = e2m1_code_scalar(x)
    stored = explain(E2M1, code)
    values = sorted({explain(E2M1, other).value for other in range(1 << E2M1.bits)})
    lower = max(value for value in values if value <= x)
    upper = min(value for value in values if value >= x)
    tie = lower < x < upper and x - lower == upper - x
    return Rounding(x, lower, upper, stored.value, code, stored.bits, tie, stored.value > x)


@dataclass(frozen=True, slots=True)
class NibbleProduct:
    """Two nibbles multiplied: as the numbers they mean, and as what they are taken for."""

    a: int
    b: int
    a_value: float
    b_value: float
    product: float
    integers: int  # both taken for integers
    mistaken: float  # the first taken for the second, as an often copied example has it


def nibble_product(a: int, b: int) -> NibbleProduct:
    """The product of two E2M1 codes, and two wrong readings of it.

    >>> p = nibble_product(0x2, 0x3)
    >>> p.product, p.integers, p.mistaken
    (1.5, 6, 2.25)
    """
    first, second = explain(E2M1, a).value, explain(E2M1, b).value
    return NibbleProduct(a, b, first, second, first * second, a * b, second * second)


# What a float32 can be that a 4-bit float has no room for, and the ends of its range.
EDGES = (math.nan, math.inf, -math.inf, -0.0, 0.25, -0.25, 0.26, 5.0, 5.1, 1e30)


def edge_rows(values: Sequence[float] = EDGES) -> list[ExplainedValue]:
    """The code that each edge value becomes, explained."""
    return [explain(E2M1, e2m1_code_scalar(value)) for value in values]


def code_rows() -> list[dict[str, object]]:
    """The whole format as rows to download."""
    return [
        {"code": v.code, "bits": v.bits, "value": v.value, "class": v.klass, "formula": v.formula}
        for v in (explain(E2M1, code) for code in range(1 << E2M1.bits))
    ]


def rounding_rows() -> list[dict[str, object]]:
    """Every value, every midpoint: the number, its code, and whether it is a tie."""
    values = sorted({explain(E2M1, code).value for code in range(1 << E2M1.bits)})
    numbers = sorted({*values, *((low + high) / 2 for low, high in pairwise(values))})
    found = [rounding_of(number) for number in numbers]
    return [{"number": r.x, "stored": r.stored, "code": r.code, "bits": r.bits, "tie": r.tie} for r in found]
