"""The Explorer's comparison: a second checkpoint, opened as the first one is, and everything the two do not share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.audit.diff import Diff, Side, diff, diff_to_json
from nvfp4viz.errors import NvError
from nvfp4viz.ui import errors, explorer_source

if TYPE_CHECKING:
    from nvfp4viz.checkpoint import CanonicalView
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

# Kinds of difference, in the order of the table.
KINDS = ("config", "types", "only_a", "only_b", "values")
# Rows that a page shows; the JSON has all.
MOST_ROWS = 5000
_KEPT = "explorer.kept.diff"


def compare(page: Lesson, opened: Opened) -> None:
    """Choose the second checkpoint and see what differs."""
    page.prose("compare.text")
    try:
        other = explorer_source.choose(page, explorer_source.SECOND)
        if other is None:
            return
        found = _diff(opened, other)
    except NvError as error:
        errors.show(error)
        return
    page.table(("side", "name", "layout", ">tensors"), [_side("A", found.a), _side("B", found.b)])
    rows = list(diff_rows(found, opened.audit.view, other.audit.view))
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    if found.same:
        page.finding("compare.same")
    else:
        named = [page.t(f"compare.count.{kind}", count=f"{counts[kind]:,}") for kind in KINDS if counts[kind]]
        page.finding("compare.differ", what=page.t("findings.separator").join(named))
        _table(page, rows, counts)
    st.download_button(
        page.t("compare.json"),
        data=lambda: diff_to_json(found),
        file_name="nvfp4viz-diff.json",
        mime="application/json",
        key="explorer.compare.json",
        help=page.t("compare.json_help"),
        on_click="ignore",
        icon=":material/download:",
    )


def _side(letter: str, side: Side) -> tuple[str, ...]:
    return letter, errors.escape(side.source), f"{side.dialect}, {side.scheme}", f"{side.tensors:,}"


def _diff(opened: Opened, other: Opened) -> Diff:
    """Compared once for as long as both stay what they are."""
    pair = opened.identity, other.identity
    kept: tuple[tuple[str, str], Diff] | None = st.session_state.get(_KEPT)
    if kept is None or kept[0] != pair:
        kept = pair, diff(opened.audit.checkpoint, other.audit.checkpoint)
        st.session_state[_KEPT] = kept
    return kept[1]


def _table(page: Lesson, rows: list[dict[str, Any]], counts: dict[str, int]) -> None:
    present = [kind for kind in KINDS if counts[kind]]
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        shown = st.pills(
            page.t("findings.severity"),
            present,
            format_func=lambda kind: f"{page.t(f'compare.kinds.{kind}')} ({counts[kind]:,})",
            selection_mode="multi",
            default=present,
            key=f"explorer.compare.kinds.{'.'.join(present)}",
        )
        words = st.text_input(
            page.t("compare.filter"), key="explorer.compare.words", placeholder="down input_scale", width=280
        )
    fitting = list(filtered(rows, tuple(shown), words))
    if not fitting:
        page.prose("compare.no_row")
        return
    named = [{**row, "kind": page.t(f"compare.kinds.{row['kind']}")} for row in fitting[:MOST_ROWS]]
    columns = [name for name in fitting[0] if any(row[name] is not None for row in fitting)]
    st.dataframe(
        [{name: row[name] for name in columns} for row in named],
        hide_index=True,
        key="explorer_compare_table",
        alt=page.t("tabs.compare"),
        placeholder="",
        column_config={
            name: st.column_config.Column(page.t(f"columns.{name}"))
            for name in columns
            if name not in ("A", "B", "ratio")
        }
        | {"ratio": st.column_config.NumberColumn("B / A", format="%.6g")},
    )
    if len(fitting) > MOST_ROWS:
        st.caption(page.t("compare.more", shown=f"{MOST_ROWS:,}", count=f"{len(fitting):,}"))


def diff_rows(found: Diff, a: CanonicalView, b: CanonicalView) -> Iterator[dict[str, Any]]:
    """One row for each difference; what A and B have is text, because a tensor's type and a number share a column.

    Parameters
    ----------
    a, b
        The two checkpoints' views, which tell the slot of a tensor that one of them has.
    """
    for item in found.config:
        yield _row("config", f"{item.file}: {item.field}", {}, said(item.a), said(item.b))
    for item in found.types:
        kinds = (f"{dtype} {list(shape)}" for dtype, shape in (item.a, item.b))
        yield _row("types", item.tensor, _place(a, item.tensor), *kinds)
    for kind, names, view in (("only_a", found.only_a, a), ("only_b", found.only_b, b)):
        for name in names:
            yield _row(kind, name, _place(view, name))
    for item in found.values:
        place = {"layer": item.layer, "expert": item.expert, "projection": item.projection, "role": item.role}
        yield _row("values", item.tensor, place, str(item.a), str(item.b), item.ratio)


def _place(view: CanonicalView, name: str) -> dict[str, Any]:
    slot = view.locate(name)
    if slot is None:
        return {}
    expert = None if view.is_whole(slot.layer) else slot.expert
    return {"layer": slot.layer, "expert": expert, "projection": slot.projection, "role": slot.role}


def _row(
    kind: str, name: str, place: dict[str, Any], a: str | None = None, b: str | None = None, ratio: float | None = None
) -> dict[str, Any]:
    where = dict.fromkeys(("layer", "expert", "projection", "role")) | place
    return {"kind": kind, "name": name, **where, "A": a, "B": b, "ratio": ratio}


def said(value: Any) -> str:
    """A setting as a cell says it."""
    return "∅" if value is None else str(value)[:400]


def filtered(rows: list[dict[str, Any]], kinds: tuple[str, ...], words: str) -> Iterator[dict[str, Any]]:
    """Rows of these kinds in whose name, projection or role each of the words stands."""
    wanted = words.lower().split()
    for row in rows:
        text = f"{row['name']} {row['projection'] or ''} {row['role'] or ''}".lower()
        if row["kind"] in kinds and all(word in text for word in wanted):
            yield row
