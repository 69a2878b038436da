"""The place map on a page: cells and where they go in, the chosen cell out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from nvfp4viz.ui.components import load
from nvfp4viz.ui.state import View

_COMPONENT = load("place_map", "two_pictures")


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the two pictures: its heading, cells in a line, cells, height of a line in pixels, cells that belong
    together (0: none), and how wide it is beside the other."""

    title: str
    columns: int
    count: int
    tall: int
    unit: int = 0
    share: int = 1


@dataclass(frozen=True, slots=True)
class Cells:
    """What is mapped: for each cell its place in the second picture, its look, a label of one to three characters and
    a sentence; ``gap`` is the sentence of a place that nothing goes to."""

    places: Sequence[int]
    kinds: Sequence[str]
    labels: Sequence[str]
    said: Sequence[str]
    gap: str = ""


def place_map(view: View, setting: str, before: Panel, after: Panel, cells: Cells, *, legend: str, keys: str) -> None:
    """Draw both pictures on ``view``'s ``setting``, an index of ``cells``; ``keys`` tells how to walk through them."""
    key = f"place_map_{setting}"
    version = st.session_state.get(f"_{key}_version", 0)
    if view[setting] != st.session_state.get(f"_{key}_said"):
        version += 1
        st.session_state[f"_{key}_version"], st.session_state[f"_{key}_said"] = version, view[setting]

    def heard() -> None:
        said = st.session_state[key].get("chosen")
        if said in range(len(cells.places)):
            st.session_state[f"_{key}_said"] = said
            view.put(**{setting: said})

    _COMPONENT(
        key=key,
        data={
            "from": _panel(before),
            "to": _panel(after),
            "shares": [before.share, after.share],
            "places": [int(place) for place in cells.places],
            "kinds": list(cells.kinds),
            "labels": list(cells.labels),
            "said": list(cells.said),
            "gap": cells.gap,
            "legend": legend,
            "keys": keys,
            "chosen": view[setting],
            "version": version,
        },
        on_chosen_change=heard,
    )


def _panel(panel: Panel) -> dict[str, str | int]:
    return {
        "title": panel.title,
        "columns": panel.columns,
        "count": panel.count,
        "tall": panel.tall,
        "unit": panel.unit,
    }
