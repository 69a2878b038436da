"""What surrounds every page: navigation, language, and the guard against a cold deep link."""

from __future__ import annotations

import json
from pathlib import Path

import streamlit as st

from nvfp4viz.figures.palette import css_variables
from nvfp4viz.ui import i18n, registry
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.text import table
from nvfp4viz.warm import warm_in_background

_STYLE = Path(__file__).parent / "shell.css"
_WORDS = Path(__file__).parent / "streamlit_words.js"
# A file of ours: Streamlit fetches emoji and Material page icons from the network.
ICON = str(Path(__file__).parent / "icon.svg")


def open_shell() -> st.Page:
    """Navigation, style and the language switch; returns the page to run."""
    warm_in_background()
    i18n.settle_language()
    page = st.navigation(registry.streamlit_pages(), expanded=True)
    st.session_state["_shell"] = True
    st.html(f"<style>{css_variables(':root')}{_STYLE.read_text(encoding='utf-8')}</style>")
    st.html(_streamlit_words(), unsafe_allow_javascript=True)
    st.logo(ICON, size="large")
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="topbar"):
        st.markdown(t(f"ui.group.{registry.entry_at(page.url_path).group}"), width="content")
        i18n.language_switch()
    return page


def _streamlit_words() -> str:
    """A script that says in the reader's language what Streamlit says in English inside widgets of ours."""
    script = _WORDS.read_text(encoding="utf-8")
    words = json.dumps(table(i18n.lang(), "ui.streamlit"), ensure_ascii=False).replace("<", "\\u003c")
    return f"<script>{{ const WORDS = {words};\n{script} }}</script>"


def ensure_shell() -> None:
    """First line of every page.

    Until one session of a server has run ``st.navigation``, Streamlit answers a deep link by running the page's file
    alone, without ``app.py``.  Declaring the navigation here and running again brings the shell in; the link is kept.
    """
    # Set by app.py in this very run and taken here, so that a page never relies on an earlier run of the session.
    if not st.session_state.pop("_shell", False):
        i18n.settle_language()
        st.navigation(registry.streamlit_pages(), expanded=True)
        st.rerun()
