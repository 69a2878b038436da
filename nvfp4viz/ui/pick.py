"""Widgets that several pages choose with: one of a few, and a layer and an expert under the shared cursor's names."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator as Place

from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.lesson import Lesson

LAYERS, EXPERTS = 4, 64
"""Of tiny-moe."""


def pick_one(
    page: Lesson, name: str, options: Sequence[object], *, label: str, texts: str, wrap: bool | None = None
) -> None:
    """Segments for ``page``'s setting ``name``: its label is the text ``label``, an option's ``<texts>.<option>``."""
    st.segmented_control(
        page.t(label),
        options,
        format_func=lambda option: page.t(f"{texts}.{option}"),
        required=True,
        wrap=wrap,
        **page.view.widget(name),
    )


def pick_layer(page: Lesson, place: Place, layers: tuple[int, ...] = tuple(range(LAYERS))) -> None:
    """A number input for ``page``'s setting ``layer``."""
    place.number_input(t("ui.pick.layer"), layers[0], layers[-1], **page.view.widget("layer"))


def pick_expert(
    page: Lesson,
    layers: tuple[int, ...] = tuple(range(LAYERS)),
    experts: int = EXPERTS,
    places: Sequence[Place] | None = None,
) -> None:
    """Number inputs for ``page``'s settings ``layer`` and ``expert``, side by side; or in two ``places`` of a row."""
    left, right = places or st.columns(2)
    pick_layer(page, left, layers)
    right.number_input(t("ui.pick.expert"), 0, experts - 1, **page.view.widget("expert"))
