"""The swizzle map on a page: a shape and a layout in, the chosen scale out."""

from __future__ import annotations

from functools import cache

import streamlit as st

from nvfp4viz.formats import ScaleLayout, scale_at, swizzled_size
from nvfp4viz.formats.places import TILE_ROWS
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import table

_COMPONENT = load("swizzle_map", "two_pictures")
_KEY = "swizzle_map"
LAYOUTS: tuple[ScaleLayout, ...] = ("128x4", "8x4")
"""Those with tiles; what is linear needs no picture."""


@cache
def tile_order(layout: ScaleLayout) -> list[tuple[int, int]]:
    """Row and column of every byte of a tile."""
    rows = TILE_ROWS[layout]
    places = (scale_at(byte, rows, 4, layout) for byte in range(swizzled_size(rows, 4, layout)))
    return [(place.row, place.column) for place in places]


def swizzle_map(view: View, *, rows: int, columns: int) -> None:
    """Draw the tile around the scale of ``view``'s settings ``s_row`` and ``s_col``, inside ``(rows, columns)``."""
    now = (view["s_row"], view["s_col"])
    version = st.session_state.get("_swizzle_version", 0)
    if now != st.session_state.get("_swizzle_said"):
        version += 1
        st.session_state["_swizzle_version"], st.session_state["_swizzle_said"] = version, now

    def heard() -> None:
        said = dict(st.session_state[_KEY].get("edit") or {})
        row, column = said.get("row"), said.get("column")
        if row in range(rows) and column in range(columns):
            st.session_state["_swizzle_said"] = (row, column)
            view.put(s_row=row, s_col=column)

    _COMPONENT(
        key=_KEY,
        data={
            "rows": rows,
            "columns": columns,
            "tile": tile_order(view["layout"]),
            "row": view["s_row"],
            "column": view["s_col"],
            "text": table(lang(), "blocks.map"),
            "version": version,
        },
        on_edit_change=heard,
    )
