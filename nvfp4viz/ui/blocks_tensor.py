"""Blocks along K, rows and tiles on a tensor of a checkpoint: the cursor's sample, or what the Explorer has open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import streamlit as st

from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.errors import CheckpointError, NvError
from nvfp4viz.figures import blocks as figures
from nvfp4viz.formats import BLOCK, MX_BLOCK
from nvfp4viz.quant import grouping
from nvfp4viz.serving import matrix
from nvfp4viz.serving.matrix import HOWS, Part, StoredMatrix
from nvfp4viz.ui import caches, errors, explorer_open, own_mark, snippets, state
from nvfp4viz.ui.explorer_code import source_of
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.pick import pick_expert, pick_one
from nvfp4viz.ui.samples import SAMPLE_IDS, sample_title
from nvfp4viz.ui.snippets import Written
from nvfp4viz.ui.theme import theme

OF = ("expert", "other")
"""An expert's weight, or any other matrix of the file."""
PROJECTIONS = ("gate", "up", "down", "gate_up")
_SOURCE = "blocks.source"
_WHOLE, _ASKED = "blocks.whole", "blocks.asked"
_FIRST = "blocks.first"
"""The tensor that the page itself has chosen, in the checkpoint that was open last."""

MARK = "origin"
"""The setting that marks a link which cannot carry what is open."""
_PLACES = (*own_mark.SLOT, "tensor", "stack", "row", "column")

# A name as checkpoints write them; it is looked up in the open file before anything is read.
TENSOR = state.Param(None, lambda text: text[:200], "a-z 0-9 . _ /")


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A checkpoint with what the pickers need; ``private`` was opened in the Explorer in this session alone."""

    identity: str
    checkpoint: Checkpoint
    view: CanonicalView
    names: tuple[str, ...]
    private: bool


@st.cache_resource(max_entries=8, show_spinner=False)
def _facts(identity: str, _checkpoint: Checkpoint) -> tuple[CanonicalView, tuple[str, ...]]:
    from nvfp4viz.checkpoint import canonical

    view = canonical(_checkpoint)
    return view, matrix.matrix_names(_checkpoint, view)


def _is_private() -> bool:
    """Whether what the Explorer has open stands before a sample."""
    return explorer_open.remembered() is not None and st.session_state.get(_SOURCE, "explorer") == "explorer"


def _opened(page: Lesson) -> _Open:
    own = explorer_open.remembered()
    if own is not None and _is_private():
        return _Open(own.identity, own.audit.checkpoint, *_facts(own.identity, own.audit.checkpoint), private=True)
    sample = page.view["checkpoint"]
    path = caches.sample_path(sample)
    identity = repr((str(path), caches.stamp(path)))
    checkpoint = caches.checkpoint(sample)
    return _Open(identity, checkpoint, *_facts(identity, checkpoint), private=False)


def mark(page: Lesson) -> None:
    """The mark of the link, brought up to what is shown."""
    shown = (page.view["part"], page.view["data"]) == ("error", "checkpoint")
    own_mark.settle(page, MARK, own=shown and _is_private(), places=_PLACES)


def settle(page: Lesson) -> None:
    """The ranges that hold for the open checkpoint, before any widget shows a setting.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    opened = _opened(page)
    view = opened.view
    layers, projections = view.moe_layers or (0,), view.projections or PROJECTIONS
    page.refine(
        layer=state.integer(layers[0], layers[-1], default=layers[0]),
        expert=state.integer(0, max(view.experts, 1) - 1, default=0),
        projection=state.choice(projections, default=projections[0]),
    )
    first = next(iter(opened.names), None)
    leave(page)
    # The list has what is worth a look; a link may name any tensor of the file, and is told where it is no matrix.
    page.refine(tensor=state.Param(first, state.choice(opened.checkpoint.tensors).parse, f"{first or '–'} …"))
    if page.view["tensor"] is None:
        page.view.put(tensor=first)
    st.session_state[_FIRST] = first
    if _of(page, opened) == "other":
        page.bound(stack=_matrices_in(opened, page.view["tensor"]) - 1)
    if page.view["take"] == "window":
        # Here already: behind the page's question it is another run, which no longer knows what the link brought.
        with suppress(NvError):
            _bound_window(page, found_of(page))


def leave(page: Lesson) -> None:
    """A name that the page chose for one checkpoint is none that a reader asks of the next, nor one for a link."""
    name = page.view["tensor"]
    if name is not None and name == st.session_state.get(_FIRST) and "tensor" not in page.view.asked:
        page.view.put(tensor=None)


def _of(page: Lesson, opened: _Open) -> str:
    """What is looked at: what the reader chose, if the checkpoint has it."""
    if not opened.view.moe_layers:  # a dense model
        return "other"
    return str(page.view["of"]) if page.view["tensor"] is not None else "expert"


def _matrices_in(opened: _Open, name: str | None) -> int:
    """How many matrices a tensor holds: a stack of three dimensions its first, any other one."""
    entry = opened.checkpoint.tensors.get(name or "")
    return entry.shape[0] if entry is not None and len(entry.shape) == 3 and entry.shape[0] else 1


