"""Figures about which sixteen elements share a scale; the records come from :mod:`nvfp4viz.quant.grouping`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout, room_for
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.formats import decode_e2m1
from nvfp4viz.quant.grouping import (
    GROUP_SHAPE,
    GROUPINGS,
    Along,
    GroupedError,
    GroupedProduct,
    GroupedTensor,
    PartialSum,
    partial_sums,
    quantize_along,
)

Array = npt.NDArray[Any]
SIZES = (1.0, 4.0, 10.0, 40.0, 100.0)
"""How much larger the outlier channels are."""
ROWS, K, OUTLIERS = 64, 512, 8
INNER_ROWS, INNER_K = 16, 64
MAP_SHARE = 0.26
"""Of the figure of one inner sum: the height of X with its blocks."""


def outlier_pair(size: float, seed: int = 0) -> tuple[Array, Array]:
    """Activations ``(64, 512)`` with outlier channels, and a weight ``(64, 512)`` that makes up for them; BF16.

    Eight columns of the activations are ``size`` times larger, the same columns of the weight that much smaller, so
    that every channel counts alike in the product: channels whose share a network has learnt to need.
    """
    rng = np.random.default_rng(seed)
    sizes = np.ones(K)
    sizes[rng.choice(K, OUTLIERS, replace=False)] = size
    return _bf16(rng.standard_normal((ROWS, K)) * sizes), _bf16(rng.standard_normal((ROWS, K)) / sizes)


def _bf16(values: npt.NDArray[np.float64]) -> Array:
    return np.asarray(values.astype(np.float32), ml_dtypes.bfloat16)


# ------------------------------------------------------------------ one output's inner sum


@dataclass(frozen=True, slots=True, eq=False)
class InnerSum:
    """One output of a GEMM of 16 × 16 with K = 64, with its scales under every grouping.

    Attributes
    ----------
    m, n
        Which output.
    products
        For each grouping the 64 products of codes, without scales.
    runs
        For each grouping the runs of K over which no scale changes.
    """

    m: int
    n: int
    products: Mapping[Along, tuple[float, ...]]
    runs: Mapping[Along, tuple[PartialSum, ...]]

    def total(self, along: Along) -> float:
        """The output, without global scales; exact terms, rounded once."""
        return float(sum(run.term for run in self.runs[along]))


def inner_pair(seed: int = 11) -> tuple[Array, Array]:
    """Activations and weight ``(16, 64)`` of uneven size along K, BF16."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-2, 3, INNER_K)
    return tuple(_bf16(rng.standard_normal((INNER_ROWS, INNER_K)) * sizes) for _ in "xw")  # type: ignore[return-value]


def inner_sum(m: int, n: int) -> InnerSum:
    """The inner sum of output ``(m, n)`` of :func:`inner_pair`."""
    x, w = inner_pair()
    pairs = {along: (quantize_along(x, along), quantize_along(w, along)) for along in GROUPINGS}
    return InnerSum(
        m,
        n,
        {along: _products(*pair, m, n) for along, pair in pairs.items()},
        {along: partial_sums(*pair, m, n) for along, pair in pairs.items()},
    )


def _products(x: GroupedTensor, w: GroupedTensor, m: int, n: int) -> tuple[float, ...]:
    return tuple((decode_e2m1(x.codes[m]) * decode_e2m1(w.codes[n])).tolist())


