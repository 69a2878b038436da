"""A table of the Explorer whose cells are short: a phone shows few of them, so a picked row is told in full below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.ui.explorer import code_span

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

_LETTER, _PADDING = 7.3, 18  # pixels: of a digit in a cell, and beside the text


def short(text: str, room: int) -> str:
    """The beginning of a text, in so many characters.

    >>> short("tensor_group", 8), short("NVFP4", 8)
    ('tensor_…', 'NVFP4')
    """
    return text if len(text) <= room else f"{text[: room - 1]}…"


def width_for(texts: Iterable[str], least: int, most: int) -> int:
    """Pixels of a column that shows these texts whole, as far as ``most`` allows.

    >>> width_for(["0.0015927269"], 48, 130), width_for(["∅"], 48, 130)
    (106, 48)
    """
    return min(most, max(least, round(_PADDING + _LETTER * max(map(len, texts), default=0))))


def rows_table(
    page: Lesson,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Any],
    told: Callable[[int], Iterable[tuple[str, str | None]]],
) -> None:
    """The table, and below it the row of the picked cell in full.

    Parameters
    ----------
    columns
        Their configuration, in the order in which they stand.
    told
        What is said of a row: its parts, each with the name of its column; a part without text is left out.
    """
    picked = st.dataframe(
        rows,
        hide_index=True,
        key=f"explorer_{name}_table",
        alt=page.t(f"tabs.{name}"),
        placeholder="",
        column_order=list(columns),
        column_config=dict(columns),
        on_select="rerun",
        selection_mode="single-cell",
    )
    cells = picked.selection.cells
    if not cells or cells[0][0] >= len(rows):
        st.caption(page.t("rows.pick"))
        return
    with st.container(key=f"finding_explorer_{name}_row"):
        parts = [page.t("rows.part", what=what, text=code_span(text)) for what, text in told(cells[0][0]) if text]
        st.markdown("  \n".join(parts))
