"""The Explorer's comparison: a second checkpoint, opened as the first one is, and everything the two do not share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.audit.diff import Diff, Side, diff, diff_to_json
from nvfp4viz.audit.run import without_collector
from nvfp4viz.checkpoint.problems import as_written
from nvfp4viz.errors import NvError
from nvfp4viz.ui import caches, errors, explorer_rows, explorer_source
from nvfp4viz.ui.explorer_report import file_stem
from nvfp4viz.ui.explorer_rows import short
from nvfp4viz.ui.i18n import listed

if TYPE_CHECKING:
    from nvfp4viz.checkpoint import CanonicalView
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

# Kinds of difference, in the order of the table.
KINDS = ("config", "types", "only_a", "only_b", "values")
# Rows that a page shows; the JSON has all.
MOST_ROWS = 5000
# Pixels: a number that is cut on its left is another number, and roles that are cut on their right look alike.
# Up to the kind they fit into the 900 that a window of 1280 leaves: what one compares for needs no scrolling.  A phone
# shows the whole name.
WIDTHS = {
    "name": 356, "A": 155, "B": 155, "ratio": 115, "kind": 110,
    "layer": 70, "expert": 75, "projection": 100, "role": 140,
}  # fmt: skip
# Characters: what a cell of a setting shows at least, what stays on each side of a difference, and what is ever put in.
_FITS, _AROUND, _MOST_SHOWN, _MOST_SAID = 20, 5, 400, 100_000
_NAME = 48  # characters of a name that a cell shows
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


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
    counts = {kind: len(getattr(found, kind)) for kind in KINDS}
    for side, files in (("A", found.unread_a), ("B", found.unread_b)):
        if files:
            page.finding("compare.unread", side=side, count=len(files), file=errors.escape(files[0]))
    if not found.differs:
        page.finding("compare.same" if found.same else "compare.same_so_far")
    else:
        named = [page.t(f"compare.count.{kind}", count=f"{counts[kind]:,}") for kind in KINDS if counts[kind]]
        page.finding("compare.differ", what=listed(named))
        _table(page, _rows(opened, other), counts)
    if found.by_header:
        page.prose("compare.by_header", values=f"{found.by_value:,}", others=f"{found.by_header:,}")
    st.download_button(
        page.t("compare.json"),
        data=lambda: diff_to_json(found),
        file_name=f"nvfp4viz-diff-{file_stem(opened)}-{file_stem(other)}.json",
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
    one, two = opened.audit, other.audit

    def make() -> Diff:
        with without_collector():
            return diff(one.checkpoint, two.checkpoint, (one.view, two.view))

    return caches.kept("explorer.kept.diff", (opened.identity, other.identity), make)


def _rows(opened: Opened, other: Opened) -> list[Row]:
    def make() -> list[Row]:
        with without_collector():
            return list(diff_rows(_diff(opened, other), opened.audit.view, other.audit.view))

    return caches.kept("explorer.kept.rows", (opened.identity, other.identity), make)


def _table(page: Lesson, rows: list[Row], counts: dict[str, int]) -> None:
    present = [kind for kind in KINDS if counts[kind]]
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        shown = st.pills(
            page.t("findings.severity"),
            present,
            format_func=lambda kind: f"{page.t(f'compare.kinds.{kind}')} ({counts[kind]:,})",
            selection_mode="multi",
            default=present,
            wrap=True,
            key=f"explorer.compare.kinds.{'.'.join(present)}",
        )
        words = st.text_input(
            page.t("compare.filter"), key="explorer.compare.words", placeholder="down input_scale", width=280
        )
    fitting = list(filtered(rows, tuple(shown), words))
    if not fitting:
        page.prose("compare.no_row")
        return
    cells = [row.cells() for row in islice(fitting, MOST_ROWS)]
    named = [{**row, "kind": page.t(f"compare.kinds.{row['kind']}")} for row in cells]
    columns = {
        name: st.column_config.NumberColumn("B / A", format="%.4g", width=WIDTHS[name])
        if name == "ratio"
        else st.column_config.Column(_label(page, name), width=WIDTHS.get(name))
        for name in cells[0]
        if any(row[name] is not None for row in cells)
    }

    def told(index: int) -> Iterator[tuple[str, str | None]]:
        row, kind = fitting[index], named[index]["kind"]
        yield kind, row.name
        yield from zip("AB", row.sides(), strict=True)

    explorer_rows.rows_table(page, "compare", named, columns, told)
    if len(fitting) > MOST_ROWS:
        st.caption(page.t("compare.more", shown=f"{MOST_ROWS:,}", count=f"{len(fitting):,}"))


def _label(page: Lesson, column: str) -> str:
    return column if column in ("A", "B") else page.t(f"columns.{column}")


@dataclass(frozen=True, slots=True)
class Row:
    """One difference.  ``text`` is what words are looked for in; the slot is found only for rows that are shown."""

    kind: str
    name: str
    text: str
    a: str | None = None
    b: str | None = None
    ratio: float | None = None
    view: CanonicalView | None = None

    def sides(self) -> tuple[str | None, str | None]:
        """What A and B have: of a tensor that one of them lacks, the other's type and shape."""
        if self.kind not in ("only_a", "only_b") or self.view is None:
            return self.a, self.b
        entry = self.view.table[self.name]
        own = f"{entry.dtype} {list(entry.shape)}"
        return (own, "∅") if self.kind == "only_a" else ("∅", own)

    def cells(self) -> dict[str, Any]:
        """What the table shows; what A and B have is text, because a tensor's type and a number share a column."""
        place = {} if self.view is None else _place(self.view, self.name)
        where = dict.fromkeys(("layer", "expert", "projection", "role")) | place
        a, b = (text if text is None else short(text, _FITS) for text in self.sides())
        file, _, field = self.name.partition(": ")
        name = setting_name(file, field) if self.kind == "config" else end_of(self.name, _NAME)
        return {"name": name, "A": a, "B": b, "ratio": self.ratio, "kind": self.kind, **where}