def _bound_window(page: Lesson, found: StoredMatrix) -> None:
    n, k = found.shape
    page.bound(row=n - 1, column=k - 1)


def pick(page: Lesson) -> None:
    """Which checkpoint, and which of its matrices."""
    own = explorer_open.remembered()
    if own is not None:
        st.segmented_control(
            page.t("tensor.source"),
            ("explorer", "sample"),
            default="explorer",
            required=True,
            format_func=lambda name: page.t(f"tensor.from.{name}"),
            key=_SOURCE,
        )
    opened = _opened(page)
    if not opened.private:
        # Streamlit's select is one line, and the side is narrow: what is chosen is written out below it.
        with st.container(gap=None):
            st.selectbox(
                page.t("tensor.checkpoint"),
                SAMPLE_IDS,
                format_func=sample_title,
                on_change=own_mark.drop,
                args=(page, MARK),
                **page.view.widget("checkpoint"),
            )
            st.caption(sample_title(page.view["checkpoint"]))
            own_mark.tell(page, MARK, page.view["checkpoint"])
    names, asked = opened.names, page.view["tensor"]
    if opened.view.moe_layers and asked is not None:
        pick_one(page, "of", OF, label="tensor.of", texts="tensor")
    if _of(page, opened) == "other":
        if asked is None:
            return  # nothing to choose from
        names = names if asked is None or asked in names else (*names, asked)
        st.selectbox(page.t("tensor.name"), names, help=page.t("tensor.name_help"), **page.view.widget("tensor"))
        matrices = _matrices_in(opened, asked)
        if matrices > 1:
            st.number_input(page.t("tensor.stack"), 0, matrices - 1, **page.view.widget("stack"))
        return
    pick_expert(page, opened.view.moe_layers or (0,), max(opened.view.experts, 1))
    st.segmented_control(
        page.t("tensor.projection"),
        opened.view.projections or PROJECTIONS,
        required=True,
        **page.view.widget("projection"),
    )


def _key(page: Lesson) -> tuple[object, ...]:
    """What decides which matrix is meant."""
    view, opened = page.view, _opened(page)
    if _of(page, opened) == "other":
        return (opened.identity, view["tensor"], view["stack"])
    return (opened.identity, view["layer"], view["expert"], view["projection"])


def found_of(page: Lesson) -> StoredMatrix:
    """The chosen matrix, not yet read.

    Raises
    ------
    CheckpointError
        Those of :mod:`nvfp4viz.serving.stored`; ``matrix.none`` where there is nothing to choose from.
    """
    opened, view = _opened(page), page.view

    def find() -> StoredMatrix:
        if _of(page, opened) == "other":
            if view["tensor"] is None:
                raise CheckpointError("matrix.none", name=opened.checkpoint.name)
            return matrix.find_matrix(opened.checkpoint, opened.view, view["tensor"], view["stack"])
        return matrix.find_expert(opened.checkpoint, opened.view, view["layer"], view["expert"], view["projection"])

    return caches.kept("blocks.found", _key(page), find)


def pick_part(page: Lesson, found: StoredMatrix) -> Part:
    """Which part of a matrix that is too large for an answer at once."""
    view = page.view
    if matrix.choose_part(found, "whole").size > matrix.MOST:
        pick_one(page, "take", HOWS, label="tensor.take", texts="tensor.how")
        if view["take"] == "window":
            _bound_window(page, found)
            n, k = found.shape
            left, right = st.columns(2)
            left.number_input(page.t("tensor.row"), 0, n - 1, step=BLOCK, **view.widget("row"))
            right.number_input(page.t("tensor.column"), 0, k - 1, step=MX_BLOCK, **view.widget("column"))
    return part_of(page, found)


def part_of(page: Lesson, found: StoredMatrix) -> Part:
    """The part that the settings ask for."""
    view = page.view
    return matrix.choose_part(found, view["take"], view["row"], view["column"])


@st.cache_resource(max_entries=32, show_spinner=False)
def _compared(key: tuple[object, ...], part: Part, _found: StoredMatrix) -> tuple[grouping.GroupedError, ...]:
    return matrix.compare_part(_found, part)


def compared(page: Lesson, found: StoredMatrix, part: Part) -> tuple[grouping.GroupedError, ...] | None:
    """The part's error under every grouping; None where it is long work that nobody has asked for yet."""
    if part.size <= matrix.MOST:
        return _compared(_key(page), part, found)
    kept: tuple[object, tuple[grouping.GroupedError, ...]] | None = st.session_state.get(_WHOLE)
    return kept[1] if kept is not None and kept[0] == (_key(page), part) else None


