"""Remedies side by side: how far each one's loss lies above the calibrated model's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.serving.remedies import MARGIN, RemedyResult, excess, judge, wrong_domains

REFERENCE = "calibrate"
# A shape a domain, so that colour is never needed.
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def loss_figure(results: Mapping[str, RemedyResult], names: Mapping[str, str], *, theme: Theme, lang: str) -> go.Figure:
    """A row a remedy, a mark a domain: nats per character above the calibrated model.

    Parameters
    ----------
    results
        By remedy, the calibrated one among them.
    names
        What the axis calls each remedy.
    """
    ink, wrong = surface(theme), role("sign", theme)
    reference = results[REFERENCE]
    shown = [name for name, result in results.items() if name != REFERENCE and result.refusal is None]
    figure = go.Figure()
    for shape, domain in zip(SHAPES, reference.losses, strict=False):
        over = [excess(results[name], reference).get(domain, math.nan) for name in shown]
        beyond = [not value <= MARGIN for value in over]
        figure.add_trace(
            go.Scatter(
                x=over,
                y=[names[name] for name in shown],
                mode="markers",
                name=words(lang, f"figures.backends.domains.{domain}"),
                marker={
                    "symbol": shape,
                    "size": 12,
                    "color": [wrong.fill if bad else "rgba(0,0,0,0)" for bad in beyond],
                    "line": {"color": ink.ink, "width": 1.5},
                },
                hovertemplate="%{y}: %{x:.4g}<extra>%{fullData.name}</extra>",
            )
        )
    figure.layout = base_layout(
        theme,
        height=140 + 40 * len(shown),
        xaxis={"title": words(lang, "figures.backends.axis"), "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "ticks": ""},
    )
    figure.add_shape(
        type="line",
        x0=MARGIN,
        x1=MARGIN,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": ink.ink, "width": 1.5, "dash": "dash"},
    )
    return figure


def describe_losses(results: Mapping[str, RemedyResult], names: Mapping[str, str], lang: str) -> str:
    """The remedy and the domain that are furthest off, and which side of the margin that is."""
    reference = results[REFERENCE]
    over = [
        (value, name, domain)
        for name, result in results.items()
        if name != REFERENCE
        for domain, value in excess(result, reference).items()
    ]
    value, name, domain = max(over, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    return words(
        lang,
        "figures.backends.describe_beyond" if wrong_domains(results[name], reference) else "figures.backends.describe",
        name=names[name],
        domain=words(lang, f"figures.backends.domains.{domain}"),
        value=f"{value:.3f}",
        margin=f"{MARGIN:g}",
    )


def scoreboard_rows(results: Mapping[str, RemedyResult], prompts: Sequence[str]) -> list[dict[str, object]]:
    """Every remedy as a row: its verdict, what it cost, and its reply and loss for each of `prompts`, in order."""
    reference = results[REFERENCE]
    return [
        {
            "remedy": name,
            "verdict": judge(one, reference),
            "refused": "" if one.refusal is None else one.refusal.code,
            "tokens": one.tokens,
            "bytes": one.bytes,
            "load_seconds": one.load_seconds,
            "generate_seconds": one.generate_seconds,
            "loss_seconds": one.loss_seconds,
            "experts_computed_on": one.computed_on,
        }
        | {f"reply_{prompt}": one.replies[at].text if one.replies else "" for at, prompt in enumerate(prompts)}
        | {f"loss_{prompt}": one.losses.get(prompt) for prompt in prompts}
        for name, one in results.items()
    ]


def loss_rows(results: Mapping[str, RemedyResult]) -> list[dict[str, object]]:
    """Every loss as a row."""
    reference = results[REFERENCE]
    return [
        {"remedy": name, "domain": domain, "loss": loss, "above_calibrated": excess(result, reference)[domain]}
        for name, result in results.items()
        for domain, loss in result.losses.items()
    ]
