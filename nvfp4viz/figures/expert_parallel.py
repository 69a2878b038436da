"""Figures of expert parallelism: ranks and their experts, who sends to whom, when, and how even the load is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import SEQUENTIAL, Surface, Theme, on_sequential, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.moe.overlap import Bar
from nvfp4viz.moe.parallel import Exchange, Placement, imbalance
from nvfp4viz.serving.route_trace import Balance

Rows = list[dict[str, object]]
WRITTEN = 8
"""Up to this many ranks, cells of the matrix carry their number, and every rank has its lane."""
BESIDE_CELLS = {"l": 50, "t": 97}
"""Room for the ranks' names, and for the colour bar above."""


def rank_name(rank: int, lang: str) -> str:
    """``rank 3``."""
    return words(lang, "figures.expert_parallel.rank", rank=rank)


def _ranks_axis(ranks: int, lang: str, name: str = "rank", **more: Any) -> dict[str, Any]:
    """Every rank's name while there is room, else every fourth."""
    shown = range(0, ranks, 1 if ranks <= 2 * WRITTEN else 4)
    return {
        "tickvals": list(shown),
        "ticktext": [words(lang, f"figures.expert_parallel.{name}", rank=rank) for rank in shown],
        "showgrid": False,
        "zeroline": False,
        **more,
    }


# ------------------------------------------------------------------ ranks and their experts


def ranks_drawing(placement: Placement, layer: Exchange, *, alt: str, lang: str) -> str:
    """A line of boxes for each rank, as HTML: its slots, the expert in each, and the rows that it computes (log scale).

    A slot without a row is hatched and has no colour.  The rank's own rows stand under its name.
    """
    rows = layer.slot_rows.reshape(placement.ranks, -1)
    held = placement.slots.reshape(placement.ranks, -1)
    top = float(np.log10(rows.max() + 1)) or 1.0
    out = [f'<div class="rank-map" role="group" aria-label="{escape(alt)}">{_row_scale(top, lang)}']
    boxes = rows.shape[1]
    out[0] += f'<div style="--boxes:{_in_a_line(boxes, 20)};--narrow:{_in_a_line(boxes, 10)}">'
    for rank, total in enumerate(layer.rank_rows.tolist()):
        name = escape(rank_name(rank, lang))
        out.append(f'<section><p class="name">{name}<b>{total:,}</b></p><ol>')
        for expert, count in zip(held[rank].tolist(), rows[rank].tolist(), strict=True):
            shown = f"{expert}{'′' if placement.replicas[expert] > 1 else ''}"
            said = escape(words(lang, "figures.expert_parallel.slot_said", rank=name, expert=shown, rows=f"{count:,}"))
            share = float(np.log10(count + 1)) / top
            look = f' style="background:{_cividis(share)};color:{on_sequential(share)}"' if count else ' class="idle"'
            out.append(f'<li{look} title="{said}"><span>{shown}</span></li>')
        out.append("</ol></section>")
    return "".join([*out, "</div></div>"])


def _row_scale(top: float, lang: str) -> str:
    """The colours' scale: powers of ten at their places on it."""
    ticks = "".join(
        f'<span style="left:{100 * float(np.log10(10**power + 1)) / top:.1f}%">{10**power:,}</span>'
        for power in range(1 + int(np.log10(max(10**top - 1, 1))))
    )
    colours = ",".join(_cividis(step / 8) for step in range(9))
    title = escape(words(lang, "figures.expert_parallel.rows"))
    bar = f'<i style="background:linear-gradient(to right,{colours})"></i>'
    return f'<p class="scale">{title}{bar}<small>{ticks}</small></p>'


def _in_a_line(boxes: int, most: int) -> int:
    """How many stand beside each other, in equal lines of at most so many.

    >>> _in_a_line(17, 20), _in_a_line(17, 10), _in_a_line(36, 20)
    (17, 9, 18)
    """
    return -(-boxes // -(-boxes // most))


@cache
def _cividis(share: float) -> str:
    from plotly.colors import sample_colorscale

    return str(sample_colorscale(SEQUENTIAL, [share], colortype="rgb")[0])


def _labels(text: list[list[str]], shown: list[list[float | None]], top: float, theme: Theme) -> dict[str, Any]:
    """What stands in the cells, in an ink that can be read on each: a heatmap's own text turns from white to black too
    late, and is not written where a cell has no colour."""
    cells = [(x, y) for y, line in enumerate(text) for x in range(len(line))]
    values = [value for line in shown for value in line]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [x for x, _ in cells],
        "y": [y for _, y in cells],
        "text": [each for line in text for each in line],
        "textfont": {
            "color": [surface(theme).muted if value is None else on_sequential(value / top) for value in values],
            "size": 12,
        },
        "hoverinfo": "skip",
    }


