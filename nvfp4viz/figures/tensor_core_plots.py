"""The histogram of how far a tensor-core GEMM lies from float32 arithmetic, or from the exact product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, surface
from nvfp4viz.figures.words import words
from nvfp4viz.quant.tensor_core_difference import AccumulationComparison

AGAINST = ("float32", "exact")
REACH = 16
"""Spacings that the histogram covers on either side; what lies farther is counted in the last bar."""


@dataclass(frozen=True, slots=True)
class DifferenceHistogram:
    """Outputs of a GEMM by how many float32 spacings they lie from a reference.

    Attributes
    ----------
    against
        ``"float32"`` or ``"exact"``.
    ulps
        -REACH … REACH: negative toward zero.  A fraction of a spacing counts as a whole one, so that 0 means equal.
    counts
        Outputs in each.
    toward, equal, away
        Outputs nearer zero than the reference, equal to it, farther from zero.
    median
        The median difference in spacings, fractions kept.
    """

    against: str
    k: int
    ulps: tuple[int, ...]
    counts: tuple[int, ...]
    toward: int
    equal: int
    away: int
    median: float

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return self.toward + self.equal + self.away


def difference_histogram(record: AccumulationComparison, against: str) -> DifferenceHistogram:
    """Count the differences of a comparison."""
    off = record.against_float32() if against == "float32" else record.against_exact(record.tensor_core)
    whole = np.clip(np.sign(off) * np.ceil(np.abs(off)), -REACH, REACH).astype(int).ravel()
    counts = np.bincount(whole + REACH, minlength=2 * REACH + 1)
    return DifferenceHistogram(
        against,
        record.k,
        tuple(range(-REACH, REACH + 1)),
        tuple(counts.tolist()),
        int((off < 0).sum()),
        int((off == 0).sum()),
        int((off > 0).sum()),
        float(np.median(off)),
    )


def direction(record: DifferenceHistogram) -> str:
    """Where the results that differ lie: ``always`` nearer zero, ``mostly``, on ``both`` sides; ``equal`` if none does.

    ``mostly``: at least twice as many nearer zero as farther from it.
    """
    if record.toward + record.away == 0:
        return "equal"
    if record.away == 0:
        return "always"
    return "mostly" if record.toward >= 2 * record.away else "both"


def difference_figure(record: DifferenceHistogram, *, theme: Theme, lang: str) -> go.Figure:
    """Bars left of zero lie nearer zero, right of it farther from zero; equal results are drawn empty."""
    ink = surface(theme)
    label = {name: words(lang, f"figures.tensor_core.{name}") for name in ("toward", "equal", "away", "axis", "count")}
    styles = {
        "toward": {"color": ink.ink, "pattern": {"shape": ""}},
        "equal": {"color": "rgba(0,0,0,0)", "pattern": {"shape": ""}},
        "away": {"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": ink.ink, "size": 6}},
    }
    parts = {"toward": slice(0, REACH), "equal": slice(REACH, REACH + 1), "away": slice(REACH + 1, None)}
    totals = {"toward": record.toward, "equal": record.equal, "away": record.away}
    figure = go.Figure(
        [
            go.Bar(
                x=record.ulps[part],
                y=record.counts[part],
                name=f"{label[name]}: {totals[name]}",
                marker={**styles[name], "line": {"color": ink.ink, "width": 1}},
                hovertemplate=f"%{{x}}: %{{y}}<extra>{label[name]}</extra>",
            )
            for name, part in parts.items()
        ]
    )
    ticks = [-REACH, -REACH // 2, 0, REACH // 2, REACH]
    names = [f"≤ −{REACH}", f"−{REACH // 2}", "0", f"{REACH // 2}", f"≥ {REACH}"]
    figure.layout = base_layout(
        theme,
        height=360,
        bargap=0.12,
        xaxis={
            "title": label["axis"],
            "range": [-REACH - 0.7, REACH + 0.7],
            "tickvals": ticks,
            "ticktext": names,
            "showgrid": False,
        },
        yaxis={"title": label["count"], "range": [0, 1.08 * max(record.counts)]},
    )
    return figure


def describe_difference(record: DifferenceHistogram, lang: str) -> str:
    """How many outputs lie nearer zero, equal and farther."""
    side = "toward" if record.median < 0 else "away" if record.median > 0 else "neither"
    return words(
        lang,
        f"figures.tensor_core.describe_difference.{record.against}",
        outputs=record.outputs,
        k=record.k,
        toward=record.toward,
        equal=record.equal,
        away=record.away,
        median=f"{abs(record.median):.3g}",
        side=words(lang, f"figures.tensor_core.side.{side}"),
    )


def histogram_rows(record: DifferenceHistogram) -> list[dict[str, object]]:
    """The bars as rows."""
    return [
        {"float32_spacings": ulps, "outputs": count} for ulps, count in zip(record.ulps, record.counts, strict=True)
    ]