def inner_figure(
    record: InnerSum, along: Along, *, shown: Sequence[Along] = GROUPINGS, theme: Theme, lang: str
) -> go.Figure:
    """The products of the codes along K; below them X with one block of each grouping on the output's row; below that
    a box for every scale that stands in the sum: a lane for each grouping in ``shown``."""
    ink, scale = surface(theme), role("block_scale", theme)
    label = {name: words(lang, f"figures.blocks.{name}") for name in (*GROUPINGS, "products", "k_axis")}
    figure = go.Figure(
        go.Bar(
            x=list(range(INNER_K)),
            y=record.products[along],
            marker={"color": ink.line, "line": {"color": ink.ink, "width": 1}},
            hovertemplate="k %{x}: %{y}<extra></extra>",
            showlegend=False,
        )
    )
    for lane, name in enumerate(shown):
        runs = record.runs[name]
        figure.add_trace(
            go.Bar(
                x=[(run.start + run.stop - 1) / 2 for run in runs],
                width=[run.stop - run.start for run in runs],
                y=[0.6] * len(runs),
                base=[-lane - 0.8] * len(runs),
                yaxis="y2",
                marker={
                    "color": scale.fill if name == along else "rgba(0,0,0,0)",
                    "line": {"color": ink.ink, "width": 1},
                },
                text=[f"{float(run.scale):.6g}" if run.stop - run.start >= 16 else "" for run in runs],
                textposition="inside",
                insidetextfont={"color": scale.on_fill if name == along else ink.ink, "size": 12},
                textangle=0,
                customdata=[list(row.values()) for row in run_rows(record, name)],
                hovertemplate="k %{customdata[0]}–%{customdata[1]}: %{customdata[2]:.6g} · %{customdata[3]:.6g}"
                " = %{customdata[4]:.6g}<extra></extra>",
                showlegend=False,
            )
        )
    names = [f"{label[name]}: {len(record.runs[name])}" for name in shown]
    row_of_x = words(lang, "figures.blocks.row_of_x", row=record.m)
    high = 0.32 * len(shown) / len(GROUPINGS)
    middle = high + 0.05 + MAP_SHARE
    layout = base_layout(
        theme,
        height=500,
        margin={"l": room_for([*names, row_of_x])},
        barmode="overlay",
        bargap=0.25,
        xaxis={
            "title": label["k_axis"],
            "dtick": 16,
            "showgrid": False,
            "range": [-0.8, INNER_K - 0.2],
            "anchor": "y2",
        },
        yaxis={"title": label["products"], "domain": [middle + 0.05, 1]},
        yaxis2={
            "domain": [0, high],
            "range": [-len(shown), 0],
            "tickvals": [-lane - 0.5 for lane in range(len(shown))],
            "ticktext": names,
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        yaxis3={
            "domain": [high + 0.05, middle],
            "range": [INNER_ROWS, 0],
            "tickvals": [record.m + 0.5],
            "ticktext": [row_of_x],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        **_blocks_on_row(record.m, along, theme, lang),
    )
    figure.layout = layout
    # An axis is drawn where a trace stands on it: the row that the output reads.
    figure.add_bar(
        x=[(INNER_K - 1) / 2],
        width=INNER_K,
        base=record.m,
        y=[1],
        yaxis="y3",
        marker={"color": ink.line, "line": {"color": ink.muted, "width": 1}},
        hoverinfo="skip",
        showlegend=False,
    )
    return figure


def _blocks_on_row(m: int, along: Along, theme: Theme, lang: str) -> dict[str, Any]:
    """One block of sixteen of every grouping that holds elements of row m, as shapes with their names."""
    ink, scale = surface(theme), role("block_scale", theme)
    left = {"k": 0, "rows": 24, "tile": 40}  # any block of a grouping would do; so apart, their names fit
    top = {name: m // GROUP_SHAPE[name][0] * GROUP_SHAPE[name][0] for name in GROUPINGS}
    # Beside the row, never on it.
    high = m < INNER_ROWS / 2
    at = {
        "k": (0, m + 2.5 if high else m - 1.5),
        "rows": (25.5, 12 if high else 3),
        "tile": (39.5, top["tile"] + (5.5 if high else -1.5)),
    }
    shapes = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "y3",
            "x0": left[name] - 0.5,
            "x1": left[name] + GROUP_SHAPE[name][1] - 0.5,
            "y0": top[name],
            "y1": top[name] + GROUP_SHAPE[name][0],
            "fillcolor": scale.fill if name == along else "rgba(0,0,0,0)",
            "line": {"color": ink.ink, "width": 1.5, "dash": "solid" if name == along else "dot"},
        }
        for name in GROUPINGS
    ]
    annotations = [
        {
            "text": words(lang, f"figures.blocks.shape_{name}"),
            "xref": "x",
            "yref": "y3",
            "x": x,
            "y": y,
            "xanchor": "left",
            "showarrow": False,
            "font": {"size": 12, "color": ink.ink},
            "bgcolor": ink.page,
            "borderpad": 0,
        }
        for name, (x, y) in at.items()
    ]
    return {"shapes": shapes, "annotations": annotations}


def describe_inner(record: InnerSum, lang: str) -> str:
    """How many scales stand in the sum under each grouping."""
    counts: dict[str, object] = {name: len(record.runs[name]) for name in GROUPINGS}
    return words(lang, "figures.blocks.describe_inner", products=INNER_K, **counts)


def run_rows(record: InnerSum, along: Along) -> list[dict[str, object]]:
    """The runs of one grouping as rows to show or download."""
    return [
        {
            "k_first": run.start,
            "k_last": run.stop - 1,
            "dot_of_codes": float(run.dot),
            "scale_product": float(run.scale),
            "term": float(run.term),
        }
        for run in record.runs[along]
    ]


# ------------------------------------------------------------------ errors


def best(found: Sequence[GroupedProduct]) -> Along:
    """The grouping with the smallest error of the product."""
    return max(found, key=lambda one: one.y.sqnr_db).along


def _styles(theme: Theme) -> dict[str, dict[str, Any]]:
    """How the bars of each grouping look: a colour, and two patterns."""
    ink = surface(theme)
    return {
        "k": {"color": role("block_scale", theme).fill},
        "rows": {"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": ink.ink, "size": 6}},
        "tile": {"color": "rgba(0,0,0,0)", "pattern": {"shape": "x", "fgcolor": ink.muted, "size": 7}},
    }