def _bar(theme: Theme, title: str) -> dict[str, Any]:
    """A colour bar above the cells: beside them it would take a phone's width."""
    ink = surface(theme)
    return {
        "title": {"text": title, "side": "top", "font": {"color": ink.ink, "size": 12}},
        "orientation": "h",
        "thickness": 10,
        "len": 0.6,
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
        "tickfont": {"color": ink.muted, "size": 11},
        "outlinewidth": 0,
        "nticks": 4,
    }


def describe_ranks(placement: Placement, layer: Exchange, lang: str) -> str:
    """Which rank computes most, and how much more than the mean."""
    load = layer.rank_rows
    found = imbalance(load)
    return words(
        lang,
        "figures.expert_parallel.describe_ranks",
        rank=found.slowest,
        most=f"{int(load.max()):,}",
        mean=f"{load.mean():,.0f}",
        ratio=f"{found.ratio:.2f}",
    )


def slot_rows(placement: Placement, layer: Exchange) -> Rows:
    """Every slot as a row."""
    return [
        {"rank": int(rank), "slot": slot, "expert": int(expert), "rows": int(rows)}
        for slot, (rank, expert, rows) in enumerate(
            zip(placement.rank_of, placement.slots, layer.slot_rows, strict=True)
        )
    ]


# ------------------------------------------------------------------ who sends to whom


def matrix_figure(sent: np.ndarray, *, theme: Theme, lang: str) -> go.Figure:
    """Bytes from home ranks (rows) to experts' ranks (columns); the diagonal stays in place and is empty.

    Cells with a number need no colour bar: its unit stands above them.
    """
    ranks, ink = len(sent), surface(theme)
    written, unit = ranks <= WRITTEN, words(lang, "figures.expert_parallel.kilobytes")
    kilo = sent / 1000
    text = [
        [_kilo(value) if row != column else "·" for column, value in enumerate(line)] for row, line in enumerate(kilo)
    ]
    shown = [
        [None if row == column else float(value) for column, value in enumerate(line)] for row, line in enumerate(kilo)
    ]
    top = max((value for line in shown for value in line if value is not None), default=0.0) or 1.0
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            text=text,
            colorscale=SEQUENTIAL,
            zmin=0,
            zmax=top,
            xgap=2,
            ygap=2,
            hoverongaps=False,
            showscale=not written,
            colorbar=None if written else _bar(theme, unit),
            hovertemplate=words(lang, "figures.expert_parallel.sent_hover") + "<extra></extra>",
        )
    )
    if written:
        figure.add_trace(_labels(text, shown, top, theme))
    figure.layout = base_layout(
        theme,
        showlegend=False,
        height=max(240, 75 + 34 * ranks) if written else 120 + 16 * ranks,
        margin=BESIDE_CELLS | ({"t": 30} if written else {}),
        annotations=[_unit(unit, ink)] if written else [],
        xaxis=_ranks_axis(ranks, lang, "to", tickangle=0 if ranks <= 4 else -60),
        yaxis=_ranks_axis(ranks, lang, "from", autorange="reversed"),
    )
    return figure


def _unit(text: str, ink: Surface) -> dict[str, Any]:
    """What the numbers of the cells count, above them."""
    return {
        "text": text,
        "showarrow": False,
        "font": {"color": ink.ink, "size": 12},
        **dict.fromkeys(("xref", "yref"), "paper"),
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
    }


