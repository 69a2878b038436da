"""Waiting for the kernels, in sight: on a machine's first start Numba compiles them, later starts load them at once."""

from __future__ import annotations

import streamlit as st

from nvfp4viz.ui.i18n import t
from nvfp4viz.warm import warm_in_background

UNSEEN = 0.3
"""Seconds of waiting that need no explanation."""
STEP = 0.25


def wait_for_kernels() -> None:
    """Return when every kernel is loaded; until then say what is being done, and how far it is.

    Without this, the first computation of a page would stand still for the compiler, and count its time as its own.
    """
    # Its place is there in every run: where one stands only while somebody waits, all that follows moves up in the next
    # run, and the browser builds it anew, a component with the reader's focus in it included.
    bar = st.empty()
    warming = warm_in_background()
    warming.join(UNSEEN)
    if not warming.is_alive():
        return
    while warming.is_alive():
        text = t("ui.busy.kernels", done=warming.done, total=warming.total)
        bar.progress(warming.done / warming.total, text=text)
        warming.join(STEP)
    bar.empty()
