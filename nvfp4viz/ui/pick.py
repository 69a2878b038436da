"""Widgets that several pages choose with: a layer and an expert, under the shared cursor's names."""

from __future__ import annotations

import streamlit as st

from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.lesson import Lesson

LAYERS, EXPERTS = 4, 64
"""Of tiny-moe."""


def pick_expert(page: Lesson, layers: tuple[int, ...] = tuple(range(LAYERS)), experts: int = EXPERTS) -> None:
    """Number inputs for ``page``'s settings ``layer`` and ``expert``, side by side."""
    left, right = st.columns(2)
    left.number_input(t("ui.pick.layer"), layers[0], layers[-1], **page.view.widget("layer"))
    right.number_input(t("ui.pick.expert"), 0, experts - 1, **page.view.widget("expert"))
