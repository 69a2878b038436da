"""One token through every router: a row a router, a column an expert; records from `moe.router_comparison`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import MONO, Theme, role, surface
from nvfp4viz.figures.words import listed, words
from nvfp4viz.moe.router_comparison import Picked

BAR = 0.5
"""Height of the largest weight's bar; rows are 1 apart."""


def routers_figure(
    picked: Mapping[str, Picked],
    names: Mapping[str, str],
    logits: Sequence[float],
    bias: Sequence[float],
    groups: int,
    *,
    theme: Theme,
    lang: str,
) -> go.Figure:
    """Chosen experts as bars as high as their weights, with the weight above; NaN weights hatched and marked N.

    Below each expert stand its logit and its bias; dotted lines part the groups.
    """
    ink, shade = surface(theme), role("route", theme)
    experts = len(next(iter(picked.values())).scores)
    finite = [abs(w) for one in picked.values() for w in one.weights if math.isfinite(w)]
    largest = max([*finite, 1e-30])
    figure = go.Figure()
    for nan in (False, True):
        cells = [
            (row, expert, rank + 1, weight)
            for row, one in enumerate(picked.values())
            for rank, (expert, weight) in enumerate(zip(one.ids, one.weights, strict=True))
            if math.isnan(weight) == nan
        ]
        bars = [BAR if nan else max(BAR * abs(weight) / largest, 0.03) for *_, weight in cells]
        figure.add_bar(
            x=[expert for _, expert, _, _ in cells],
            y=[-height for height in bars],
            base=[row + 0.45 for row, *_ in cells],
            width=0.8,
            marker={
                "color": "rgba(0,0,0,0)" if nan else shade.fill,
                "line": {"color": ink.ink, "width": 1},
                "pattern": {"shape": "/" if nan else "", "fgcolor": ink.ink, "size": 6, "solidity": 0.3},
            },
            customdata=[(list(names.values())[row], rank, _weight(weight, 6)) for row, _, rank, weight in cells],
            hovertemplate=words(lang, "figures.routers.hover"),
        )
        figure.add_scatter(
            x=[expert for _, expert, _, _ in cells],
            y=[row + 0.45 - height - 0.02 for (row, *_), height in zip(cells, bars, strict=True)],
            mode="text",
            text=[_weight(weight, 2) for *_, weight in cells],
            textposition="top center",
            textfont={"family": MONO, "size": 12, "color": ink.ink},
            hoverinfo="skip",
        )
    figure.layout = base_layout(
        theme,
        height=90 + 62 * len(picked),
        margin={"b": 75},  # three lines below each expert
        barmode="overlay",
        showlegend=False,
        xaxis={
            "title": words(lang, "figures.routers.axis"),
            "tickvals": list(range(experts)),
            "ticktext": [f"<b>{e}</b><br>{short(logits[e])}<br>{short(bias[e])}" for e in range(experts)],
            "range": [-0.5, experts - 0.5],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        yaxis={
            "range": [len(picked) - 0.5, -0.55],
            "tickvals": [row + 0.1 for row in range(len(picked))],
            "ticktext": list(names.values()),
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
            "tickfont": {"color": ink.ink, "size": 12},
        },
        shapes=[
            *(
                {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": row + 0.47, "y1": row + 0.47,
                 "line": {"color": ink.line, "width": 1}}
                for row in range(len(picked))
            ),
            *(
                {"type": "line", "x0": at - 0.5, "x1": at - 0.5, "y0": 0, "y1": 1, "yref": "paper",
                 "line": {"color": ink.muted, "width": 1, "dash": "dot"}}
                for at in range(experts // groups, experts, experts // groups)
            ),
        ],
    )  # fmt: skip
    return figure


def _weight(weight: float, digits: int) -> str:
    """As short as it can be said.

    >>> _weight(float("nan"), 2), _weight(0.4567, 2), _weight(0.0, 2)
    ('N', '0.46', '0')
    """
    if math.isnan(weight):
        return "N"
    return "0" if weight == 0 else f"{weight:.{digits}f}".replace("-", "−")


def short(value: float) -> str:
    """A number of any kind in four digits.

    >>> short(float("nan")), short(float("-inf")), short(-0.12345)
    ('NaN', '−∞', '−0.1235')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.4g}".replace("-", "−")


def describe_routers(picked: Mapping[str, Picked], names: Mapping[str, str], lang: str) -> str:
    """How many different choices the routers make of the same logits."""
    sets: dict[frozenset[int], list[str]] = {}
    for name, one in picked.items():
        sets.setdefault(frozenset(one.ids), []).append(names[name])
    said = " · ".join(f"{listed(lang, who)}: {sorted(chosen)}" for chosen, who in sets.items())
    key = "figures.routers.describe" if len(sets) > 1 else "figures.routers.describe_one"
    return words(lang, key, routers=len(picked), choices=len(sets), said=said)


def router_rows(picked: Mapping[str, Picked], logits: Sequence[float]) -> list[dict[str, object]]:
    """One row a router and expert: what was compared, the score, the rank and the weight."""
    return [
        {
            "router": name,
            "expert": expert,
            "logit": float(logits[expert]),
            "score": float(one.scores[expert]),
            "compared": float(one.compared[expert]),
            "rank": one.ids.index(expert) + 1 if expert in one.ids else None,
            "weight": one.weights[one.ids.index(expert)] if expert in one.ids else None,
        }
        for name, one in picked.items()
        for expert in range(len(one.scores))
    ]
