"""Figures of the calibration planner: what a plan promises, and whether it holds on runs it has not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.routing import share
from nvfp4viz.figures.words import words
from nvfp4viz.model.planner import HeldOut, Plan
from nvfp4viz.model.routing_log import RoutingLog

# ------------------------------------------------------------------ the plan


def plan_figure(log: RoutingLog, plans: Sequence[Plan], reveal: bool, *, theme: Theme, lang: str) -> go.Figure:
    """What was recorded, what is predicted with its interval, and, once asked for, what came."""
    ink, shade = surface(theme), role("route", theme)
    tokens, holes = log.tokens_after(), log.holes_after()
    pilot, last = plans[0].pilot, plans[-1].documents
    ahead = [plan.tokens for plan in plans]
    figure = go.Figure()
    figure.add_scatter(
        x=[*ahead, *reversed(ahead)],
        y=[*(plan.high for plan in plans), *(plan.low for plan in reversed(plans))],
        mode="lines", fill="toself", fillcolor=_faint(shade.fill), line={"color": shade.text, "width": 1},
        hoverinfo="skip", name=words(lang, "figures.routing.interval", level=f"{100 * plans[0].level:.0f} %"),
    )  # fmt: skip
    figure.add_scatter(
        x=ahead, y=[plan.expected for plan in plans], mode="lines",
        line={"color": shade.text, "width": 2, "dash": "dash"},
        customdata=[(plan.documents, plan.low, plan.high) for plan in plans],
        hovertemplate=words(lang, "figures.routing.plan_hover"),
        name=words(lang, "figures.routing.predicted"),
    )  # fmt: skip
    figure.add_scatter(
        x=tokens[1 : pilot + 1], y=holes[1 : pilot + 1], mode="lines",
        line={"color": ink.ink, "width": 2.5, "shape": "hv"},
        hovertemplate="%{x:,} · %{y}<extra></extra>", name=words(lang, "figures.routing.recorded"),
    )  # fmt: skip
    if reveal:
        figure.add_scatter(
            x=tokens[pilot : last + 1], y=holes[pilot : last + 1], mode="lines",
            line={"color": ink.ink, "width": 2.5, "shape": "hv", "dash": "dot"},
            hovertemplate="%{x:,} · %{y}<extra></extra>", name=words(lang, "figures.routing.came"),
        )  # fmt: skip
    figure.layout = base_layout(
        theme,
        height=380,
        margin={"t": 64},
        xaxis={"title": words(lang, "figures.routing.tokens"), "type": "log", "dtick": 1, "showgrid": False},
        yaxis={"title": words(lang, "figures.routing.holes"), "rangemode": "tozero"},
    )
    return figure


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.25)"


def describe_plan(plan: Plan, lang: str) -> str:
    """The prediction in a sentence."""
    return words(
        lang,
        "figures.routing.describe_plan",
        pilot=plan.pilot,
        now=plan.unseen_now,
        documents=plan.documents,
        tokens=f"{plan.tokens:,}",
        low=plan.low,
        high=plan.high,
        level=f"{100 * plan.level:.0f} %",
    )


def plan_rows(log: RoutingLog, plans: Sequence[Plan], reveal: bool) -> list[dict[str, object]]:
    """Predictions as rows; with what came, once it was asked for."""
    holes = log.holes_after()
    return [
        {
            "documents": plan.documents,
            "tokens_predicted": plan.tokens,
            "unseen_expected": round(plan.expected, 2),
            "low": plan.low,
            "high": plan.high,
            **({"unseen": int(holes[plan.documents])} if reveal else {}),
        }
        for plan in plans
    ]


# ------------------------------------------------------------------ the check


def check_figure(checks: Sequence[HeldOut], names: Mapping[str, str], *, theme: Theme, lang: str) -> go.Figure:
    """Every held-out run: its interval as a bar, what came as a filled circle, or as a cross where it fell outside."""
    ink, shade = surface(theme), role("route", theme)
    place = _places(checks)
    figure = go.Figure()
    figure.add_bar(
        x=place,
        y=[check.plan.high - check.plan.low + 0.6 for check in checks],
        base=[check.plan.low - 0.3 for check in checks],
        width=0.7,
        marker={"color": _faint(shade.fill), "line": {"color": shade.text, "width": 1}},
        hoverinfo="skip",
        name=words(lang, "figures.routing.interval", level=f"{100 * checks[0].plan.level:.0f} %"),
    )
    for held, symbol, size in ((True, "circle", 7), (False, "x", 10)):
        some = [(at, check) for at, check in zip(place, checks, strict=True) if check.held == held]
        figure.add_scatter(
            x=[at for at, _ in some],
            y=[check.actual for _, check in some],
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": ink.ink},
            customdata=[(names[check.text], check.plan.low, check.plan.high) for _, check in some],
            hovertemplate=words(lang, "figures.routing.check_hover"),
            name=words(lang, "figures.routing.held" if held else "figures.routing.missed"),
        )
    most = max(max(check.plan.high, check.actual) for check in checks)
    texts = list(dict.fromkeys(check.text for check in checks))
    middles = [
        float(np.mean([at for at, check in zip(place, checks, strict=True) if check.text == text])) for text in texts
    ]
    figure.layout = base_layout(
        theme,
        height=340,
        margin={"t": 64},
        barmode="overlay",
        xaxis={
            "tickvals": middles,
            # On a phone two long names beside each other would touch.
            "ticktext": [re.sub("[,，] ?", "<br>", names[text]) for text in texts],
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
        yaxis={"title": words(lang, "figures.routing.holes"), "range": [-0.04 * most, 1.06 * most]},
    )
    return figure


def _places(checks: Sequence[HeldOut]) -> list[float]:
    """Side by side, with a gap between texts."""
    places, at = [], 0.0
    for before, check in zip([None, *checks], checks, strict=False):
        at += 2.0 if before is not None and before.text != check.text else 1.0
        places.append(at)
    return places


def describe_check(checks: Sequence[HeldOut], lang: str) -> str:
    """In how many held-out runs the interval held."""
    return words(
        lang,
        "figures.routing.describe_check",
        held=sum(check.held for check in checks),
        of=len(checks),
        share=share(sum(check.held for check in checks), len(checks)),
        level=f"{100 * checks[0].plan.level:.0f} %",
        width=f"{np.mean([check.plan.high - check.plan.low for check in checks]):.1f}",
    )


def check_rows(checks: Sequence[HeldOut]) -> list[dict[str, object]]:
    """Every run as a row."""
    return [
        {
            "text": check.text,
            "run": check.run,
            "pilot_documents": check.plan.pilot,
            "documents": check.plan.documents,
            "unseen_in_pilot": check.plan.unseen_now,
            "low": check.plan.low,
            "expected": round(check.plan.expected, 2),
            "high": check.plan.high,
            "unseen": check.actual,
            "held": check.held,
        }
        for check in checks
    ]
