"""Weights packed at load: three ways, and ranks; parts of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import streamlit as st

from nvfp4viz.figures import online as figures
from nvfp4viz.formats import BLOCK
from nvfp4viz.quant import online
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches, predict
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import bits, exact, four, hex_byte, hex_f32, percent
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

PAGE = "online_quantisation"
PARTS = ("ways", "memory", "ranks", "token")
WEIGHTS = ("gate_up_proj", "down_proj")
RANKS = ("2", "4")
SAMPLE = "tiny-moe-bf16"


@st.cache_resource(max_entries=8, show_spinner=False)
def weights_of(layer: int, weight: str) -> npt.NDArray[Any]:
    """All experts' BF16 weights of a layer of tiny-moe: (64, N, K)."""
    return np.asarray(caches.checkpoint(SAMPLE).read(f"model.layers.{layer}.experts.{weight}"))


@st.cache_resource(max_entries=8, show_spinner=False)
def ways_of(layer: int, weight: str) -> tuple[online.WayResult, ...]:
    """The three ways on a layer's weights."""
    return online.compare_ways(weights_of(layer, weight))


@st.cache_resource(max_entries=32, show_spinner=False)
def ranks_of(layer: int, weight: str, ranks: int) -> tuple[online.RankResult, online.RankResult]:
    """Shared and local maxima on a layer's weights."""
    return online.compare_ranks(weights_of(layer, weight), ranks, weight.removesuffix("_proj"))


def shown_ways(page: Lesson) -> tuple[online.WayResult, ...]:
    """The ways on the page's settings."""
    return ways_of(page.view["layer"], page.view["w"])


def _pick_weight(page: Lesson) -> None:
    st.number_input(page.t("pick.layer"), 0, 3, **page.view.widget("layer"))
    st.segmented_control(page.t("pick.weight"), WEIGHTS, required=True, **page.view.widget("w"))


# ------------------------------------------------------------------ three ways


def ways_part(page: Lesson) -> None:
    """Which bytes differ, and one element followed to the step that changed it."""
    shown = _which_step(page)
    stage, side = page.stage()
    with side:
        _pick_weight(page)
        ways = shown_ways(page)
        direct, _, cast = ways
        page.finding(
            "ways.seen",
            share=percent(round(cast.codes_differ / cast.codes, 6)),
            db=f"{direct.summary.sqnr_db - cast.summary.sqnr_db:.4f}",
        )
        page.glossary("online_quantisation", "global_scale", "sqnr")
    rows = figures.way_shares(ways, lang())
    with stage:
        page.figure(
            figures.changed_figure(rows if shown else [rows[0], rows[2]], theme=theme(), lang=lang()),
            alt=page.t("ways.alt"),
            finding=figures.describe_ways(ways, lang()) if shown else page.t("ways.before"),
            rows=(lambda: figures.way_rows(ways)) if shown else None,
        )
    if not shown:
        return
    page.table(
        ("way", ">codes", ">scales", ">db", ">mse"),
        [
            (
                page.t(f"way.{one.way}"),
                f"{one.codes_differ:,} / {one.codes:,}",
                f"{one.scales_differ:,} / {one.blocks:,}",
                f"{one.summary.sqnr_db:.4f}",
                four(one.summary.mse),
            )
            for one in ways
        ],
    )
    _follow(page, ways)
    page.prose("ways.text", vllm=VLLM)


