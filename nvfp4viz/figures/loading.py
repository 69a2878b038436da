"""Figures about loading: one file's fates layer by layer, and how far one slot's value reaches."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import MARKS, MONO, Theme, on_sequential, role, surface
from nvfp4viz.figures.words import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from nvfp4viz.serving.fates import Fate
    from nvfp4viz.serving.spread import Spread

LEAST = -3
"""Decimal logarithm of the smallest error that has a colour of its own; the largest is 1."""
PITCH, CELL = 62, 34
"""Pixels from row to row of the fates, and of a row's cells; its reply stands in the rest."""
PAD = "<pad>"
SIDE = 8
"""Experts in a row of a backend's square; tiny-moe has 64 in all."""
BANDS: tuple[tuple[str, ...], ...] = (("expert", "first", "open"), ("layer",), ("unread", "dynamic", "token", "ones"))
"""Rules for input scales by row of the picture: ways of their own, one maximum, none of the file's."""
SHORT = {
    "vllm-cutlass": "vLLM<br>CUTLASS",
    "vllm-flashinfer-trtllm": "FlashInfer<br>TRT-LLM",
    "vllm-flashinfer-cutedsl": "FlashInfer<br>CuteDSL",
    "vllm-flashinfer-cutedsl-batched": "CuteDSL<br>{batched}",
    "vllm-flashinfer-cutlass": "FlashInfer<br>CUTLASS",
    "vllm-flashinfer-b12x": "FlashInfer<br>B12X",
    "vllm-emulation": "vLLM<br>{emulation}",
    "vllm-marlin": "vLLM<br>Marlin",
    "vllm-humming": "vLLM<br>Humming",
    "vllm-flashinfer-moe-ep-cutedsl": "MoE-EP<br>CuteDSL",
    "vllm-flashinfer-trtllm (per-token)": "TRT-LLM<br>{token}",
    "vllm-b12x (a16)": "B12X<br>A16",
    "vllm-b12x": "B12X<br>W4A4",
}