def _measure_whole(page: Lesson, found: StoredMatrix, part: Part) -> tuple[grouping.GroupedError, ...] | None:
    """Behind a button, with a bar; whatever the reader does meanwhile ends it."""
    place, wanted = st.empty(), (_key(page), part)
    if st.session_state.pop(_ASKED, None) != wanted:
        label = page.t("tensor.measure", values=f"{part.size:,}")
        place.button(label, key="blocks.measure", on_click=_ask, args=(wanted,))
        return None
    bar = place.progress(0.0, page.t("tensor.busy"))
    with errors.passing(bar):
        errors_of = matrix.compare_part(
            found, part, lambda done, all_: bar.progress(done / all_, page.t("tensor.busy"))
        )
    place.empty()
    st.session_state[_WHOLE] = wanted, errors_of
    return errors_of


def _ask(wanted: object) -> None:
    st.session_state[_ASKED] = wanted


def show(page: Lesson, stage: st.delta_generator.DeltaGenerator) -> None:
    """The part and the finding beside, and the figure on the stage; an error in their place."""
    try:
        found = found_of(page)
        part = pick_part(page, found)
        errors_of = compared(page, found, part) or _measure_whole(page, found, part)
    except NvError as error:
        errors.show(error)
        return
    name = found.name if found.index is None else f"{found.name}[{found.index}]"
    n, k = found.shape
    page.finding("tensor.is", name=name, stored=found.stored, n=str(n), k=str(k))
    if errors_of is None:
        with stage:
            page.prose("tensor.unmeasured", values=f"{part.size:,}")
        return
    page.prose(f"tensor.seen.{_kind(part)}", **_places(part))
    if found.stored in ("NVFP4", "MXFP4"):
        page.prose(f"tensor.again.{found.stored.lower()}")
    with stage:
        page.figure(
            figures.tensor_figure(errors_of, theme=theme(), lang=lang()),
            alt=page.t("tensor.alt"),
            finding=figures.describe_tensor(errors_of, lang()),
            rows=lambda: figures.tensor_rows(errors_of),
        )


def _kind(part: Part) -> str:
    if part.is_whole:
        return "whole"
    return "piece" if len(part.bands) == 1 else "spread"


def _places(part: Part) -> dict[str, object]:
    """Rows and columns as a reader counts them, from 0 and the last one included."""
    return {
        "rows": part.rows,
        "columns": part.columns,
        "bands": len(part.bands),
        "block": BLOCK,
        "first": str(part.bands[0][0]),
        "last": str(part.bands[-1][1] - 1),
        "left": str(part.left),
        "right": str(part.right - 1),
    }


def rows_of(page: Lesson) -> list[dict[str, object]]:
    """The comparison as rows to download, each with what was measured; none where the tensor cannot be compared."""
    try:
        found = found_of(page)
        part = part_of(page, found)
        errors_of = compared(page, found, part)
    except NvError:
        return []
    of = {"checkpoint": _opened(page).checkpoint.name, "tensor": found.name, "index": found.index}
    of |= {"stored": found.stored, "rows": _spans(part.bands), "columns": _spans([(part.left, part.right)])}
    return [of | row for row in figures.tensor_rows(errors_of or ())]


def _spans(ends: Sequence[tuple[int, int]]) -> str:
    """``0…15 64…79``: the last one included.  A dash would make a spreadsheet read a date."""
    return " ".join(f"{first}…{after - 1}" for first, after in ends)


def shown_code(page: Lesson) -> dict[str, Any]:
    """What `Lesson.foot` needs to show the code that repeats the comparison, and to run it on what is open.

    Nothing where other data are shown.  Of the reader's own files it names a folder, as the Explorer's code does.
    """
    view, own = page.view, explorer_open.remembered()
    if (view["part"], view["data"]) != ("error", "checkpoint"):
        return {}
    opened = _opened(page)
    name, index = _named(page, opened)
    code = {"tensor": Written(name), "index": index, **{name: view[name] for name in ("take", "row", "column")}}
    run = partial(_run, page, opened)
    if own is None or not opened.private:
        return {"snippet": "blocks_tensor", "code": code | {"checkpoint": view["checkpoint"]}, "run": run}
    return {"snippet": "blocks_given", "code": code | {"source": source_of(own)}, "run": run}


def _named(page: Lesson, opened: _Open) -> tuple[str, int]:
    """The tensor and the place in it; where there is none, the name that it would have."""
    view = page.view
    try:
        found = found_of(page)
        return found.name, found.index or 0
    except NvError:
        if _of(page, opened) == "other":
            return view["tensor"] or "TENSOR", view["stack"]
        if view["layer"] not in opened.view.blocks:
            return "TENSOR", 0
        return opened.view.slot(view["layer"], view["expert"], view["projection"], "weight").name, 0


def _run(page: Lesson, opened: _Open, text: str) -> str:
    """Once for a matrix; what takes long is not done a second time, and not before it is asked for."""
    given: dict[str, Any] = {"opened": opened.checkpoint, "view": opened.view}
    try:
        found = found_of(page)
        part = part_of(page, found)
        if part.size > matrix.MOST:
            given["errors"] = compared(page, found, part)
            if given["errors"] is None:
                return page.t("tensor.not_yet", values=f"{part.size:,}")
        return caches.kept("blocks.kept.code", (text, opened.identity), lambda: snippets.run(text, given))
    except NvError as error:
        return error.text(lang())["what"]