def _follow(page: Lesson, ways: tuple[online.WayResult, ...]) -> None:
    """One element whose code the cast changed."""
    view = page.view
    page.heading("follow.heading")
    lost = online.first_lost(weights_of(view["layer"], view["w"]), ways, view["n"])
    if lost is None:
        page.prose("follow.none")
        return
    st.number_input(page.t("follow.which"), 0, 999, **view.widget("n"))
    at = lost.column % BLOCK
    inputs = (lost.weight, lost.folded, lost.cast)
    page.finding(
        "follow.seen",
        expert=lost.expert,
        row=lost.row,
        column=lost.column,
        weight=exact(lost.weight),
        encode=exact(lost.encode),
    )
    page.table(
        ("way", ">enters", ">enters_bits", ">byte", ">scaled", ">code", ">value"),
        [
            (
                page.t(f"way.{way}"),
                exact(value),
                f"`{hex_f32(value)}`",
                f"`{hex_byte(trace.scale_byte)}`",
                exact(trace.products[at]),
                f"`{bits(int(trace.codes[at]), 4)}`",
                exact(trace.element_values[at]),
            )
            for way, value, trace in zip(online.WAYS, inputs, lost.traces, strict=True)
        ],
    )


def _which_step(page: Lesson) -> bool:
    """Asked: which step loses the bits?"""
    direct, folded, cast = ways_of(0, WEIGHTS[0])
    by_cast, by_fold = cast.codes_differ, folded.codes_differ
    answer = "cast" if by_cast > 4 * by_fold else "fold" if by_fold > by_cast / 2 else "both"
    return predict.ask(
        f"{PAGE}.predict.step",
        ("fold", "cast", "unit", "both"),
        answer=answer,
        codes=f"{direct.codes:,}",
        changed=f"{by_cast:,}",
        fold=f"{by_fold:,}",
        times=four(round(by_cast / by_fold, 1)),
    )


# ------------------------------------------------------------------ tensor-parallel ranks


def shown_ranks(page: Lesson) -> tuple[online.RankResult, online.RankResult]:
    """Shared and local maxima on the page's settings."""
    return ranks_of(page.view["layer"], page.view["w"], int(page.view["tp"]))


def ranks_part(page: Lesson) -> None:
    """The maximum shared by the ranks of a tensor-parallel group, or each rank's own."""
    if not _does_it_show(page):
        return
    stage, side = page.stage()
    with side:
        _pick_weight(page)
        st.segmented_control(page.t("ranks.tp"), RANKS, required=True, **page.view.widget("tp"))
        results = shown_ranks(page)
        local = results[1].scales_2
        page.finding(
            "ranks.seen",
            experts=int((local != local[0]).any(axis=0).sum()),
            all=local.shape[1],
            factor=four(float((local.max(axis=0) / local.min(axis=0)).max())),
        )
        page.glossary("tensor_parallel", "amax")
    with stage:
        page.figure(
            figures.changed_figure(figures.rank_shares(results, lang()), theme=theme(), lang=lang(), height=240),
            alt=page.t("ranks.alt"),
            finding=figures.describe_ranks(results, lang()),
            rows=lambda: figures.rank_rows(results),
        )
    page.table(
        ("maximum", ">codes", ">scales", ">db"),
        [
            (
                page.t("ranks.shared" if one.shared else "ranks.local"),
                f"{one.codes_differ:,} / {one.codes:,}",
                f"{one.scales_differ:,} / {one.blocks:,}",
                f"{one.summary.sqnr_db:.4f}",
            )
            for one in results
        ],
    )
    moved = results[1].summary.sqnr_db - results[0].summary.sqnr_db
    page.prose("ranks.text", vllm=VLLM, db=f"{moved:+.4f}".replace("-", "−"))


def _does_it_show(page: Lesson) -> bool:
    """Asked: with the shared maximum, do the bytes depend on the number of ranks?"""
    found = [ranks_of(0, weight, int(ranks)) for weight in WEIGHTS for ranks in RANKS]
    shared = sum(one.codes_differ + one.scales_differ for one, _ in found)
    local = sum(two.codes_differ + two.scales_differ for _, two in found)
    answer = "never" if not local else "local" if not shared else "always"
    return predict.ask(
        f"{PAGE}.predict.ranks",
        ("never", "local", "always"),
        answer=answer,
        share=percent(round(found[0][1].codes_differ / found[0][1].codes, 4)),
        ranks=RANKS[0],
    )
