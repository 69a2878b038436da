"""Figures about routing: who receives tokens, and how holes close.

Records come from :mod:`nvfp4viz.model.routing_log`.
A slot without a token is hatched; it never has a colour of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout, frames, hatch, marks
from nvfp4viz.figures.palette import SEQUENTIAL, Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.model.routing_log import RoutingLog

I64 = npt.NDArray[np.int64]
PANEL = 150
"""Height of one map, in pixels."""
HALF_CELL = 0.46
"""Half a cell's side within its gap, in the axes' units."""


# ------------------------------------------------------------------ maps


def map_figure(maps: Mapping[str, I64], *, theme: Theme, lang: str) -> go.Figure:
    """Layer × expert maps below each other, ``{title: (layers, experts) routed tokens}``.

    With two maps, the second one's empty slots that the first one uses are framed.
    """
    ink = surface(theme)
    figure = go.Figure()
    part = 1 / len(maps)
    titles: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"showlegend": False, "annotations": titles, "shapes": shapes}
    missed = None
    if len(maps) == 2:
        used, seen = maps.values()
        missed = np.where(seen == 0, used, 0)
    layout["margin"] = {"l": 30, "r": 86, "b": 34}  # the layers' names, and the colour bars
    for at, (title, counts) in enumerate(maps.items()):
        n = "" if at == 0 else str(at + 1)
        axes = {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        top, bottom = 1 - at * part, 1 - (at + 1) * part
        domain = [bottom + 0.1 * part, top - 0.14 * part]
        layers, experts = counts.shape
        figure.add_trace(_counts(counts, missed if at else None, domain, ink.ink, lang) | axes)
        shapes += marks(hatch(counts == 0, HALF_CELL), ink.muted, 1, n)
        titles.append({
            "text": title, "showarrow": False, "x": 0, "xref": "paper", "xanchor": "left", "y": domain[1],
            "yref": "paper", "yanchor": "bottom", "yshift": 3, "font": {"size": 13, "color": ink.ink},
        })  # fmt: skip
        layout[f"xaxis{n}"] = {
            "range": [-0.5, experts - 0.5],
            "showgrid": False,
            "zeroline": False,
            "anchor": f"y{n}",
            "tickvals": [*range(0, experts, 16), experts - 1],
            "showticklabels": at == len(maps) - 1,
        }
        layout[f"yaxis{n}"] = {
            "range": [layers - 0.5, -0.5],
            "domain": domain,
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(layers)),
            "ticktext": [f"L{layer}" for layer in range(layers)],
            "ticks": "",
        }
        layout[f"xaxis{n}"]["title"] = words(lang, "figures.routing.expert") if at == len(maps) - 1 else ""
    if missed is not None:
        shapes += marks(frames(missed > 0, HALF_CELL), role("route", theme).text, 2.5, "2")
    figure.layout = base_layout(theme, height=60 + (PANEL + 30) * len(maps), **layout)
    return figure


def _counts(counts: I64, missed: I64 | None, domain: Sequence[float], ink: str, lang: str) -> dict[str, Any]:
    """The heatmap; ``missed`` are the other map's routes to slots that are empty here."""

    def hover(layer: int, expert: int) -> str:
        count = int(counts[layer, expert])
        key = "cell_hover" if count else "hole_hover"
        if missed is not None and missed[layer, expert]:
            key, count = "hit_hover", int(missed[layer, expert])
        return words(lang, f"figures.routing.{key}", layer=layer, expert=expert, count=f"{count:,}")

    most = int(counts.max())
    ticks = [10**power for power in range(len(str(max(most, 1))))]
    if most < 10:
        ticks = sorted({1, max(most, 1)})
    return {
        "type": "heatmap",
        "z": np.where(counts > 0, np.log10(counts + 1.0), np.nan),
        "text": [[hover(layer, expert) for expert in range(counts.shape[1])] for layer in range(len(counts))],
        "hoverinfo": "text",
        "colorscale": SEQUENTIAL,
        "zmin": 0,
        "zmax": float(np.log10(most + 1.0)) or 1.0,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {
            "tickvals": [float(np.log10(tick + 1.0)) for tick in ticks],
            "ticktext": [f"{tick:,}" for tick in ticks],
            "y": sum(domain) / 2,
            "len": domain[1] - domain[0],
            "thickness": 10,
            "outlinewidth": 0,
            "tickfont": {"color": ink, "size": 11},
        },
    }