def _kilo(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def describe_matrix(sent: np.ndarray, lang: str) -> str:
    """How much travels in all, and through which port most of it."""
    arriving = sent.sum(axis=0)
    return words(
        lang,
        "figures.expert_parallel.describe_matrix",
        total=f"{int(sent.sum()):,}",
        rank=int(arriving.argmax()),
        most=f"{int(arriving.max()):,}",
    )


def sent_rows(layer: Exchange, dispatched: np.ndarray, combined: np.ndarray) -> Rows:
    """Every pair of ranks as a row."""
    ranks = len(layer.tokens)
    return [
        {
            "home": home,
            "experts": there,
            "tokens": int(layer.copies[home, there]),
            "routes": int(layer.routes[home, there]),
            "dispatch_bytes": int(dispatched[home, there]),
            "combine_bytes": int(combined[there, home]),
        }
        for home in range(ranks)
        for there in range(ranks)
    ]


# ------------------------------------------------------------------ when

KINDS = ("dispatch", "compute", "combine")


def lanes(bars: Sequence[Bar]) -> list[int]:
    """The ranks that are drawn: all, or of many the four that compute longest and the four shortest."""
    busy: dict[int, float] = {}
    for bar in bars:
        busy[bar.rank] = busy.get(bar.rank, 0.0) + (bar.end - bar.start if bar.kind == "compute" else 0.0)
    order = sorted(busy, key=lambda rank: (-busy[rank], rank))
    return sorted(order if len(order) <= WRITTEN else order[: WRITTEN // 2] + order[-WRITTEN // 2 :])


def timeline_figure(bars: Sequence[Bar], *, theme: Theme, lang: str, after: float | None = None) -> go.Figure:
    """Two lines a rank, network above and experts below; halves of a batch are told by their number.

    ``after`` marks when the layer would be done, seconds from its start, had EPLB rearranged the experts.
    """
    ink = surface(theme)
    shown = lanes(bars)
    route = role("route", theme)
    hatch = {"fgcolor": route.on_fill, "size": 6, "solidity": 0.12, "fillmode": "overlay"}
    styles: dict[str, dict[str, Any]] = {
        "dispatch": {"color": route.fill, "pattern": {"shape": "/", **hatch}},
        "compute": {"color": role("block_scale", theme).fill},
        "combine": {"color": route.fill, "pattern": {"shape": "\\", **hatch}},
    }
    marked = {} if after is None else _end_mark(bars, after, theme, lang)
    room = {} if after is None else {"range": [0, 1.04e6 * max(after, *(bar.end for bar in bars))]}
    halves = max(bar.half for bar in bars) + 1
    number = {
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": role("block_scale", theme).on_fill, "size": 12},
    }
    traces: list[dict[str, Any]] = []
    for kind in KINDS:
        mine = [bar for bar in bars if bar.kind == kind and bar.rank in shown]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [shown.index(bar.rank) + (0.2 if kind == "compute" else -0.2) for bar in mine],
                "base": [1e6 * bar.start for bar in mine],
                "x": [1e6 * (bar.end - bar.start) for bar in mine],
                "width": 0.36,
                "name": words(lang, f"figures.expert_parallel.{kind}"),
                "marker": {**styles[kind], "line": {"color": ink.ink, "width": 1}},
                "customdata": [(bar.rank, 1e6 * (bar.end - bar.start)) for bar in mine],
                "hovertemplate": words(lang, "figures.expert_parallel.bar_hover", kind="%{fullData.name}")
                + "<extra></extra>",
            }
            | ({"text": [str(bar.half + 1) for bar in mine], **number} if halves > 1 else {})
        )
    layout = base_layout(
        theme,
        height=120 + 44 * len(shown) + (0 if after is None else 22),
        margin={"l": 46, "t": 42},
        barmode="overlay",
        xaxis={"title": words(lang, "figures.expert_parallel.time_axis"), "rangemode": "tozero"} | room,
        yaxis={
            "tickvals": list(range(len(shown))),
            "ticktext": [rank_name(rank, lang) for rank in shown],
            "range": [len(shown) - (0.5 if after is None else 0.0), -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        **marked,
    )
    # Made in one go: adding part after part costs several times as much.
    return go.Figure(traces, layout)


def _end_mark(bars: Sequence[Bar], after: float, theme: Theme, lang: str) -> dict[str, Any]:
    """For the layout: a dotted line, and its words below the last rank, where no bar can be under them."""
    ink, whole = surface(theme).ink, max(bar.end for bar in bars)
    at, right = 1e6 * after, after > whole / 2
    line = {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1}
    said = {
        "x": at,
        "y": len(lanes(bars)) - 0.3,
        "text": words(lang, "figures.expert_parallel.after"),
        "showarrow": False,
        "xanchor": "right" if right else "left",
        "xshift": -4 if right else 4,
        "font": {"color": ink, "size": 12},
        "bgcolor": surface(theme).page,
    }
    return {"shapes": [line | {"line": {"color": ink, "width": 2, "dash": "dot"}}], "annotations": [said]}


def describe_timeline(bars: Sequence[Bar], lang: str, after: float | None = None) -> str:
    """How long the layer takes, how much of that the slowest rank's experts, and how long after EPLB."""
    whole = max(bar.end for bar in bars)
    busy: dict[int, float] = {}
    for bar in bars:
        if bar.kind == "compute":
            busy[bar.rank] = busy.get(bar.rank, 0.0) + bar.end - bar.start
    slowest = max(busy, key=lambda rank: (busy[rank], -rank))
    said = words(
        lang,
        "figures.expert_parallel.describe_timeline",
        whole=f"{1e6 * whole:,.1f}",
        rank=slowest,
        longest=f"{1e6 * busy[slowest]:,.1f}",
        shortest=f"{1e6 * min(busy.values()):,.1f}",
    )
    if after is not None:
        said = words(lang, "figures.expert_parallel.describe_timeline_after", said=said, after=f"{1e6 * after:,.1f}")
    if len(busy) > WRITTEN:
        each = WRITTEN // 2
        said = words(lang, "figures.expert_parallel.describe_timeline_some", said=said, each=each, ranks=len(busy))
    return said


def bar_rows(bars: Sequence[Bar]) -> Rows:
    """Every phase of every rank as a row; microseconds."""
    return [
        {
            "rank": bar.rank,
            "half": bar.half + 1,
            "phase": bar.kind,
            "start_us": 1e6 * bar.start,
            "end_us": 1e6 * bar.end,
        }
        for bar in bars
    ]


# ------------------------------------------------------------------ before and after EPLB


def balance_figure(found: Balance, *, theme: Theme, lang: str) -> go.Figure:
    """Rows of each rank without EPLB (hatched) and with it, and the mean that nobody can fall below."""
    ink = surface(theme)
    before, after = found.without.sum(axis=0), found.rebalanced.sum(axis=0)
    ranks = list(range(len(before)))
    style = {"line": {"color": ink.ink, "width": 1}}
    pattern = {"shape": "/", "fgcolor": ink.ink, "size": 6, "solidity": 0.2}
    figure = go.Figure(
        [
            go.Bar(
                x=ranks,
                y=values.tolist(),
                name=words(lang, f"figures.expert_parallel.{name}"),
                marker=style | look,
                hovertemplate=words(lang, "figures.expert_parallel.load_hover") + "<extra>%{fullData.name}</extra>",
            )
            for name, values, look in (
                ("without", before, {"color": ink.panel, "pattern": pattern}),
                ("with", after, {"color": role("route", theme).fill}),
            )
        ]
    )
    mean = float(after.mean())
    figure.layout = base_layout(
        theme,
        height=340,
        margin={"l": 60, "t": 43, "r": 48},
        barmode="group",
        xaxis=_ranks_axis(len(ranks), lang, tickangle=0 if len(ranks) <= 4 else -60),
        yaxis={"title": words(lang, "figures.expert_parallel.rows"), "rangemode": "tozero"},
    )
    figure.add_annotation(
        # Beside the bars: the last rank may be taller than the mean.
        x=1, xref="paper", xshift=4, y=mean, text=words(lang, "figures.expert_parallel.mean"), showarrow=False,
        xanchor="left", yanchor="middle", font={"color": ink.ink, "size": 12},
    )  # fmt: skip
    figure.add_shape(
        type="line", x0=-0.5, x1=len(ranks) - 0.5, y0=mean, y1=mean, line={"color": ink.ink, "width": 2, "dash": "dot"}
    )
    return figure


def describe_balance(found: Balance, lang: str) -> str:
    """The slowest rank before and after."""
    before, after = found.before, found.after
    return words(
        lang,
        "figures.expert_parallel.describe_balance",
        steps=len(found.without),
        rank=before.slowest,
        ratio=f"{before.ratio:.2f}",
        new_rank=after.slowest,
        new_ratio=f"{after.ratio:.2f}",
    )


def balance_rows(found: Balance) -> Rows:
    """Every rank in every step."""
    return [
        {
            "step": step,
            "rank": rank,
            "without_eplb": int(found.without[step, rank]),
            "with_eplb": int(found.rebalanced[step, rank]),
        }
        for step, rank in np.ndindex(*found.without.shape)
    ]
