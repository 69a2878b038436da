"""The frame of the story page: its settings, the five steps, workshop mode, and the foot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.serving import ALLOCATORS
from nvfp4viz.ui import state, story_chain, story_runs
from nvfp4viz.ui.story_cards import style

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

BEATS = ("answers", "served", "map", "chain", "remedies")
ROLES = ("w13", "w2")

PARAMS: dict[str, state.Param] = {
    "beat": state.integer(1, len(BEATS), default=1),
    "layer": state.integer(0, story_runs.LAYERS - 1),
    "expert": state.integer(0, story_runs.EXPERTS - 1),
    "prompt": state.choice(story_runs.PROMPT_IDS, default="arithmetic"),
    "fate": state.choice(ALLOCATORS, default="zeros"),
    "role": state.choice(ROLES, default="w13"),
    "link": state.choice(story_chain.LINKS, default=""),
    "seed": state.integer(0, 999, default=0),
    "ask": state.Param("", lambda text: text[: story_runs.MOST_CHARACTERS + 1], "a-z 0-9 …"),
}


def workshop() -> bool:
    """Whether a link asked for workshop mode; kept while the reader moves between pages."""
    return st.session_state.get("mode") == "workshop"


# A step that is taken far down the page would otherwise begin there, with only the greyed end of the last one in view.
_TO_THE_TOP = """<script>{{
const main = document.querySelector("[data-testid=stMain]"), row = document.querySelector(".st-key-story_steps");
if (main.dataset.step && main.dataset.step !== "{step}") row?.scrollIntoView();
main.dataset.step = "{step}";
}}</script>"""


def steps(page: Lesson) -> int:
    """The row of steps; returns the current one, counted from 0.  Digits choose."""
    st.html(style())
    now = page.view["beat"]
    st.html(_TO_THE_TOP.format(step=now), unsafe_allow_javascript=True)
    with st.container(horizontal=True, gap="small", key="story_steps"):
        for number, name in enumerate(BEATS, 1):
            st.button(
                page.t(f"beats.{name}.name"),
                key=f"story.step.{number}",
                type="primary" if number == now else "secondary",
                shortcut=str(number),
                on_click=page.view.put,
                kwargs={"beat": number},
            )
    return now - 1


def turn(page: Lesson) -> None:
    """Back and next, with the keys B and N; in workshop mode the facilitator's notes above them."""
    now = page.view["beat"]
    if workshop():
        with st.expander(page.t("workshop.notes"), icon=":material/record_voice_over:"):
            st.markdown(page.t(f"workshop.{BEATS[now - 1]}.text"))
    with st.container(horizontal=True, gap="small", key="story_turn"):
        for label, step, key in (("back", -1, "B"), ("next", 1, "N")):
            to = now + step
            if not 1 <= to <= len(BEATS):
                continue
            st.button(
                page.t(f"steps.{label}", name=page.t(f"beats.{BEATS[to - 1]}.name")),
                key=f"story.turn.{label}",
                type="primary" if step > 0 else "secondary",
                shortcut=key,
                on_click=page.view.put,
                kwargs={"beat": to},
            )


def tell(page: Lesson, beats: tuple[Callable[[Lesson], None], ...]) -> None:
    """Draw the current step between the two rows of buttons."""
    beats[steps(page)](page)
    turn(page)
