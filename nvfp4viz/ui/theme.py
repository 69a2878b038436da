"""Light or dark, for figures; components follow the page by themselves."""

from __future__ import annotations

import streamlit as st

from nvfp4viz.figures.palette import Theme


def theme() -> Theme:
    """The appearance this reader has chosen; light where the browser has not said yet."""
    return "dark" if st.context.theme.type == "dark" else "light"
