"""Figures about two-level scaling; the records come from :mod:`nvfp4viz.quant.compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.formats import BLOCK, E4M3
from nvfp4viz.quant.compare import HeadroomPoint, LadderRung, ScalingLevel

F32 = npt.NDArray[np.float32]
LOWEST, HIGHEST = -24, 12  # powers of two that the histogram covers; what lies outside is counted at its ends


@dataclass(frozen=True, slots=True)
class ScaleHistogram:
    """How many blocks ask for a scale in each doubling, for one level and for two."""

    powers: tuple[int, ...]
    one: tuple[int, ...]
    two: tuple[int, ...]
    dead_one: int
    dead_two: int
    blocks: int


def scale_histogram(one: ScalingLevel, two: ScalingLevel) -> ScaleHistogram:
    """Count the block scales that were asked for, by powers of two."""
    assert one.asked is not None
    assert two.asked is not None

    def counts(asked: F32) -> tuple[int, ...]:
        positive = asked[asked > 0]
        powers = np.clip(np.floor(np.log2(positive)), LOWEST, HIGHEST - 1).astype(int)
        return tuple(np.bincount(powers - LOWEST, minlength=HIGHEST - LOWEST).tolist())

    powers = tuple(range(LOWEST, HIGHEST))
    return ScaleHistogram(powers, counts(one.asked), counts(two.asked), one.dead, two.dead, one.asked.size)


def scale_histogram_figure(record: ScaleHistogram, *, theme: Theme, lang: str) -> go.Figure:
    """Two histograms of block scales over the range of E4M3: without a global scale they fall out of it."""
    ink, scale = surface(theme), role("block_scale", theme)
    label = _labels(lang, "histogram", "one", "two", "axis", "count", "dies", "coarse", "full", "large")
    places = [power + 0.5 for power in record.powers]
    figure = go.Figure(
        [
            go.Bar(
                x=places,
                y=record.one,
                name=label["one"],
                marker={
                    "color": "rgba(0,0,0,0)",
                    "line": {"color": ink.ink, "width": 1.5},
                    "pattern": {"shape": "/", "fgcolor": ink.muted, "size": 6},
                },
                hovertemplate=f"{label['one']}: %{{y}}<extra></extra>",
            ),
            go.Bar(
                x=places,
                y=record.two,
                name=label["two"],
                marker={"color": scale.fill, "line": {"color": ink.ink, "width": 1}},
                hovertemplate=f"{label['two']}: %{{y}}<extra></extra>",
            ),
        ]
    )
    dies, normal, largest = (math.log2(v) for v in (E4M3.min_subnormal / 2, E4M3.min_normal, E4M3.max_value))
    ticks = [-20, -15, dies, normal, 0, largest]
    names = ["1" if tick == 0 else f"2<sup>{tick:.0f}</sup>" for tick in ticks[:-1]] + [f"{E4M3.max_value:g}"]
    figure.layout = base_layout(
        theme,
        height=340,
        barmode="overlay",
        bargap=0.12,
        xaxis={
            "title": label["axis"],
            "range": [LOWEST, HIGHEST],
            "tickvals": ticks,
            "ticktext": names,
            "showgrid": False,
        },
        yaxis={"title": label["count"], "range": [0, 1.18 * max(*record.one, *record.two)]},
        margin={"t": 56},
    )
    for at in (dies, normal, largest):
        figure.add_vline(x=at, line={"color": ink.muted, "width": 1, "dash": "dot"})
    middles = [(LOWEST, dies, "dies"), (dies, normal, "coarse"), (normal, largest, "full"), (largest, HIGHEST, "large")]
    for low, high, name in middles:
        figure.add_annotation(
            x=(low + high) / 2, y=1, yref="paper", yanchor="top", text=label[name], showarrow=False, font={"size": 12}
        )
    figure.layout.legend.y = 1.06
    return figure


def describe_scale_histogram(record: ScaleHistogram, lang: str) -> str:
    """How many blocks die with and without the global scale."""
    return words(
        lang,
        "figures.histogram.describe",
        one=record.dead_one,
        two=record.dead_two,
        blocks=record.blocks,
    )


def headroom_figure(
    points: Sequence[HeadroomPoint], chosen: float, *, blocks: int, theme: Theme, lang: str
) -> go.Figure:
    """Quality and the fate of the blocks against how far the calibrated maximum is from the real one."""
    ink, scale = surface(theme), role("block_scale", theme)
    label = _labels(lang, "headroom", "quality", "share", "axis", "saturated", "subnormal", "dead")
    x = [math.log2(point.factor) for point in points]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.55, 0.45], vertical_spacing=0.09)
    figure.add_trace(
        go.Scatter(
            x=x,
            y=[point.summary.sqnr_db for point in points],
            mode="lines+markers",
            line={"color": ink.ink, "width": 2},
            marker={"size": 6},
            showlegend=False,
            hovertemplate="%{y:.3g} dB<extra></extra>",
        ),
        row=1,
        col=1,
    )
    kinds = {
        "saturated": ([p.saturated for p in points], {"color": ink.ink, "pattern": {"shape": ""}}),
        "subnormal": (
            [p.subnormal for p in points],
            {"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": scale.fill, "size": 6}},
        ),
        "dead": (
            [p.dead for p in points],
            {"color": "rgba(0,0,0,0)", "pattern": {"shape": "x", "fgcolor": ink.muted, "size": 6}},
        ),
    }
    for name, (counts, marker) in kinds.items():
        figure.add_trace(
            go.Bar(
                x=x,
                y=[100 * count / blocks for count in counts],
                name=label[name],
                marker={**marker, "line": {"color": ink.ink, "width": 1}},
                customdata=counts,
                hovertemplate=f"{label[name]}: %{{customdata}}<extra></extra>",
            ),
            row=2,
            col=1,
        )
    # Every fourth doubling at most, so that labels also fit on a phone.
    ticks = [value for value in x if value % 6 == 0]
    axis = {"tickvals": ticks, "ticktext": ["1" if v == 0 else f"2<sup>{v:.0f}</sup>" for v in ticks]}
    layout = base_layout(
        theme,
        height=460,
        margin={"t": 44},
        barmode="stack",
        bargap=0.15,
        xaxis={**axis, "showticklabels": False},
        xaxis2={**axis, "title": label["axis"]},
        yaxis={"title": label["quality"], "domain": figure.layout.yaxis.domain},
        yaxis2={"title": label["share"], "domain": figure.layout.yaxis2.domain, "range": [0, 100]},
    )
    layout["xaxis"] |= {"matches": "x2", "anchor": "y", "domain": [0, 1]}
    layout["xaxis2"] |= {"anchor": "y2", "domain": [0, 1]}
    layout["yaxis"] |= {"anchor": "x"}
    layout["yaxis2"] |= {"anchor": "x2"}
    figure.layout = layout
    figure.add_vline(x=math.log2(chosen), line={"color": ink.accent, "width": 2})
    return figure


def describe_headroom(points: Sequence[HeadroomPoint], lang: str) -> str:
    """How far a maximum may be over- and underestimated until a decibel is lost."""
    best = next(point for point in points if point.factor == 1)
    fine = [p.factor for p in points if p.summary.sqnr_db >= best.summary.sqnr_db - 1]
    below = [p for p in points if p.factor < min(fine)]
    nearest = max(below, key=lambda p: p.factor)
    return words(
        lang,
        "figures.headroom.describe",
        over=f"{max(fine):g}",
        under=f"{1 / nearest.factor:g}",
        loss=f"{best.summary.sqnr_db - nearest.summary.sqnr_db:.1f}",
    )


def ladder_figure(rungs: Sequence[LadderRung], *, theme: Theme, lang: str) -> go.Figure:
    """Quality against how many elements share a scale."""
    ink, scale = surface(theme), role("block_scale", theme)
    label = _labels(lang, "ladder", "quality", "bits", *(rung.name for rung in rungs))
    figure = go.Figure(
        go.Bar(
            y=[label[rung.name] for rung in rungs],
            x=[rung.summary.sqnr_db for rung in rungs],
            orientation="h",
            marker={
                "color": [scale.fill if rung.name == "nvfp4" else ink.line for rung in rungs],
                "line": {"color": ink.ink, "width": 1},
            },
            text=[f"{rung.summary.sqnr_db:.1f} dB · {rung.scale_bits:.3g} {label['bits']}" for rung in rungs],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.3g} dB<extra></extra>",
        )
    )
    top = max(rung.summary.sqnr_db for rung in rungs)
    figure.layout = base_layout(
        theme,
        height=56 * len(rungs) + 72,
        xaxis={"title": label["quality"], "range": [0, top * 1.55], "showgrid": False},
        yaxis={"autorange": "reversed", "showgrid": False, "ticks": ""},
    )
    return figure


def describe_ladder(rungs: Sequence[LadderRung], lang: str) -> str:
    """What a block scale gains over one scale for the tensor, and what rounding it to E4M3 costs."""
    by_name = {rung.name: rung for rung in rungs}
    return words(
        lang,
        "figures.ladder.describe",
        gain=f"{by_name['block'].summary.sqnr_db - by_name['tensor'].summary.sqnr_db:.1f}",
        cost=f"{by_name['block'].summary.sqnr_db - by_name['nvfp4'].summary.sqnr_db:.1f}",
        exact_bits=f"{by_name['block'].scale_bits:.3g}",
        bits=f"{by_name['nvfp4'].scale_bits:.3g}",
    )


def block_errors(x: F32, level: ScalingLevel) -> F32:
    """Error of each block as a share of the block's own size: 0 is exact, 1 means that nothing is left of it."""
    rows = len(x)
    size = np.sqrt((x.reshape(rows, -1, BLOCK).astype(np.float64) ** 2).mean(axis=2))
    error = np.sqrt((level.error.reshape(rows, -1, BLOCK).astype(np.float64) ** 2).mean(axis=2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 0, error / size, 0).astype(np.float32)


def error_map_figure(x: F32, levels: Sequence[ScalingLevel], *, theme: Theme, lang: str) -> go.Figure:
    """The same tensor under each way of scaling, a cell a block; lost blocks carry a mark beside their colour."""
    label = _labels(lang, "error_map", "none", "one", "two", "row", "block", "error", "lost")
    ink = surface(theme)
    names = [label[level.level] for level in levels]
    figure = make_subplots(rows=1, cols=len(levels), shared_yaxes=True, subplot_titles=names, horizontal_spacing=0.03)
    for column, level in enumerate(levels, start=1):
        errors = block_errors(x, level)
        figure.add_trace(
            go.Heatmap(
                z=errors,
                zmin=0,
                zmax=1,
                colorscale="Cividis",
                showscale=column == len(levels),
                colorbar={
                    "orientation": "h",
                    "y": -0.2,
                    "yanchor": "top",
                    "title": {"text": label["error"], "side": "top", "font": {"color": ink.ink, "size": 13}},
                    "tickformat": ".0%",
                    "tickfont": {"color": ink.muted},
                    "thickness": 12,
                    "outlinewidth": 0,
                },
                hovertemplate=f"{label['row']} %{{y}}, {label['block']} %{{x}}: %{{z:.1%}}<extra></extra>",
            ),
            row=1,
            col=column,
        )
        lost_rows, lost_blocks = np.nonzero(errors >= 1)
        figure.add_trace(
            go.Scatter(
                x=lost_blocks.astype(np.int16),
                y=lost_rows.astype(np.int16),
                mode="markers",
                marker={"symbol": "x-thin", "size": 4, "line": {"color": "#1A2332", "width": 1}},
                name=label["lost"],
                showlegend=False,
                hoverinfo="skip",
            ),
            row=1,
            col=column,
        )
    rows, blocks = len(x), x.size // len(x) // BLOCK
    bare = {"showgrid": False, "zeroline": False}
    layout = base_layout(
        theme,
        height=480,
        margin={"t": 48},
        xaxis={**bare, "range": [-0.5, blocks - 0.5], "dtick": 8, "title": label["block"]},
        yaxis={**bare, "range": [rows - 0.5, -0.5], "dtick": 8},
    )
    axes = {"x": layout.pop("xaxis"), "y": layout.pop("yaxis")}
    made = figure.layout.to_plotly_json()  # where the panels are, and their titles
    for name in made:
        if "axis" in name:
            made[name] = axes[name[0]] | made[name]
    made["yaxis"]["title"] = {**axes["y"]["title"], "text": label["row"]}
    for title in made["annotations"]:
        title["font"] = {"size": 13, "color": ink.ink}
    figure.layout = made | layout
    return figure


def describe_error_map(x: F32, levels: Sequence[ScalingLevel], lang: str) -> str:
    """How many blocks are lost in each panel."""
    lost = {level.level: int((block_errors(x, level) >= 1).sum()) for level in levels}
    return words(lang, "figures.error_map.describe", blocks=x.size // BLOCK, **lost)


def _labels(lang: str, table: str, *names: str) -> dict[str, str]:
    return {name: words(lang, f"figures.{table}.{name}") for name in names}