def diff_rows(found: Diff, a: CanonicalView, b: CanonicalView) -> Iterator[Row]:
    """One row for each difference.

    Parameters
    ----------
    a, b
        The two checkpoints' views, which tell the slot of a tensor that one of them has.
    """
    for item in found.config:
        name = f"{item.file}: {item.field}"
        yield Row("config", name, name.lower(), *said_apart(item.a, item.b))
    text_in_a, text_in_b = _texts(a), _texts(b)
    for item in found.types:
        kinds = (f"{dtype} {list(shape)}" for dtype, shape in (item.a, item.b))
        yield Row("types", item.tensor, text_in_a(item.tensor), *kinds, view=a)
    for name in found.only_a:
        yield Row("only_a", name, text_in_a(name), view=a)
    for name in found.only_b:
        yield Row("only_b", name, text_in_b(name), view=b)
    for item in found.values:
        text = f"{item.tensor} {item.projection or ''} {item.role or ''}".lower()
        yield Row("values", item.tensor, text, str(item.a), str(item.b), item.ratio, a)


def _texts(view: CanonicalView) -> Callable[[str], str]:
    """A name with its projection and role, asked once for all names that differ by their numbers: 370,000 may come."""
    known: dict[str, str] = {}

    def text_of(name: str) -> str:
        pattern = _NUMBERS.sub("#", name)
        if pattern not in known:
            place = _place(view, name)
            known[pattern] = f" {place.get('projection') or ''} {place.get('role') or ''}"
        return (name + known[pattern]).lower()

    return text_of


def _place(view: CanonicalView, name: str) -> dict[str, Any]:
    slot = view.locate(name)
    if slot is None:
        return {}
    expert = None if view.is_whole(slot.layer) else slot.expert
    return {"layer": slot.layer, "expert": expert, "projection": slot.projection, "role": slot.role}


def setting_name(file: str, field: str) -> str:
    """A setting as its cell names it: of a long path the end, which tells it from the others beside it."""
    return f"{file}: {end_of(field, _NAME - len(file))}"


def end_of(name: str, room: int) -> str:
    """Of a long name the end, in so many characters.

    >>> end_of("layers.0.down_proj", 10), end_of("down_proj", 10)
    ('…down_proj', 'down_proj')
    """
    return name if len(name) <= room else f"…{name[1 - room :]}"


def said(value: Any) -> str:
    """A setting as its file has it."""
    return "∅" if value is None else as_written(value, _MOST_SAID)


def said_apart(a: Any, b: Any) -> tuple[str, str]:
    """Two settings as their cells say them: of long ones, what both begin and end with is left out.

    A cell shows some twenty characters, and lists that differ in their last name would look the same.

    >>> said_apart(["lm_head", "model.layers.0.mlp.gate"], ["lm_head", "model.layers.1.mlp.gate"])
    ('…yers.0.mlp.…', '…yers.1.mlp.…')
    >>> said_apart("NVFP4", None)
    ('"NVFP4"', '∅')
    """
    one, two = said(a), said(b)
    if max(len(one), len(two)) > _FITS:
        begin = _in_common(one, two)
        end = _in_common(one[begin:][::-1], two[begin:][::-1])
        one, two = (_cut(text, begin - _AROUND, end - _AROUND) for text in (one, two))
    return one, two


def _in_common(one: str, two: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _cut(text: str, begin: int, end: int) -> str:
    """Without ``begin`` characters in front and ``end`` behind, where that is more than the sign for it."""
    text = "…" + text[begin:] if begin > 1 else text
    text = text[:-end] + "…" if end > 1 else text
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def filtered(rows: list[Row], kinds: tuple[str, ...], words: str) -> Iterator[Row]:
    """Rows of these kinds in whose name, projection or role each of the words stands."""
    wanted = words.lower().split()
    for row in rows:
        if row.kind in kinds and all(word in row.text for word in wanted):
            yield row
