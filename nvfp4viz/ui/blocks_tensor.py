"""Blocks along K, rows and tiles on a tensor of a checkpoint: the cursor's sample, or what the Explorer has open."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.errors import NvError
from nvfp4viz.figures import blocks as figures
from nvfp4viz.quant import grouping
from nvfp4viz.serving.matrix import Matrix, matrix_names, read_expert, read_matrix
from nvfp4viz.ui import caches, errors, explorer_open, state
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.pick import pick_expert
from nvfp4viz.ui.samples import SAMPLE_IDS, sample_title
from nvfp4viz.ui.theme import theme

OF = ("expert", "other")
"""An expert's weight, or any other matrix of the file."""
PROJECTIONS = ("gate", "up", "down", "gate_up")
_SOURCE = "blocks.source"

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

    return canonical(_checkpoint), matrix_names(_checkpoint)


def _opened(page: Lesson) -> _Open:
    own = explorer_open.remembered()
    if own is not None and st.session_state.get(_SOURCE, "explorer") == "explorer":
        return _Open(own.identity, own.audit.checkpoint, *_facts(own.identity, own.audit.checkpoint), private=True)
    sample = page.view["checkpoint"]
    path = caches.sample_path(sample)
    identity = repr((str(path), caches.stamp(path)))
    checkpoint = caches.checkpoint(sample)
    return _Open(identity, checkpoint, *_facts(identity, checkpoint), private=False)


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
    names = opened.names
    if names:
        page.refine(tensor=state.Param(names[0], state.choice(names).parse, f"{names[0]} …"))
        if page.view["tensor"] is None:
            page.view.put(tensor=names[0])


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
        st.selectbox(
            page.t("tensor.checkpoint"), SAMPLE_IDS, format_func=sample_title, **page.view.widget("checkpoint")
        )
    st.segmented_control(
        page.t("tensor.of"),
        OF,
        required=True,
        format_func=lambda name: page.t(f"tensor.{name}"),
        **page.view.widget("of"),
    )
    if page.view["of"] == "other":
        st.selectbox(page.t("tensor.name"), opened.names, **page.view.widget("tensor"))
        return
    pick_expert(page, opened.view.moe_layers or (0,), max(opened.view.experts, 1))
    st.segmented_control(
        page.t("tensor.projection"),
        opened.view.projections or PROJECTIONS,
        required=True,
        **page.view.widget("projection"),
    )


def matrix_of(page: Lesson) -> Matrix:
    """The piece of the chosen matrix.

    Raises
    ------
    CheckpointError
        Those of :mod:`nvfp4viz.serving.matrix`.
    """
    opened, view = _opened(page), page.view
    return _matrix(
        opened.identity, view["of"], view["tensor"], view["layer"], view["expert"], view["projection"], opened
    )


@st.cache_resource(max_entries=16, show_spinner=False)
def _matrix(
    identity: str, of: str, name: str | None, layer: int, expert: int, projection: str, _opened: _Open
) -> Matrix:
    if of == "other":
        return read_matrix(_opened.checkpoint, name or "")
    return read_expert(_opened.checkpoint, _opened.view, layer, expert, projection)


@st.cache_resource(max_entries=32, show_spinner=False)
def _compared(
    identity: str, of: str, name: str | None, layer: int, expert: int, projection: str, _found: Matrix
) -> tuple[grouping.GroupedError, ...]:
    return grouping.compare_tensor(_found.values)


def compared(page: Lesson, found: Matrix) -> tuple[grouping.GroupedError, ...]:
    """The error of the chosen matrix under every grouping."""
    view = page.view
    keys = (view["of"], view["tensor"], view["layer"], view["expert"], view["projection"])
    return _compared(_opened(page).identity, *keys, found)


def show(page: Lesson, stage: st.delta_generator.DeltaGenerator) -> None:
    """The finding beside, and the figure on the stage; an error in their place."""
    try:
        found = matrix_of(page)
        errors_of = compared(page, found)
    except NvError as error:
        errors.show(error)
        return
    n, k = found.shape
    rows, columns = found.values.shape
    page.finding(
        "tensor.seen.whole" if found.is_whole else "tensor.seen.piece",
        name=found.name,
        stored=found.stored,
        n=str(n),
        k=str(k),
        rows=rows,
        columns=columns,
    )
    if found.stored in ("NVFP4", "MXFP4"):
        page.prose(f"tensor.again.{found.stored.lower()}")
    with stage:
        page.figure(
            figures.tensor_figure(errors_of, theme=theme(), lang=lang()),
            alt=page.t("tensor.alt"),
            finding=figures.describe_tensor(errors_of, lang()),
            rows=lambda: figures.tensor_rows(errors_of),
        )


def rows_of(page: Lesson) -> list[dict[str, object]]:
    """The comparison as rows to download; none where the tensor cannot be compared."""
    try:
        return figures.tensor_rows(compared(page, matrix_of(page)))
    except NvError:
        return []


def snippet_of(page: Lesson) -> dict[str, object] | None:
    """Values of the snippet that repeats the comparison; None for a file that only this session has."""
    view = page.view
    if view["part"] != "error" or view["data"] != "checkpoint" or _opened(page).private:
        return None
    names = ("checkpoint", "of", "tensor", "layer", "expert", "projection")
    return {name: view[name] for name in names}