def fates_figure(
    fates: Sequence[Fate], *, covered: Sequence[str] = (), unmeasured: Sequence[str] = (), theme: Theme, lang: str
) -> go.Figure:
    """A row for the complete twin and one for each fate, a column for each layer: equal bits, an error, or a share of
    NaN; under each row the reply.  Rows of ``covered`` allocators hold question marks, those of ``unmeasured`` too, but
    for their reply."""
    import plotly.graph_objects as go

    ink, nan_role = surface(theme), role("sign", theme)
    layers = len(fates[0].effect.layer_error)
    whole, hidden = np.zeros((1, layers)), np.full((len(covered), layers), np.nan)
    error = np.concatenate([whole, [fate.effect.layer_error for fate in fates], hidden])
    share = np.concatenate([whole, [fate.effect.layer_nan for fate in fates], hidden])
    for row, fate in enumerate(fates, 1):
        if fate.allocator in unmeasured:
            error[row] = share[row] = np.nan
    drawn = np.where((error > 0) & (share == 0), np.log10(np.where(error > 0, error, 1)), np.nan)
    rows = len(error)
    columns = [f"L{layer}" for layer in range(layers)]
    heat: dict[str, Any] = {
        "type": "heatmap",
        "x": list(range(layers)),
        "y": list(range(rows)),
        "z": drawn,
        "zmin": LEAST,
        "zmax": 0,
        "colorscale": "Cividis",
        "xgap": 3,
        "ygap": PITCH - CELL,
        "hoverinfo": "skip",
        "colorbar": {
            "title": {"text": words(lang, "figures.loading.error"), "side": "top"},
            # Below, where it takes no width from the cells of a phone.
            "orientation": "h",
            "len": 0.88,
            "y": -36 / (PITCH * rows),
            "yanchor": "top",
            "tickvals": [-3, -2, -1, 0],
            "ticktext": ["0.1 %", "1 %", "10 %", "100 %"],
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    text: dict[str, Any] = {
        "type": "scatter",
        "mode": "text",
        "x": [layer for _ in range(rows) for layer in range(layers)],
        "y": [row for row in range(rows) for _ in range(layers)],
        "text": [_cell(error[row, k], share[row, k]) for row in range(rows) for k in range(layers)],
        "textfont": {
            "size": 13,
            # Cividis is dark below and light above its middle; empty and hatched cells show the page.
            "color": [
                on_sequential(1 - value / LEAST) if np.isfinite(value) else ink.ink for value in drawn.ravel().tolist()
            ],
        },
        "hoverinfo": "skip",
    }
    replies: dict[str, Any] = {
        "type": "scatter",
        "mode": "text",
        "x": [-0.5] * rows,
        "y": [row + 0.5 for row in range(rows)],
        "text": _replies(fates) + [words(lang, "figures.loading.covered")] * len(covered),
        "textposition": "middle right",
        "textfont": {"size": 12, "family": MONO, "color": [ink.ink] * (1 + len(fates)) + [ink.muted] * len(covered)},
        "hoverinfo": "skip",
    }
    # What has no colour of the scale: equal bits, NaN, not shown yet.
    boxes = [
        (row, layer, *look)
        for where, look in (
            ((error == 0) & (share == 0), (ink.panel, ink.panel, "")),
            (share > 0, (ink.panel, nan_role.text, "/")),
            (np.isnan(share), (ink.page, ink.line, "")),
        )
        for row, layer in np.argwhere(where).tolist()
    ]
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "base": [layer - 0.48 for _, layer, *_ in boxes],
        "x": [0.96] * len(boxes),
        "y": [row for row, *_ in boxes],
        "width": CELL / PITCH,
        "marker": {
            "color": [fill for _, _, fill, *_ in boxes],
            "line": {"color": [line for *_, line, _ in boxes], "width": 1.5},
            "pattern": {"shape": [pattern for *_, pattern in boxes], "fgcolor": ink.line, "size": 8},
        },
        "hoverinfo": "skip",
    }
    names = ["complete", *(fate.allocator for fate in fates), *covered]
    layout = base_layout(
        theme,
        height=112 + PITCH * rows,
        margin={"b": 106},  # the layers' names and the colour bar
        showlegend=False,
        barmode="overlay",
        xaxis={"tickvals": list(range(layers)), "ticktext": columns, "showgrid": False, "zeroline": False},
        yaxis={
            "tickvals": list(range(rows)),
            "ticktext": [words(lang, f"figures.loading.fate.{name}") for name in names],
            # From above the first row's cells to below the last row's reply.
            "range": [rows - 0.3, -0.35],
            "showgrid": False,
            "zeroline": False,
        },
    )
    return go.Figure([heat, bars, text, replies], layout)


def _replies(fates: Sequence[Fate]) -> list[str]:
    """The twin's reply, then each fate's behind the sign of whether it is the same, for Plotly, which reads HTML."""
    said = [("", *one_line(fates[0].effect.healthy.text))]
    said += [("=" if fate.same_text else "≠", *one_line(fate.text)) for fate in fates]
    return [f"{sign} {html.escape(line)}{f' × {count}' if count > 1 else ''}".lstrip() for sign, line, count in said]


def one_line(text: str, most: int = 40) -> tuple[str, int]:
    """A reply on one line, and how often it says that: padding is counted.

    >>> one_line("<pad><pad><pad>"), one_line("two\\nlines")
    (('<pad>', 3), ('two⏎lines', 1))
    """
    padding = text.count(PAD)
    if padding and text == PAD * padding:
        return PAD, padding
    line = text.replace("\n", "⏎")
    return f"{line[:most]}{'…' if len(line) > most else ''}", 1


def _cell(error: float, share: float) -> str:
    if np.isnan(share):
        return "?"
    if share > 0:
        return f"<b>{MARKS['nan']}</b> {100 * share:.0f} %"
    return "=" if error == 0 else f"{100 * error:.2g} %"


def describe_fates(fates: Sequence[Fate], lang: str) -> str:
    """How many different answers one file gives, and how many of them hold NaN."""
    answers = {fate.effect.faulty.token_ids for fate in fates}
    first = [fate.first_broken for fate in fates if fate.first_broken is not None]
    if not first:
        return words(lang, "figures.loading.describe_untouched", fates=len(fates))
    return words(
        lang,
        "figures.loading.describe_fates",
        answers=len(answers),
        fates=len(fates),
        nan=sum(fate.nan_share > 0 for fate in fates),
        first=min(first),
    )


def fate_rows(fates: Sequence[Fate]) -> list[dict[str, object]]:
    """Every fate and layer."""
    return [
        {
            "allocator": fate.allocator,
            "backend": fate.backend,
            "layer": layer,
            "relative_error_where_finite": float(error),
            "nan_share": float(share),
            "first_broken_layer": fate.first_broken,
            "answer": fate.text,
        }
        for fate in fates
        for layer, (error, share) in enumerate(zip(fate.effect.layer_error, fate.effect.layer_nan, strict=True))
    ]


def mark_of(value: float) -> str:
    """The sign of a value that no scale should have; empty for an ordinary one."""
    if np.isnan(value):
        return MARKS["nan"]
    if np.isinf(value):
        return MARKS["inf"] if value > 0 else MARKS["neginf"]
    return MARKS["zero"] if value == 0 else MARKS["negative"] if value < 0 else ""


def spread_figure(spreads: Sequence[Spread], *, theme: Theme, lang: str) -> go.Figure:
    """A square of experts for each backend, a row of squares for each kind of rule; reached experts are filled and
    carry the mark of what they read.  A square whose rule is open holds a question mark."""
    import plotly.graph_objects as go

    ink, reached = surface(theme), role("global_scale", theme)
    experts = next(len(spread.changed) for spread in spreads if spread.changed is not None)
    rows, step = -(-experts // SIDE), SIDE + 1
    bands = [[spread for spread in spreads if spread.reading.rule in rules] for rules in BANDS]
    # One grid for all squares: an empty column between two of them, and above each band room for its words.
    above = 6
    shape = (len(bands) * (rows + above), max(map(len, bands)) * step - 1)
    hit: list[list[int | None]] = [[None] * shape[1] for _ in range(shape[0])]
    text = [[""] * shape[1] for _ in range(shape[0])]
    hover = [[""] * shape[1] for _ in range(shape[0])]
    notes: list[dict[str, Any]] = []
    for b, (rules, band) in enumerate(zip(BANDS, bands, strict=True)):
        top = b * (rows + above) + above
        said = words(lang, f"figures.loading.band.{rules[0]}")
        notes.append(_note(f"<b>{said}</b>", -0.5, top - 4.3, ink.ink, 13, "left"))
        for k, spread in enumerate(band):
            left = k * step
            count = "?" if spread.reached is None else f"{spread.reached} / {experts}"
            label = f"{short_name(spread, lang)}<br><b>{count}</b>"
            notes.append(_note(label, left + (SIDE - 1) / 2, top - 0.7, ink.ink, 11, "center"))
            if spread.changed is None:
                notes.append(_note("?", left + (SIDE - 1) / 2, top + rows * 0.7, ink.muted, 28, "center"))
                continue
            for e in range(experts):
                row, column = top + e // SIDE, left + e % SIDE
                hit[row][column] = int(spread.changed[e])
                if spread.changed[e]:
                    assert spread.after is not None, "only what is read can change"
                    text[row][column] = mark_of(float(spread.after[e])) or MARKS["outlier"]
                hover[row][column] = _hover(spread, e)
    heat: dict[str, Any] = {
        "type": "heatmap",
        "z": hit,
        "text": text,
        "texttemplate": "%{text}",
        "textfont": {"size": 9, "color": reached.on_fill},
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": False,
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, ink.line], [1, reached.fill]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
    }
    layout = base_layout(
        theme,
        height=630,
        showlegend=False,
        annotations=notes,
        xaxis={"visible": False, "range": [-0.5, shape[1] - 0.5]},
        yaxis={"visible": False, "range": [shape[0] - 0.4, 0.2]},
    )
    return go.Figure([heat], layout)


def short_name(spread: Spread, lang: str) -> str:
    """A backend's name on two lines, narrow enough for its square."""
    said = {name: words(lang, f"figures.loading.short.{name}") for name in ("batched", "emulation", "token")}
    return SHORT[spread.reading.name].format(**said)


def _note(text: str, x: float, y: float, color: str, size: int, anchor: str) -> dict[str, Any]:
    font = {"size": size, "color": color}
    return {"text": text, "x": x, "y": y, "xanchor": anchor, "yanchor": "bottom", "showarrow": False, "font": font}


def _hover(spread: Spread, e: int) -> str:
    shown = [("a", spread.after), ("alpha", spread.alpha)]
    parts = [f"{name} –" if values is None else f"{name} {values[e]:.4g}" for name, values in shown]
    return "<br>".join((f"{spread.reading.name} · {e}", *parts))


def describe_spread(spreads: Sequence[Spread], lang: str) -> str:
    """How many experts each kind of backend computes with another scale."""
    by = {spread.reading.name: spread for spread in spreads}
    alone = by["vllm-cutlass"]
    assert alone.changed is not None
    return words(
        lang,
        "figures.loading.describe_spread",
        cutlass=alone.reached,
        flashinfer=by["vllm-flashinfer-cutlass"].reached,
        unread=by["vllm-marlin"].reached,
        experts=len(alone.changed),
    )


def spread_rows(spreads: Sequence[Spread]) -> list[dict[str, object]]:
    """Every backend and expert; one row for a backend whose rule is open."""
    rows: list[dict[str, object]] = []
    for spread in spreads:
        about = {"backend": spread.reading.name, "rule": spread.reading.rule, "product": spread.product}
        columns = {
            "input_scale_before": spread.before,
            "input_scale_read": spread.after,
            "encode_scale": spread.gscale,
            "alpha": spread.alpha,
            "g1_scale_c": spread.scale_c,
        }
        if spread.changed is None:
            rows.append({**about, "expert": None, **dict.fromkeys(columns), "changed": None})
            continue
        rows += [
            {
                **about,
                "expert": e,
                **{name: None if values is None else float(values[e]) for name, values in columns.items()},
                "changed": bool(changed),
            }
            for e, changed in enumerate(spread.changed)
        ]
    return rows
