"""The parts of the map's page: the picture, a way through the lessons, and what this app leaves out."""

from __future__ import annotations

import streamlit as st

from nvfp4viz.figures import places
from nvfp4viz.ui import registry
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.lesson_map import lesson_map

LEFT_OUT = ("attention", "mla", "kv", "mtp", "linear", "vision", "training")
"""What this app does not teach, each with texts ``map.left_out.<id>``."""


def picture(page: Lesson) -> None:
    """The way to number, then both lines of stations."""
    st.segmented_control(
        page.t("path.label"),
        tuple(places.PATHS),
        format_func=lambda name: page.t(f"path.{name}.name"),
        required=True,
        **page.view.widget("path"),
    )
    lesson_map(places.PATHS[page.view["path"]])
    layer = places.stations("layer")
    page.finding(
        "seen",
        steps=len(layer),
        four=sum(station.carries == "fp4" for station in layer),
        stretches=places.stretches("layer", "fp4"),
        read=sum(station.scale == "read" for station in layer),
        lessons=len(places.LESSONS),
    )


def way(page: Lesson) -> None:
    """The lessons of the chosen way, in order, each with what it teaches."""
    name = page.view["path"]
    page.heading("path.heading")
    page.prose(f"path.{name}.text")
    for number, lesson in enumerate(places.PATHS[name], 1):
        with st.container(gap=None, key=f"map_step_{number}"):
            registry.link(lesson, f"{number}. {t(f'{lesson}.title')}")
            st.caption(t(f"{lesson}.aim"))


def left_out(page: Lesson) -> None:
    """What stands beside the layer and is not taught here, and what it has to do with what is."""
    page.heading("left_out.heading")
    page.table(
        ("what", "relates"),
        [(page.t(f"left_out.{name}.what"), page.t(f"left_out.{name}.relates")) for name in LEFT_OUT],
    )
