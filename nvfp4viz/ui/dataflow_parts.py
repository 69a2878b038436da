"""The parts of the dataflow page: settings, the two runs, the question, the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.figures import dataflow as facts
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.model.tokenizer import Tokenizer
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.twins import TWINS
from nvfp4viz.ui import caches, predict, state, story_runs
from nvfp4viz.ui.i18n import lang, t

if TYPE_CHECKING:
    from nvfp4viz.serving.twins import LayerTwins, Twin
    from nvfp4viz.ui.lesson import Lesson

PAGE = "dataflow"
PROMPTS = (*DEMO_PROMPTS, "own")
LAYERS = story_runs.LAYERS
MOST = 16
"""Tokens in the picture."""
TOP_K = 4
MOST_SEED = 99
ASKED = ("route", "permute", "quantize_1", "gemm_1", "quantize_2", "sum")
VERSION = f"vLLM {VLLM}"


def twins_of(prompt: str, layer: int, fate: str, seed: int, twin: Twin) -> LayerTwins:
    """The two runs, computed once for all readers.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    broken = story_runs.holed(fate, seed)
    files = tuple(caches.stamp(caches.sample_path(build.sample)) for build in (story_runs.FULL, broken))
    return _twins(prompt, layer, broken, twin, files)


@st.cache_resource(max_entries=64, show_spinner=False)
def _twins(prompt: str, layer: int, broken: caches.Build, twin: Twin, files: tuple[caches.Stamp, ...]) -> LayerTwins:
    from nvfp4viz.serving.twins import trace_twins

    healthy, faulty = caches.served(story_runs.FULL), caches.served(broken)
    return trace_twins(healthy, faulty, prompt, layer, twin=twin, most=MOST)


def asked() -> LayerTwins:
    """The runs that the question is about."""
    return twins_of(DEMO_PROMPTS["arithmetic"], 0, "zeros", 0, "filled")


def ask(page: Lesson) -> bool:
    """At which step the twins first differ, before the faulty one is shown."""
    twins = asked()
    found = twins.comparison
    first, nan = found.first_difference, found.first_nan
    assert first is not None
    assert nan is not None
    count = facts.counts(twins)[first - 1]
    return predict.ask(
        f"{PAGE}.predict.first",
        ASKED,
        answer=STEPS[first - 1],
        prompt=twins.prompt,
        layer=twins.layer,
        step=first,
        rows=count["differs"],
        routes=count["all"],
        nan=nan,
        nan_name=page.t(f"steps.{STEPS[nan - 1]}.name"),
    )


def prompt_of(page: Lesson) -> str | None:
    """The prompt's text, or None while the reader has written none.

    Raises
    ------
    ModelError
        As `story_runs.checked`.
    """
    if page.view["prompt"] != "own":
        return DEMO_PROMPTS[page.view["prompt"]]
    written = (page.view["ask"] or "").strip()
    return story_runs.checked(page.view["ask"]) if written else None


def told(page: Lesson, prompt: str) -> dict[str, object]:
    """What both runs are about, for the rows to download."""
    view = page.view
    return {
        "prompt": prompt,
        "layer": view["layer"],
        "slots_read_as": view["fate"],
        "seed": view["seed"],
        "twin": view["twin"],
    }


def controls(page: Lesson) -> None:
    """What is run: prompt and layer, what the slots read as, and what the faulty file is compared with."""
    view = page.view
    st.selectbox(
        page.t("side.prompt"), PROMPTS, format_func=lambda name: t(f"fault_lab.prompts.{name}"), **view.widget("prompt")
    )
    if view["prompt"] == "own":
        st.text_input(
            page.t("side.own"),
            placeholder=page.t("side.own_placeholder"),
            max_chars=state.MOST_TEXT,
            **view.widget("ask"),
        )
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        st.number_input(page.t("side.layer"), 0, LAYERS - 1, step=1, width=110, **view.widget("layer"))
        st.selectbox(
            page.t("side.fate"),
            ALLOCATORS,
            format_func=lambda fate: t(f"empty_answer.fates.{fate}"),
            width=190,
            **view.widget("fate"),
        )
        if view["fate"] == "random":
            st.number_input(page.t("side.seed"), 0, MOST_SEED, step=1, width=110, **view.widget("seed"))
    st.radio(page.t("side.twin"), TWINS, format_func=lambda twin: page.t(f"twin.{twin}"), **view.widget("twin"))


def findings(page: Lesson, twins: LayerTwins) -> None:
    """Where the twins part, in computed sentences."""
    with st.container(key="finding_dataflow"):
        st.markdown(facts.describe_twins(twins, lang()))
    hit = np.isin(twins.healthy.dispatch.ids, twins.missing).ravel()
    if twins.twin == "calibrated" and twins.comparison.differs[2][~hit].any():
        page.prose("seen.calibrated")


def notes(page: Lesson, twins: LayerTwins) -> None:
    """What the picture leaves out, and where its input comes from."""
    if twins.layer:
        st.caption(page.t("seen.later", layer=twins.layer))
    read, all_of_it = len(twins.token_ids), len(Tokenizer().encode(twins.prompt))
    if all_of_it > read:
        st.caption(page.t("side.cut", n=read, all=all_of_it))


def tables(page: Lesson, twins: LayerTwins) -> None:
    """Routes and experts as tables, for readers without the picture."""
    box = page.expander("details.tables")
    if box.open:
        with box:
            for name, rows in (("routes", facts.route_rows), ("experts", facts.expert_rows)):
                st.markdown(page.t(f"details.{name}"))
                st.dataframe(rows(twins), hide_index=True, alt=page.t(f"details.alt_{name}"))
