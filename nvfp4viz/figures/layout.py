"""What all figures share: type, margins, hover, axes.  Transparent, so that they sit on the page of either theme."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.figures.palette import MONO, SANS, Theme, surface

if TYPE_CHECKING:
    import plotly.graph_objects as go


# What stands around a plot where nothing needs more, and above it where a legend of one line does.
USUAL = {"l": 8, "r": 8, "t": 24, "b": 8}
ABOVE_LEGEND = 44


def base_layout(theme: Theme, *, height: int, **more: Any) -> dict[str, Any]:
    """Keyword arguments for ``go.Layout``; ``more`` is merged over it, one level deep for axes.

    To be assigned to ``figure.layout`` as a whole, and before any ``add_annotation`` or ``add_shape``: Plotly takes ten
    times as long to merge it by ``update_layout``.
    """
    ink = surface(theme)
    axis: dict[str, Any] = {
        "gridcolor": ink.line,
        "linecolor": ink.line,
        "zerolinecolor": ink.line,
        "tickcolor": ink.line,
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"color": ink.muted, "size": 12},
        "title": {"font": {"color": ink.ink, "size": 13}, "standoff": 8},
        "automargin": True,
    }
    layout: dict[str, Any] = {
        # Our own look, not Plotly's default template: that alone is 6.4 KB in every figure.
        "template": "none",
        "height": height,
        "margin": dict(USUAL),
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": SANS, "size": 13, "color": ink.ink},
        "hoverlabel": {
            "bgcolor": ink.panel,
            "bordercolor": ink.line,
            "font": {"family": MONO, "size": 12, "color": ink.ink},
        },
        # Without a template, its buttons stand on a grey bar that covers the legend.
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": ink.muted, "activecolor": ink.ink},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": ink.ink, "size": 12}},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }
    margin = more.pop("margin", {})
    for name, value in more.items():
        if name.startswith(("xaxis", "yaxis")):
            layout[name] = axis | value
            if isinstance(value.get("title"), str):
                layout[name]["title"] = {**axis["title"], "text": value["title"]}
        else:
            layout[name] = value
    layout["margin"] |= _room(layout) | margin
    return layout


def _room(layout: dict[str, Any]) -> dict[str, int]:
    """Margins that names and labels of usual length need: where Plotly has to find them itself, it draws twice."""

    def most(letter: str, titled: int, labelled: int) -> int:
        axes = [value for name, value in layout.items() if name.startswith(f"{letter}axis")]
        shown = [axis for axis in axes if axis.get("showticklabels", True) and len(axis.get("tickvals", "?"))]
        return max((titled if axis["title"].get("text") else labelled for axis in shown), default=8)

    return {"l": most("y", 53, 8), "b": most("x", 48, 30)}


def room_for(names: Iterable[str]) -> int:
    """Pixels at the left for names of an axis at size 12, in our sans: what Plotly finds, and up to ten pixels more.

    >>> room_for(["rank 0", "rank 10"]) < room_for(["一个长长的名字"])
    True
    """
    longest = max((sum(map(_advance, name)) for name in names), default=0.0)
    return 24 + round(longest)


def _advance(letter: str) -> float:
    if ord(letter) > 0x2000:
        return 12.0
    return 3.3 if letter == " " else 7.4 if letter.isupper() or letter.isdigit() else 5.6


# All marks of one kind on a map are one path: a bar or a marker for each makes the browser draw twice as long.


def marks(path: str, colour: str, width: float, axes: str = "") -> list[dict[str, Any]]:
    """A path in the units of the axes of that number, as a list of shapes; an empty one for an empty path."""
    line = {"color": colour, "width": width}
    return [{"type": "path", "path": path, "xref": f"x{axes}", "yref": f"y{axes}", "line": line}] if path else []


def frames(cells: npt.NDArray[np.bool_], half_width: float, half_height: float | None = None) -> str:
    """The outlines of a map's marked cells (rows, columns) as an SVG path in the axes' units."""
    sides = _sides(cells, half_width, half_height)
    return " ".join(f"M{x0:g},{y0:g}L{x1:g},{y0:g}L{x1:g},{y1:g}L{x0:g},{y1:g}Z" for x0, y0, x1, y1 in sides)


def hatch(cells: npt.NDArray[np.bool_], half_width: float, half_height: float | None = None) -> str:
    """Three strokes across each marked cell, likewise."""
    return " ".join(
        f"M{x0:g},{(y0 + y1) / 2:g}L{(x0 + x1) / 2:g},{y0:g}M{x0:g},{y1:g}L{x1:g},{y0:g}"
        f"M{(x0 + x1) / 2:g},{y1:g}L{x1:g},{(y0 + y1) / 2:g}"
        for x0, y0, x1, y1 in _sides(cells, half_width, half_height)
    )


def _sides(
    cells: npt.NDArray[np.bool_], half_width: float, half_height: float | None
) -> Iterator[tuple[float, float, float, float]]:
    half = half_width if half_height is None else half_height
    for y, x in np.argwhere(cells).tolist():
        yield x - half_width, y - half, x + half_width, y + half


def drawn_once(figure: go.Figure) -> go.Figure:
    """The same figure, changed in place, in a form that Streamlit's page draws once.

    Streamlit 1.67 mounts a chart, copies what it was given, and hands the copy to ``Plotly.react``, which draws all
    anew if anything *may* have changed: a template or a typed array (NumPy's form on the wire) because it is another
    object, a list because nobody numbered it.  So: no template, plain lists, one number.  A number that never changes
    is right, because a chart with other content is another chart to Streamlit (its id holds the figure's text).
    Where the margins are the usual ones, names at the left and a legend above get their room here, for the same end.
    """
    _make_room(figure)
    figure.layout.template = None
    figure.layout.datarevision = 1
    for trace in figure.data:
        for path, values in _arrays(trace.to_plotly_json()):
            trace[path] = None  # else Plotly keeps the array: to its comparison the list is nothing new
            trace[path] = values.tolist()
    return figure


def _make_room(figure: go.Figure) -> None:
    margin = figure.layout.margin
    names = list(_left_names(figure))
    if names and margin.l == USUAL["l"]:
        margin.l = room_for(names)
    in_legend = [trace for trace in figure.data if trace.name and trace.showlegend is not False]
    if margin.t == USUAL["t"] and len(in_legend) > 1 and figure.layout.showlegend is not False:
        margin.t = ABOVE_LEGEND


def _left_names(figure: go.Figure) -> Iterator[str]:
    """The lines of the names beside the y axis, without their tags; none for an axis of numbers or one not shown."""
    axis = figure.layout.yaxis
    if axis.visible is False or axis.showticklabels is False:
        return
    of_traces = [trace.y for trace in figure.data if "y" in trace and trace.y is not None]
    for name in axis.ticktext or axis.categoryarray or itertools.chain(*of_traces):
        if isinstance(name, str):
            yield from (re.sub("<[^>]*>", "", line) for line in name.split("<br>"))


def _arrays(properties: dict[str, Any], path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in properties.items():
        if isinstance(value, np.ndarray):
            yield path + name, value
        elif isinstance(value, dict):
            yield from _arrays(value, f"{path}{name}.")
