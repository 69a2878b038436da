"""Figures of fused projections: rows of the checkpoint and of every rank, and what a shared scale costs each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Shade, Theme, role, surface
from nvfp4viz.figures.words import listed, words
from nvfp4viz.moe.fusion import (
    FusedLayout,
    Order,
    Part,
    Run,
    ba_layout,
    find_row,
    gate_up_layout,
    qkv_layout,
    qkvz_layout,
    trace_row,
)
from nvfp4viz.moe.fusion_bits import FusionBits
from nvfp4viz.quant.shared_scale import SHARE_WAYS, SharedPart, Way

Rows = list[dict[str, object]]
Found = Mapping[Way, Mapping[str, SharedPart]]

MODELS = {
    "tiny_moe": "tiny-moe",
    "qwen3_30b": "Qwen3-30B-A3B",
    "qwen3_235b": "Qwen3-235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B",
}
"""Names of the models below."""
ATTENTION = {"tiny_moe": (4, 2, 32), "qwen3_30b": (32, 4, 128), "qwen3_235b": (64, 4, 128)}
"""Query heads, key-value heads and rows of a head, from the models' ``config.json``."""
INTERMEDIATE = {"tiny_moe": 64, "qwen3_30b": 768, "qwen3_235b": 1536, "qwen3_next": 512}
"""Rows of gate and of up in one expert."""
DELTANET = {"small": (8, 16, 128, 128), "qwen3_next": (16, 32, 128, 128)}
"""Key heads, value heads, rows of each; ``small`` is no model's, and easier to read."""

STYLES = {
    "q": ("exponent", ""),
    "k": ("sign", "/"),
    "v": ("mantissa", "\\"),
    "z": ("block_scale", "."),
    "gate": ("exponent", ""),
    "up": ("sign", "/"),
    "b": ("exponent", ""),
    "a": ("sign", "/"),
}
"""Parts borrow the colours of the bit roles, which no figure of this page has; a letter doubles them, or where none
fits a hatch."""
WIDTH = 0.84
"""Of a column; the rest is the gap to the next."""
WRITTEN = 5
"""Up to this many columns, runs carry their heads; beyond it only their letter."""
MARGIN_ABOVE, MARGIN_BELOW = 44, 42
LEAST_STRIP = 16
"""Pixels below which a strip has no room for its label; hovering tells it."""
MARK = 11
"""Pixels across the mark of a followed row."""


# ------------------------------------------------------------------ layouts of the page


def attention_of(model: str, tp: int) -> FusedLayout:
    """QKV of a model in ``ATTENTION``."""
    heads, kv_heads, head_dim = ATTENTION[model]
    return qkv_layout(heads, kv_heads, head_dim, tp)


def experts_of(model: str, tp: int) -> FusedLayout:
    """w13 of one expert of a model in ``INTERMEDIATE``."""
    return gate_up_layout(INTERMEDIATE[model], tp)


def deltanet_of(model: str, tp: int, order: Order, which: str = "qkvz") -> FusedLayout:
    """``in_proj_qkvz`` or ``in_proj_ba`` with the sizes of ``DELTANET``."""
    key_heads, value_heads, key_dim, value_dim = DELTANET[model]
    if which == "ba":
        return ba_layout(key_heads, value_heads, tp, order)
    return qkvz_layout(key_heads, value_heads, key_dim, value_dim, tp, order)


# ------------------------------------------------------------------ rows of the checkpoint and of every rank