def blind_routes(used: I64, seen: I64) -> tuple[int, int]:
    """How many routes of ``used`` lead to slots that ``seen`` left without a token, and to how many slots.

    >>> blind_routes(np.array([[3, 0, 2]]), np.array([[9, 0, 0]]))
    (2, 1)
    """
    blind = (used > 0) & (seen == 0)
    return int(used[blind].sum()), int(blind.sum())


def describe_maps(used: I64, seen: I64, lang: str) -> str:
    """How much of what is used calibration has not seen."""
    routes, slots = blind_routes(used, seen)
    return words(
        lang,
        "figures.routing.describe_maps" if routes else "figures.routing.describe_maps_none",
        used=int((used > 0).sum()),
        slots=slots,
        routes=f"{routes:,}",
        all=f"{int(used.sum()):,}",
        share=share(routes, int(used.sum())),
        holes=int((seen == 0).sum()),
        of=seen.size,
    )


def share(part: int, whole: int) -> str:
    """A share with three significant digits.

    >>> share(1, 3), share(5, 928920)
    ('33.3 %', '0.000538 %')
    """
    return f"{100 * part / max(whole, 1):.3g} %"


def map_rows(maps: Mapping[str, I64]) -> list[dict[str, object]]:
    """One row a slot, one column a map."""
    layers, experts = next(iter(maps.values())).shape
    return [
        {"layer": layer, "expert": expert, **{name: int(counts[layer, expert]) for name, counts in maps.items()}}
        for layer in range(layers)
        for expert in range(experts)
    ]


# ------------------------------------------------------------------ holes against tokens


def holes_figure(log: RoutingLog, documents: int, *, theme: Theme, lang: str) -> go.Figure:
    """Slots without a token against calibration tokens, and where the slider stands."""
    ink = surface(theme)
    tokens, holes = log.tokens_after(), log.holes_after()
    figure = go.Figure()
    figure.add_scatter(
        x=tokens[1:], y=holes[1:], mode="lines", line={"color": ink.muted, "width": 2, "shape": "hv"},
        customdata=np.arange(1, log.documents + 1), hovertemplate=words(lang, "figures.routing.holes_hover"),
        showlegend=False,
    )  # fmt: skip
    at = max(documents, 1)
    if documents:
        figure.add_scatter(
            x=[tokens[at]], y=[holes[at]], mode="markers+text", text=[str(holes[at])], textposition="top right",
            textfont={"color": ink.ink, "size": 13}, hoverinfo="skip", showlegend=False, cliponaxis=False,
            marker={"symbol": "diamond", "size": 11, "color": role("route", theme).fill,
                    "line": {"color": ink.ink, "width": 1}},
        )  # fmt: skip
    figure.layout = base_layout(
        theme,
        height=260,
        xaxis={"title": words(lang, "figures.routing.tokens"), "type": "log", "dtick": 1, "showgrid": False},
        yaxis={"title": words(lang, "figures.routing.holes"), "rangemode": "tozero"},
    )
    return figure


def describe_holes(log: RoutingLog, documents: int, lang: str) -> str:
    """What half of the text already reached, and what all of it leaves."""
    holes, tokens = log.holes_after(), log.tokens_after()
    half = log.documents // 2
    return words(
        lang,
        "figures.routing.describe_holes",
        holes=int(holes[documents]),
        documents=documents,
        tokens=f"{int(tokens[documents]):,}",
        first=int(holes[0] - holes[1]),
        later=int(holes[half] - holes[-1]),
        half=half,
        left=int(holes[-1]),
        of=int(holes[0]),
    )


def hole_rows(log: RoutingLog) -> list[dict[str, object]]:
    """The curve: one row a document that closed a hole, and the last document."""
    tokens, holes = log.tokens_after(), log.holes_after()
    return [
        {"documents": at, "tokens": int(tokens[at]), "slots_without_a_token": int(holes[at])}
        for at in range(log.documents + 1)
        if at in (0, log.documents) or holes[at] != holes[at - 1]
    ]


def closings(log: RoutingLog, documents: int, count: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The last ``count`` documents that closed holes by then, newest first, each with its (layer, expert) slots.

    Documents count from 1.
    """
    first = log.seen_by()
    found: dict[int, list[tuple[int, int]]] = {}
    for layer, expert in np.argwhere((first >= 0) & (first < documents)).tolist():
        found.setdefault(int(first[layer, expert]) + 1, []).append((layer, expert))
    return sorted(found.items(), reverse=True)[:count]