def error_figure(found: Sequence[GroupedProduct], *, theme: Theme, lang: str) -> go.Figure:
    """Signal to error of activations, weight and product under every grouping."""
    ink = surface(theme)
    label = {name: words(lang, f"figures.blocks.{name}") for name in (*GROUPINGS, "x", "w", "y", "quality")}
    styles = _styles(theme)
    figure = go.Figure(
        [
            go.Bar(
                x=[label[name] for name in ("x", "w", "y")],
                y=[summary.sqnr_db for summary in (one.x, one.w, one.y)],
                name=label[one.along],
                marker={**styles[one.along], "line": {"color": ink.ink, "width": 1}},
                text=[f"{summary.sqnr_db:.1f}" for summary in (one.x, one.w, one.y)],
                textposition="outside",
                textangle=0,
                textfont={"size": 11},
                cliponaxis=False,
                hovertemplate="%{x}: %{y:.3g} dB<extra>" + label[one.along] + "</extra>",
            )
            for one in found
        ]
    )
    top = max(summary.sqnr_db for one in found for summary in (one.x, one.w, one.y))
    figure.layout = base_layout(
        theme,
        height=400,
        barmode="group",
        bargap=0.25,
        xaxis={"showgrid": False},
        yaxis={"title": label["quality"], "range": [0, 1.15 * top]},
    )
    return figure


def describe_error(found: Sequence[GroupedProduct], lang: str) -> str:
    """The product's signal to error under each grouping, and how many activations became zero."""
    values: dict[str, object] = {one.along: f"{one.y.sqnr_db:.1f}" for one in found}
    zeroed: dict[str, object] = {f"zero_{one.along}": one.x.zeroed for one in found}
    return words(lang, "figures.blocks.describe_error", **values, **zeroed)


def error_rows(found: Sequence[GroupedProduct]) -> list[dict[str, object]]:
    """The comparison as rows."""
    return [
        {
            "grouping": one.along,
            "x_signal_to_error_db": one.x.sqnr_db,
            "w_signal_to_error_db": one.w.sqnr_db,
            "y_signal_to_error_db": one.y.sqnr_db,
            "x_zeroed": one.x.zeroed,
            "w_zeroed": one.w.zeroed,
            "scale_products_per_output": one.scale_products,
        }
        for one in found
    ]


def tensor_figure(found: Sequence[GroupedError], *, theme: Theme, lang: str) -> go.Figure:
    """Signal to error of one matrix under every grouping; an exact copy's bar is as high as the figure and says ∞."""
    ink, styles = surface(theme), _styles(theme)
    values = [one.error.sqnr_db for one in found]
    top = 1.2 * max((value for value in values if math.isfinite(value)), default=1.0)
    low = min(0.0, *(1.2 * value for value in values))
    # A trace for each: Plotly draws no patterns on transparent bars of one trace.
    figure = go.Figure(
        [
            go.Bar(
                x=[words(lang, f"figures.blocks.{one.along}")],
                y=[min(value, top)],
                marker={**styles[one.along], "line": {"color": ink.ink, "width": 1}},
                text=["∞" if value == math.inf else f"{value:.1f}"],
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{x}: %{text} dB<extra></extra>",
                showlegend=False,
            )
            for one, value in zip(found, values, strict=True)
        ]
    )
    figure.layout = base_layout(
        theme,
        height=400,
        barmode="overlay",
        bargap=0.45,
        xaxis={"showgrid": False},
        yaxis={"title": words(lang, "figures.blocks.quality"), "range": [low, 1.15 * top]},
    )
    return figure


def describe_tensor(found: Sequence[GroupedError], lang: str) -> str:
    """The matrix's signal to error under each grouping, and how many of its values became zero."""
    values: dict[str, object] = {one.along: f"{one.error.sqnr_db:.1f}".replace("inf", "∞") for one in found}
    zeroed: dict[str, object] = {f"zero_{one.along}": f"{one.error.zeroed:,}" for one in found}
    return words(lang, "figures.blocks.describe_tensor", **values, **zeroed)


def tensor_rows(found: Sequence[GroupedError]) -> list[dict[str, object]]:
    """The comparison of one matrix as rows."""
    return [
        {
            "grouping": one.along,
            "signal_to_error_db": one.error.sqnr_db,
            "mean_squared_error": one.error.mse,
            "largest_error": one.error.max_abs,
            "zeroed": one.error.zeroed,
        }
        for one in found
    ]
