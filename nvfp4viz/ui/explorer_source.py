"""Where the Explorer's checkpoints come from: one chooser for the checkpoint that is open and for the second one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.ui import explorer_address, explorer_open, explorer_roots, own_mark
from nvfp4viz.ui.samples import SAMPLE_IDS, sample_title

if TYPE_CHECKING:
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

FIRST, SECOND = "explorer", "explorer.other"
# The setting that holds each one's sample.
SAMPLE = {FIRST: "checkpoint", SECOND: "other"}
# And the one that marks a link which cannot carry what is open.
MARK = {FIRST: "origin", SECOND: "other_origin"}


def choose(page: Lesson, place: str = FIRST) -> Opened | None:
    """The kind of place, then what lies there; None while nothing is chosen.

    Parameters
    ----------
    place
        `FIRST` or `SECOND`: the beginning of the widgets' keys.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    offered = {"address": explorer_address.allowed(), "server": bool(explorer_roots.roots())}
    kinds = [kind for kind in explorer_open.KINDS if offered.get(kind, True)]
    # Not the widget's default: set here, the choice also moves in the browser when the page starts over.
    st.session_state.setdefault(f"{place}.source", "sample")
    kind = st.segmented_control(
        page.t("source.from"),
        kinds,
        required=True,
        format_func=lambda name: page.t(f"source.{name}"),
        label_visibility="collapsed",
        key=f"{place}.source",
        persist_state="session",  # a widget of a tab that is closed would forget what was chosen
    )
    draw = {"upload": _upload, "address": explorer_address.address_source, "server": explorer_roots.roots_source}
    opened = None
    try:
        opened = draw[kind](page, place) if kind in draw else None
    finally:
        slot = own_mark.SLOT if place == FIRST else ()
        own_mark.settle(page, MARK[place], own=opened is not None, places=slot)
    return opened if kind in draw else _sample(page, place)


def _sample(page: Lesson, place: str) -> Opened:
    def choose_it() -> None:
        own_mark.drop(page, MARK[place])

    # Together, so that the line below takes no room where it is not shown.
    with st.container(gap=None):
        st.selectbox(
            page.t("source.label"),
            SAMPLE_IDS,
            format_func=sample_title,
            width=680,
            on_change=choose_it,
            **page.view.widget(SAMPLE[place]),
        )
        sample = page.view[SAMPLE[place]]
        with st.container(key=f"{place.replace('.', '_')}_chosen"):
            st.caption(sample_title(sample))
        own_mark.tell(page, MARK[place], sample)
    return explorer_open.open_sample(sample)


def left_out_of_links(page: Lesson) -> str:
    """A sentence about checkpoints that are open and no link carries."""
    return own_mark.left_out(page, *MARK.values())


def _upload(page: Lesson, place: str) -> Opened | None:
    def forget() -> None:
        st.session_state.pop(explorer_open.kept_upload(place), None)

    # Streamlit empties the uploader when the reader looks at another page; what was read of its files stays.
    given = st.file_uploader(
        page.t("source.uploader"), accept_multiple_files=True, key=f"{place}.files", on_change=forget
    )
    st.caption(page.t("source.upload_note"))
    if given:
        return explorer_open.open_upload(given, place)
    _, opened = st.session_state.get(explorer_open.kept_upload(place), (None, None))
    if opened is None:
        page.prose("source.waiting")
        return None
    st.caption(page.t("source.still_open", count=opened.audit.report.container.files))
    return opened
