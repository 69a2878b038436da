"""The mark of a link that was copied while a checkpoint of the reader's own was open: files, a folder, an address.

No link carries such a checkpoint: what a folder is called is the reader's own, and an address may hold a signature.
But a link without a word would open a sample in its place, with other numbers in the same slot.  So a page that shows
one has a setting for this mark; whoever opens the link is told, and the link's slot waits for that checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.ui import state
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.samples import sample_title

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

OWN, GONE = "own", "gone"
"""It was open when the link was made; it was, and the slot in the address is the sample's by now."""
SLOT = ("layer", "expert", "projection")
_WAITING = "ui.own.slot"


def setting() -> state.Param:
    """What a page declares, under a name of its choice."""
    return state.choice((OWN, GONE))


def settle(page: Lesson, name: str, *, own: bool, places: Sequence[str] = ()) -> None:
    """Bring the mark ``name`` up to what is open; before anything looks at the settings ``places``.

    Parameters
    ----------
    own
        A checkpoint of the reader's own is open, and shown.
    places
        Settings that say where in it one looks: a link's are of no use to another checkpoint.
    """
    view, ours = page.view, _ours(page, name)
    if own:
        st.session_state[ours] = True
        if view[name] != OWN:
            view.put(**{name: OWN})
        waiting: dict[str, object] = st.session_state.pop(_WAITING, {}) if places else {}
        if waiting:
            view.put(**waiting)
            view.asked |= set(waiting)  # by the link, if some runs ago
    elif st.session_state.pop(ours, False):
        view.put(**{name: None})
    elif view[name] == OWN:
        slot = {place: view[place] for place in SLOT if place in places and place in view.asked}
        if slot:
            st.session_state[_WAITING] = slot
        view.put(**{name: GONE})
        if places:
            view.defaults(*places)
        # Now: the next run would take what the address still says for a new link.
        view.write_link()


def drop(page: Lesson, name: str) -> None:
    """The reader has chosen what is shown: a callback."""
    st.session_state.pop(_WAITING, None)
    page.view.put(**{name: None})


def tell(page: Lesson, name: str, sample: str) -> None:
    """Where a sample stands in place of what the link's maker saw, say so."""
    if page.view[name] == GONE:
        with st.container(key=f"finding_{page.id}_{name}"):
            waits = t("ui.own.slot_waits") if _WAITING in st.session_state else ""
            st.markdown(t("ui.own.told", sample=sample_title(sample), waits=waits))


def left_out(page: Lesson, *names: str) -> str:
    """A sentence about what is open and no link carries; empty where nothing is."""
    own = any(page.view[name] == OWN and st.session_state.get(_ours(page, name)) for name in names)
    return t("ui.copy.no_source") if own else ""


def _ours(page: Lesson, name: str) -> str:
    return f"{page.id}.kept.{name}"
