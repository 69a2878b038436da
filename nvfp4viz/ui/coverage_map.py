"""The coverage map on a page: mounts the canvas component beside its cells, and hands back what the reader picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.figures.coverage import CoverageGrid, RouteOverlay, pack, pack_cells
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang

if TYPE_CHECKING:
    from collections.abc import Callable

_MAP, _CELLS = load("coverage_map"), load("coverage_cells")


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen cell: role, layer number as in the checkpoint, expert."""

    role: str
    layer: int
    expert: int


def coverage_map(
    grid: CoverageGrid,
    *,
    key: str,
    role: str,
    overlay: RouteOverlay | None = None,
    selected: tuple[int, int] | None = None,
    tall: bool = False,
    on_pick: Callable[[], None] | None = None,
    on_role: Callable[[], None] | None = None,
) -> tuple[str, Pick | None]:
    """Draw the map.

    Parameters
    ----------
    key
        Streamlit key of the component.
    role
        Row family shown at first; the reader can switch it in the browser.
    selected
        (layer number, expert) to frame, or None.
    on_pick
        Called when a cell is chosen, before the page runs again: ``selected`` of the component's state is the cell's
        ``layer``, ``expert`` and ``role``.
    on_role
        Called when the reader switches to another role: ``role`` of the component's state has its ``name``.

    Returns
    -------
    tuple
        The role shown, and the chosen cell or None.
    """
    place = None
    if selected is not None and selected[0] in grid.layers and selected[1] < grid.experts:
        place = (grid.layers.index(selected[0]), selected[1])

    def ignore() -> None:
        return None

    with st.container(gap=None):
        result = _MAP(
            key=key,
            data={"of": key, **pack(grid, lang=lang(), role_name=role, overlay=overlay, selected=place, tall=tall)},
            on_selected_change=on_pick or ignore,
            on_role_change=on_role or ignore,
        )
        # Apart from what a pick changes: what the browser has already is not sent again.
        _CELLS(key=f"{key}.cells", data={"of": key, **pack_cells(grid)})
    chosen, switched = result.get("selected"), result.get("role")
    shown = switched["name"] if switched else role
    pick = Pick(str(chosen["role"]), int(chosen["layer"]), int(chosen["expert"])) if chosen else None
    return (shown if shown in grid.roles else role), pick
