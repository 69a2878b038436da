"""Figures of the story page: how NaN spreads over a run, and what each remedy costs in loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvfp4viz.figures.coverage import shown
from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, surface
from nvfp4viz.figures.words import words

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from numpy.typing import NDArray


def nan_spread(
    tokens: tuple[str, ...], fraction: NDArray[np.float32], *, theme: Theme, lang: str, height: int = 260
) -> go.Figure:
    """Share of NaN in the residual stream, one column a token, one row a layer.

    A cell with any NaN carries its mark N; a clean cell is empty.  The share is in the hover and in the table.

    Parameters
    ----------
    tokens
        Texts of the T tokens.
    fraction
        ``(T, layers)`` float32, 0 to 1, after each layer.
    """
    import plotly.graph_objects as go

    here = surface(theme)
    count, layers = fraction.shape
    figure = go.Figure()
    rows, columns = np.divmod(np.arange(layers * count), count)
    share = fraction.T.ravel()
    names = [shown(tokens[column]) for column in columns]
    size = max(6, min(22, 620 // max(1, count)))
    for bad, text in ((False, ""), (True, "N")):
        pick = (share > 0) == bad
        figure.add_scatter(
            x=columns[pick].astype(np.int16),
            y=rows[pick].astype(np.int16),
            mode="markers+text",
            text=[text] * int(pick.sum()),
            textfont={"size": max(7, size // 2), "color": here.ink},
            customdata=np.column_stack([share[pick] * 100]).astype(np.float32),
            hovertext=[names[i] for i in np.flatnonzero(pick)],
            hovertemplate=words(lang, "story.spread.hover"),
            marker={
                "symbol": "square",
                "size": size,
                "color": here.panel if bad else here.page,
                "line": {"width": 1.5 if bad else 1, "color": here.ink if bad else here.line},
            },
            name=words(lang, "story.spread.bad" if bad else "story.spread.clean"),
        )
    figure.layout = base_layout(
        theme,
        height=height,
        xaxis={
            "tickvals": list(range(count)),
            "ticktext": [shown(token) for token in tokens],
            "tickangle": 0,
            "showgrid": False,
            "zeroline": False,
            "title": words(lang, "story.spread.tokens"),
        },
        yaxis={
            "tickvals": list(range(layers)),
            "ticktext": [f"L{layer}" for layer in range(layers)],
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "title": words(lang, "story.spread.after"),
        },
    )
    return figure


def describe_nan_spread(tokens: tuple[str, ...], fraction: NDArray[np.float32], lang: str) -> str:
    """Where the first NaN appears and how far it has come by the last layer."""
    bad = fraction > 0
    if not bad.any():
        return words(lang, "story.spread.none", tokens=len(tokens))
    # In order of computing: a prompt goes through one layer as a whole before the next.
    layer, token = (int(n) for n in np.argwhere(bad.T)[0])
    return words(
        lang,
        "story.spread.finding",
        token=shown(tokens[token]),
        position=token,
        layer=layer,
        reached=int(bad[:, -1].sum()),
        tokens=len(tokens),
    )


def nan_spread_rows(tokens: tuple[str, ...], fraction: NDArray[np.float32]) -> list[dict[str, object]]:
    """The figure's data: one row a token and layer."""
    return [
        {"token": place, "text": text, "layer": layer, "nan_fraction": float(fraction[place, layer])}
        for place, text in enumerate(tokens)
        for layer in range(fraction.shape[1])
    ]