def rows_figure(
    layout: FusedLayout, *, theme: Theme, lang: str, follow: tuple[int, int] | None = None, height: int = 460
) -> go.Figure:
    """Columns drawn to one height: the checkpoint's rows, then each rank's; ``follow`` is a rank and a row of it."""
    ink = surface(theme)
    columns = [layout.whole.runs, *([run for run in layout.runs if run.rank == rank] for rank in range(layout.tp))]
    totals = [layout.whole.rank_rows, *[layout.rank_rows] * layout.tp]
    room = height - MARGIN_ABOVE - MARGIN_BELOW
    edge = MARK / room
    figure = go.Figure()
    for part in layout.parts:
        mine = [(at, run) for at, runs in enumerate(columns) for run in runs if run.part == part.name]
        # The legend looks as the first strip does: as one with a label, if there is one.
        mine.sort(key=lambda each: each[1].rows / totals[each[0]] * room < LEAST_STRIP)
        shade, pattern = _style(part.name, theme)
        labels = [_written(part, run, run.rows / totals[at] * room, len(columns)) for at, run in mine]
        # A pattern would strike a label through: it tells apart the strips that have none.
        pattern["shape"] = ["" if label else pattern["shape"] for label in labels]
        figure.add_trace(
            go.Bar(
                x=[_place(at) for at, _ in mine],
                base=[run.first / totals[at] for at, run in mine],
                y=[run.rows / totals[at] for at, run in mine],
                width=WIDTH,
                zorder=1,
                name=part.name,
                marker={"color": shade.fill, "pattern": pattern, "line": {"color": ink.page, "width": 1}},
                text=labels,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont={"color": shade.on_fill, "size": 12},
                hovertext=[_hover(part, run, at, lang) for at, run in mine],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    if follow is not None:
        figure.add_traces(_path(layout, follow, theme, lang))
    short = "" if len(columns) <= WRITTEN else "_short"
    names = [words(lang, f"figures.fusion.checkpoint{short}")]
    names += [words(lang, f"figures.fusion.rank{short}", rank=rank) for rank in range(layout.tp)]
    figure.layout = base_layout(
        theme,
        height=height + 2 * MARK,
        margin={"t": MARGIN_ABOVE, "b": MARGIN_BELOW},
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={
            "tickvals": [_place(at) for at in range(len(columns))],
            "ticktext": [f"{name}<br>{rows:,}" for name, rows in zip(names, totals, strict=True)]
            if not short
            else names,
            "range": [-0.62, _place(layout.tp) + 0.5],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
            "tickangle": 0,
        },
        # Room for a mark on the first or the last row, beside the strips' own height.
        yaxis={"range": [1 + edge, -edge], "showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""},
    )
    return figure


def _place(column: int) -> float:
    """Where a column stands: the checkpoint's a little apart from the ranks'."""
    return column + 0.5 if column else 0.0


def _style(part: str, theme: Theme) -> tuple[Shade, dict[str, Any]]:
    name, shape = STYLES[part]
    shade = role(name, theme)
    return shade, {"shape": shape, "fgcolor": shade.on_fill, "size": 7, "solidity": 0.1, "fillmode": "overlay"}


def _written(part: Part, run: Run, high: float, columns: int) -> str:
    """What is written on a strip so many pixels high; on two lines where they have room: a phone's are narrow."""
    if high < LEAST_STRIP:
        return ""
    if columns > WRITTEN:
        return part.name
    label = _label(part, run)
    return label.replace(" ", "<br>", 1) if high >= 3 * LEAST_STRIP else label


def _label(part: Part, run: Run) -> str:
    first, last = run.part_first // part.unit_rows, (run.part_first + run.rows - 1) // part.unit_rows
    return f"{part.name} {span(first, last)}"


def span(first: int, last: int) -> str:
    """From the first to the last, or the one that is all.

    >>> span(1024, 1151), span(4, 4)
    ('1,024–1,151', '4')
    """
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _hover(part: Part, run: Run, column: int, lang: str) -> str:
    place = (
        words(lang, "figures.fusion.checkpoint") if not column else words(lang, "figures.fusion.rank", rank=run.rank)
    )
    return words(
        lang,
        "figures.fusion.hover_heads" if part.unit_rows > 1 else "figures.fusion.hover_rows",
        place=place,
        rows=span(run.first, run.first + run.rows - 1),
        label=_label(part, run),
        tensor=run.tensor,
        tensor_rows=span(run.tensor_first, run.tensor_first + run.rows - 1),
    )


def _path(layout: FusedLayout, follow: tuple[int, int], theme: Theme, lang: str) -> tuple[go.Scatter, go.Scatter]:
    """The followed row in the checkpoint and on every rank that has it: a line behind the columns, whose labels it
    would otherwise strike through, and a mark on each column that has the row."""
    row = trace_row(layout, *follow)
    _, start = find_row(layout.whole, row.part, row.part_row)[0]
    copies = find_row(layout, row.part, row.part_row)
    # At the left edge of each column, clear of the labels.
    x = [_place(at) - WIDTH / 2 for at in (0, *(1 + rank for rank, _ in copies))]
    y = [(start + 0.5) / layout.whole.rank_rows, *((at + 0.5) / layout.rank_rows for _, at in copies)]
    same: dict[str, Any] = {"x": x, "y": y, "hoverinfo": "skip", "cliponaxis": False}
    ink = surface(theme).ink
    return (
        go.Scatter(mode="lines", line={"color": ink, "width": 2, "dash": "dot"}, zorder=0, showlegend=False, **same),
        go.Scatter(
            mode="markers",
            marker={
                "symbol": "circle",
                "size": MARK,
                "color": role("route", theme).fill,
                "line": {"color": ink, "width": 2},
            },
            name=words(lang, "figures.fusion.followed"),
            zorder=2,
            **same,
        ),
    )


def describe_rows(layout: FusedLayout, lang: str) -> str:
    """What each rank holds, and what is held more than once."""
    held = listed(lang, (f"{layout.rank_units(part) * part.unit_rows:,} {part.name}" for part in layout.parts))
    said = words(
        lang,
        "figures.fusion.describe_rows",
        total=f"{layout.whole.rank_rows:,}",
        ranks=layout.tp,
        rows=f"{layout.rank_rows:,}",
        held=held,
    )
    copied = [part for part in layout.parts if layout.copies(part) > 1]
    if copied:
        return words(
            lang,
            "figures.fusion.describe_copies",
            said=said,
            parts=listed(lang, (part.name for part in copied)),
            copies=layout.copies(copied[0]),
            extra=f"{layout.tp * layout.rank_rows - layout.whole.rank_rows:,}",
        )
    return said


def run_rows(layout: FusedLayout) -> Rows:
    """Every run of rows of every rank."""
    return [
        {
            "rank": run.rank,
            "first_row": run.first,
            "last_row": run.first + run.rows - 1,
            "part": run.part,
            "unit": span(
                run.part_first // layout.part(run.part).unit_rows,
                (run.part_first + run.rows - 1) // layout.part(run.part).unit_rows,
            ),
            "tensor": run.tensor,
            "tensor_first": run.tensor_first,
            "tensor_last": run.tensor_first + run.rows - 1,
            "held_by_ranks": layout.copies(layout.part(run.part)),
        }
        for run in layout.runs
    ]


# ------------------------------------------------------------------ one scale for several parts


def scales_figure(found: Found, *, theme: Theme, lang: str) -> go.Figure:
    """Signal to error of each part in the five ways: a group of bars for every way."""
    ink = surface(theme)
    figure = go.Figure()
    for name in found["own"]:
        shade, pattern = _style(name, theme)
        values = [found[way][name].summary.sqnr_db for way in SHARE_WAYS]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[words(lang, f"figures.fusion.way.{way}") for way in SHARE_WAYS],
                x=values,
                name=name,
                marker={"color": shade.fill, "pattern": pattern, "line": {"color": ink.ink, "width": 1}},
                # Without the part's name, which a phone has no room for beside the bar: its hatch and hovering tell it.
                text=[decibels(value) for value in values],
                textposition="outside",
                textfont={"color": ink.ink, "size": 12},
                cliponaxis=False,
                hovertemplate=f"{name}: %{{x:.2f}} dB<extra></extra>",
            )
        )
    values = [part.summary.sqnr_db for parts in found.values() for part in parts.values()]
    # Room for the numbers behind the bars.
    room = 0.22 * (max(values) - min(0.0, *values))
    figure.layout = base_layout(
        theme,
        margin={"l": 66, "t": 46},
        height=140 + 20 * len(SHARE_WAYS) * (len(found["own"]) + 1),
        barmode="group",
        bargap=0.2,
        yaxis={"showgrid": False, "ticks": "", "autorange": "reversed"},
        xaxis={
            "title": words(lang, "figures.fusion.sqnr"),
            "range": [min(values) - 2 * room if min(values) < 0 else 0, max(values) + room],
        },
    )
    return figure


def decibels(value: float) -> str:
    """Two digits behind the point.

    >>> decibels(-108.889)
    '−108.89'
    """
    return f"{value:.2f}".replace("-", "−")


def times(factor: float) -> str:
    """How many times: whole above a thousand, four digits below.

    >>> times(262144.0), times(1.25), times(1 / 4096)
    ('262,144', '1.25', '0.0002441')
    """
    return f"{factor:,.0f}" if factor >= 1000 else f"{factor:.4g}"


def worst_part(found: Found, way: Way) -> SharedPart:
    """The part that loses most signal to error against its own scale."""
    return min(found[way].values(), key=lambda part: part.summary.sqnr_db - found["own"][part.name].summary.sqnr_db)


def describe_scales(found: Found, lang: str) -> str:
    """Who loses most by the maximum, and what the other two ways would have kept."""
    worst = worst_part(found, "max")
    name = worst.name
    if worst.factor == 1:
        return words(lang, "figures.fusion.describe_equal")
    return words(
        lang,
        "figures.fusion.describe_scales",
        part=name,
        factor=times(worst.factor),
        max=decibels(worst.summary.sqnr_db),
        own=decibels(found["own"][name].summary.sqnr_db),
        rerounded=decibels(found["rerounded"][name].summary.sqnr_db),
        shared=decibels(found["shared"][name].summary.sqnr_db),
    )


def scale_rows(found: Found) -> Rows:
    """Every part in every way."""
    return [
        {
            "way": way,
            "part": part.name,
            "own_scale": float(part.own_scale),
            "used_scale": float(part.used_scale),
            "too_large_by": part.factor,
            "sqnr_db": part.summary.sqnr_db,
            "largest_error": part.summary.max_abs,
            "became_zero": part.summary.zeroed,
        }
        for way in SHARE_WAYS
        for part in found[way].values()
    ]


def fusion_rows(measured: Sequence[FusionBits]) -> Rows:
    """Every fusion that was measured."""
    return [
        {
            "fusion": one.id,
            "kind": one.kind,
            "launches_before": one.before,
            "launches_after": one.after,
            "values": one.values,
            "differ": one.differ,
        }
        for one in measured
    ]
