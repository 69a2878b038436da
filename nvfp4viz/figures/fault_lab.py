"""What one fault does: damage layer by layer, and damage against the factor on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import MARKS, Theme, role, surface
from nvfp4viz.figures.words import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from nvfp4viz.serving.fault_lab import FaultEffect, SweepPoint

F64 = npt.NDArray[np.float64]


def _two_panels(
    x: F64, error: F64, share: F64, shares: str, *, theme: Theme, lang: str, hover: str, xaxis: dict[str, Any]
) -> go.Figure:
    """Relative error on a logarithmic axis above, a share from 0 to 1 below.

    An error without a logarithm stands in a gutter under the curve with its mark: ``=`` where no bit differs,
    ``N`` where nothing is left to compare.
    """
    import plotly.graph_objects as go

    ink = surface(theme)
    drawn = np.isfinite(error) & (error > 0)
    low = float(error[drawn].min()) if drawn.any() else 1e-3
    high = float(error[drawn].max()) if drawn.any() else 1.0
    gutter = low / 4
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "x": x,
            "y": np.where(drawn, error, np.nan),
            "mode": "lines+markers",
            "connectgaps": False,
            "line": {"color": ink.accent, "width": 2},
            "marker": {"size": 8, "color": ink.accent, "line": {"color": ink.ink, "width": 1}},
            "hovertemplate": f"{hover}: %{{y:.4g}}<extra></extra>",
            "name": words(lang, "fault_lab.figure.error"),
        }
    ]
    marks = {"=": (error == 0), MARKS["nan"]: np.isnan(error)}
    meanings = {"=": words(lang, "fault_lab.figure.same"), MARKS["nan"]: words(lang, "fault_lab.figure.none")}
    used = [mark for mark, here in marks.items() if here.any()]
    for mark in used:
        here = marks[mark]
        traces.append(
            {
                "type": "scatter",
                "x": x[here],
                "y": np.full(int(here.sum()), gutter),
                "mode": "text",
                "text": [mark] * int(here.sum()),
                "textfont": {"size": 15, "color": ink.ink},
                "hovertemplate": f"{hover}<extra></extra>",
                "name": f"{mark} {meanings[mark]}",
            }
        )
    traces.append(
        {
            "type": "bar",
            "x": x,
            "y": share,
            "yaxis": "y2",
            "marker": {
                "color": ink.panel,
                "line": {"color": role("sign", theme).text, "width": 1.5},
                "pattern": {"shape": "/", "fgcolor": role("sign", theme).text, "size": 6},
            },
            "hovertemplate": f"{hover}: %{{y:.1%}}<extra></extra>",
            "name": shares,
        }
    )
    note = {
        "text": " · ".join(f"<b>{mark}</b> {meanings[mark]}" for mark in used),
        "showarrow": False,
        **{"x": 0, "xref": "paper", "xanchor": "left", "y": 1.01, "yref": "paper", "yanchor": "bottom"},
        "font": {"size": 12, "color": ink.muted},
    }
    some = bool(drawn.any())
    layout = base_layout(
        theme,
        height=380,
        margin={"l": 63},
        bargap=0.45,
        showlegend=False,
        annotations=[note] if used else [],
        xaxis={**xaxis, "anchor": "y2", "zeroline": False},
        yaxis={
            "title": words(lang, "fault_lab.figure.error"),
            "type": "log",
            # Marks alone need less room than a curve, and an axis without a number on it has nothing to say.
            "domain": [0.46, 1] if some else [0.74, 1],
            "showticklabels": some,
            "showgrid": some,
            "ticks": "outside" if some else "",
            "dtick": 1,
            "exponentformat": "power",
            "range": [float(np.log10(gutter / 2)), float(np.log10(high * 2))],
        },
        yaxis2={
            "title": shares,
            "domain": [0, 0.34] if some else [0, 0.6],
            "range": [0, 1.05],
            "tickformat": ".0%",
            "nticks": 3,
        },
    )
    # Made in one go: adding part after part costs ten times as much.
    return go.Figure(traces, layout)


def layers_figure(effect: FaultEffect, *, theme: Theme, lang: str) -> go.Figure:
    """Relative error of the residual after each layer, and the share of positions that hold a NaN."""
    layers = np.arange(len(effect.layer_error), dtype=np.float64)
    return _two_panels(
        layers,
        effect.layer_error.astype(np.float64),
        effect.layer_nan.astype(np.float64),
        words(lang, "fault_lab.figure.nan"),
        theme=theme,
        lang=lang,
        hover="L%{x}",
        xaxis={
            "title": words(lang, "fault_lab.figure.layer"),
            "tickvals": layers.astype(int).tolist(),
            "ticktext": [f"L{int(layer)}" for layer in layers],
            "range": [-0.6, len(layers) - 0.4],
            "showgrid": False,
        },
    )


def describe_layers(effect: FaultEffect, lang: str) -> str:
    """Where the two runs part, and how far they are apart after the last layer."""
    if effect.first_broken is None:
        key = "fault_lab.figure.finding_same" if effect.visits else "fault_lab.figure.finding_unvisited"
        return words(lang, key, read=len(effect.read), visits=effect.visits)
    share = float(effect.layer_nan[-1])
    if share > 0:
        return words(
            lang,
            "fault_lab.figure.finding_nan",
            first=effect.first_broken,
            before=_percent(float(effect.layer_nan[effect.first_broken])),
            share=_percent(share),
            last=len(effect.layer_nan) - 1,
        )
    first, last = float(effect.layer_error[effect.first_broken]), float(effect.layer_error[-1])
    if not np.isfinite(last):
        # Every position is infinite: no NaN, and nothing left to compare either.
        return words(lang, "fault_lab.figure.finding_lost", first=effect.first_broken, last=len(effect.layer_error) - 1)
    return words(
        lang,
        "fault_lab.figure.finding_error",
        first=effect.first_broken,
        error=_percent(first),
        after=_percent(last),
        last=len(effect.layer_error) - 1,
    )


def _percent(share: float) -> str:
    """Three significant digits: a difference in one bit must not read as none."""
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%"


def layers_rows(effect: FaultEffect) -> list[dict[str, Any]]:
    """One row a layer: the relative error where both sides are finite, and the share of positions that are not."""
    return [
        {"layer": layer, "relative_error_where_finite": float(error), "nan_positions": float(share)}
        for layer, (error, share) in enumerate(zip(effect.layer_error, effect.layer_nan, strict=True))
    ]


def sweep_figure(points: Sequence[SweepPoint], *, theme: Theme, lang: str) -> go.Figure:
    """Error after the last layer against the factor, and the share of positions that would go on with another token."""
    x = np.log10([point.factor for point in points])
    ticks = [int(value) for value in np.unique(np.round(x)) if value % 2 == 0]
    return _two_panels(
        x,
        np.array([point.error for point in points], np.float64),
        np.array([point.changed for point in points], np.float64),
        words(lang, "fault_lab.figure.changed"),
        theme=theme,
        lang=lang,
        hover="10^%{x}",
        xaxis={
            "title": words(lang, "fault_lab.figure.factor"),
            "tickvals": ticks,
            "ticktext": ["1" if tick == 0 else f"10<sup>{tick}</sup>".replace("-", "−") for tick in ticks],
            "showgrid": False,
        },
    )


def calm_range(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The unbroken run of factors around 1 that change no most likely token; points in ascending order of factor."""
    calm = [point.changed == 0 and point.nan == 0 for point in points]
    middle = next((k for k, point in enumerate(points) if point.factor == 1 and calm[k]), None)
    if middle is None:
        return []
    low = high = middle
    while low > 0 and calm[low - 1]:
        low -= 1
    while high + 1 < len(points) and calm[high + 1]:
        high += 1
    return list(points[low : high + 1])


def describe_sweep(points: Sequence[SweepPoint], lang: str) -> str:
    """How wide the harmless range around 1 is, and what the worst factor does."""
    calm = calm_range(points)
    worst = max(points, key=lambda point: (point.nan, point.changed, np.nan_to_num(point.error, nan=np.inf)))
    said = {
        "points": len(points),
        "worst": f"{worst.factor:.4g}",
        "changed": _percent(worst.changed),
        "nan": _percent(worst.nan),
    }
    if len(calm) == len(points):
        key = "finding_sweep_calm"
        said = {"points": len(points), "worst": said["worst"], "error": _percent(worst.error)}
    elif calm:
        key = "finding_sweep"
        said |= {"calm": len(calm), "low": f"{calm[0].factor:.4g}", "high": f"{calm[-1].factor:.4g}"}
    else:
        key = "finding_sweep_none"
    return words(lang, f"fault_lab.figure.{key}", **said)


def sweep_rows(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """One row a factor."""
    return [
        {
            "factor": point.factor,
            "relative_error_where_finite": point.error,
            "nan_positions": point.nan,
            "loss": point.loss,
            "changed_tokens": point.changed,
        }
        for point in points
    ]
