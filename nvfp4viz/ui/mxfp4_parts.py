"""The parts of the page on MXFP4 and NVFP4; the page itself chooses one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import streamlit as st

from nvfp4viz.figures import blocks
from nvfp4viz.figures import mxfp4 as figures
from nvfp4viz.formats import BLOCK, E2M1, MX_BLOCK
from nvfp4viz.quant import schemes
from nvfp4viz.quant.recipes import MXFP4_RECIPES
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches, predict
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import bits, exact, four, hex_byte, percent
from nvfp4viz.ui.pick import pick_expert, pick_one
from nvfp4viz.ui.text import phrases
from nvfp4viz.ui.theme import theme

PAGE = "mxfp4"
PARTS = ("tensor", "rules", "storage", "models")
DATA = ("tiny_moe", "outliers")
WEIGHTS = ("gate_up_proj", "down_proj")
BLOCKS = ("sample", "tiny", "tiny_moe")
ROWS, RUNS = 128, 4
"""Rows of a tiny-moe matrix, and blocks of 32 in the longer of its rows."""
TOPS = tuple(4 + step / 8 for step in range(32))
ASKED = 6.5
"""The block maximum that the question about clipping is about."""
SAMPLE = "tiny-moe-bf16"
RULE = "vllm-even"


def runs_of(weight: str) -> int:
    """Blocks of 32 in a row of one of tiny-moe's weights: ``down_proj`` is half as wide."""
    return RUNS if weight == WEIGHTS[0] else RUNS // 2


# ------------------------------------------------------------------ one tensor in both


@st.cache_resource(max_entries=64, show_spinner=False)
def _weight(layer: int, expert: int, weight: str) -> npt.NDArray[Any]:
    opened = caches.checkpoint(SAMPLE)
    return np.asarray(opened.read(f"model.layers.{layer}.experts.{weight}")[expert])


@st.cache_resource(max_entries=64, show_spinner=False)
def real(layer: int, expert: int, weight: str, mx: str) -> dict[str, schemes.SchemeResult]:
    """A real expert's weight in all schemes."""
    return {one.name: one for one in schemes.compare_schemes(_weight(layer, expert, weight), mx)}


@st.cache_resource(max_entries=32, show_spinner=False)
def outliers(size: float, mx: str) -> dict[str, schemes.SchemeResult]:
    """Activations with outlier channels in all schemes."""
    return {one.name: one for one in schemes.compare_schemes(blocks.outlier_pair(size)[0], mx)}


def found_of(page: Lesson) -> dict[str, schemes.SchemeResult]:
    """The comparison that the page's settings ask for."""
    view = page.view
    if view["data"] == "outliers":
        return outliers(view["size"], view["mx"])
    return real(view["layer"], view["expert"], view["w"], view["mx"])


def tensor_told(page: Lesson) -> dict[str, object]:
    """Which tensor was compared, and how MXFP4 was rounded: what the rows to download are about."""
    view = page.view
    of = {"outlier_size": view["size"]} if view["data"] == "outliers" else _weight_told(page)
    return of | {"mxfp4_recipe": view["mx"]}


def _weight_told(page: Lesson) -> dict[str, object]:
    view = page.view
    return {"checkpoint": SAMPLE, "layer": view["layer"], "expert": view["expert"], "weight": view["w"]}


def _pick_expert(page: Lesson) -> None:
    pick_expert(page)
    st.segmented_control(page.t("pick.weight"), WEIGHTS, required=True, **page.view.widget("w"))


def tensor_part(page: Lesson) -> None:
    """The same tensor in both: which scales occur, how large the error is, and where the difference comes from."""
    view = page.view
    stage, side = page.stage()
    with side:
        pick_one(page, "data", DATA, label="pick.data", texts="data")
        if view["data"] == "outliers":
            st.select_slider(
                page.t("pick.size"), blocks.SIZES, format_func=lambda v: f"× {exact(v)}", **view.widget("size")
            )
        else:
            _pick_expert(page)
        st.selectbox(page.t("pick.mx"), MXFP4_RECIPES, **view.widget("mx"))
        found = found_of(page)
        mx, nv = found["mxfp4"], found["nvfp4"]
        page.finding(
            "tensor.seen",
            mx=f"{mx.summary.sqnr_db:.2f}",
            nv=f"{nv.summary.sqnr_db:.2f}",
            # Of the rounded numbers beside it, or a reader would find the subtraction wrong.
            more=f"{round(nv.summary.sqnr_db, 2) - round(mx.summary.sqnr_db, 2):.2f}",
            bits=exact(nv.bits - mx.bits),
        )
        page.glossary("sqnr", "global_scale", "outlier_channel")
    with stage:
        page.figure(
            figures.scales_figure(found, theme=theme(), lang=lang()),
            alt=page.t("tensor.alt"),
            finding=figures.describe_scales(found, lang()),
            rows=lambda: figures.scale_rows(found),
        )
    shown = _why(page)
    page.table(
        ("scheme", ">bits", ">db", ">largest", ">zeroed", ">clipped", ">bytes"),
        [_error_row(page, name, found[name]) for name in schemes.SCHEMES if shown or name != "ue8m0_16"],
    )
    page.prose("tensor.text", limit=exact(E2M1.max_value))
    page.heading("say.heading")
    page.table(
        ("format", ">values", ">smallest", ">largest_scale", ">doubling", "zero", ">nan"),
        [
            (
                facts.name,
                str(facts.values),
                _value(facts.smallest),
                _value(facts.largest),
                str(facts.per_doubling),
                page.t("say.yes" if facts.zero else "say.no"),
                hex_byte(facts.nan),
            )
            for facts in schemes.scale_facts()
        ],
    )
    page.prose("say.text")


def _value(scale: float) -> str:
    power = math.log2(scale)
    return figures.power_of_two(power) if power == int(power) else exact(scale)


def _error_row(page: Lesson, name: str, one: schemes.SchemeResult) -> tuple[str, ...]:
    return (
        page.t(f"scheme.{name}", block=one.block),
        exact(one.bits),
        f"{one.summary.sqnr_db:.2f}",
        four(one.summary.max_abs),
        f"{one.summary.zeroed:,}",
        f"{one.summary.clipped:,}",
        str(len(one.used())),
    )


def closed(found: Mapping[str, schemes.SchemeResult]) -> float:
    """Which share of the way from MXFP4's signal to error to NVFP4's a block of 16 alone brings."""
    mx, half, nv = (found[name].summary.sqnr_db for name in schemes.SCHEMES)
    return (half - mx) / (nv - mx)


def _why(page: Lesson) -> bool:
    """Asked: how much of the difference is the smaller block?"""
    asked = real(0, 0, WEIGHTS[0], RULE)
    mx, half, nv = (f"{asked[name].summary.sqnr_db:.2f}" for name in schemes.SCHEMES)
    share = closed(asked)
    return predict.ask(
        f"{PAGE}.predict.half",
        ("little", "most", "all"),
        answer="little" if share < 0.5 else "most" if share < 1 else "all",
        small=BLOCK,
        large=MX_BLOCK,
        bits=exact(asked["nvfp4"].bits),
        mx=mx,
        half=half,
        nv=nv,
        share=percent(round(share, 2)),
    )


# ------------------------------------------------------------------ the rules


def block_of(page: Lesson) -> npt.NDArray[Any]:
    """The 32 elements that the page's settings ask for."""
    view = page.view
    if view["on"] == "tiny_moe":
        row = _weight(view["layer"], view["expert"], view["w"])[view["row"]]
        first = MX_BLOCK * min(view["run"], len(row) // MX_BLOCK - 1)
        return np.asarray(row[first : first + MX_BLOCK])
    return figures.sample_block(view["top"], figures.TINY if view["on"] == "tiny" else 1.0)


def block_told(page: Lesson) -> dict[str, object]:
    """Which block the rules were tried on."""
    view = page.view
    if view["on"] == "tiny_moe":
        return _weight_told(page) | {"row": view["row"], "run_of_32": view["run"]}
    return {"block": view["on"], "largest": view["top"]}


def exponent_of(traces: Mapping[str, schemes.RuleTrace]) -> int:
    """Exponent of the binade in which the block's maximum lies."""
    first = next(iter(traces.values()))
    return math.frexp(abs(float(first.x[first.top])))[1] - 1


def rules_part(page: Lesson) -> None:
    """One block under every rule, after the question who clips."""
    view = page.view
    asked = schemes.compare_rules(figures.sample_block(ASKED))
    if not _who_clips(page, asked):
        return
    stage, side = page.stage()
    with side:
        pick_one(page, "on", BLOCKS, label="rules.on", texts="block")
        if view["on"] == "tiny_moe":
            _pick_expert(page)
            left, right = st.columns(2)
            runs = runs_of(view["w"])
            left.number_input(page.t("pick.row"), 0, ROWS - 1, **view.widget("row"))
            right.number_input(page.t("pick.run"), 0, runs - 1, **view.widget("run"))
        else:
            st.select_slider(page.t("rules.top"), TOPS, format_func=exact, **view.widget("top"))
        traces = schemes.compare_rules(block_of(page))
        best = max(trace.summary.sqnr_db for trace in traces.values())
        bytes_ = {trace.scale_byte for trace in traces.values()}
        page.finding(
            "rules.seen.one" if len(bytes_) == 1 else "rules.seen.many",
            count=len(bytes_),
            best=listed(f"`{name}`" for name, trace in traces.items() if trace.summary.sqnr_db == best),
            db=f"{best:.2f}",
        )
    binade = schemes.rule_binade(exponent_of(traces))
    top = next(iter(traces.values()))
    with stage:
        page.figure(
            figures.rules_figure(binade, abs(float(top.x[top.top])), theme=theme(), lang=lang()),
            alt=page.t("rules.alt"),
            finding=figures.describe_rules(traces, lang()),
            rows=lambda: figures.run_rows(binade),
        )
    page.table(
        ("rule", ">byte", ">byte_bits", ">scale", ">scaled", ">code", ">became", ">db", ">clipped"),
        [_rule_row(trace) for trace in traces.values()],
    )
    page.prose("rules.text", floor=four(1e-4))
    st.selectbox(page.t("rules.follow"), MXFP4_RECIPES, **view.widget("rule"))
    page.table(
        ("formula", "numbers", ">result", ">f32"),
        [
            (
                f"{step.symbol} = {phrases(step.formula)}",
                phrases(step.numbers),
                exact(float(step.value)),
                f"`{step.bits}`",
            )
            for step in traces[view["rule"]].steps
        ],
    )
    page.glossary("amax", "saturation", "tie")


def _who_clips(page: Lesson, asked: Mapping[str, schemes.RuleTrace]) -> bool:
    clipping = tuple(name for name, trace in asked.items() if trace.clips_top)
    answers = {
        (): "none",
        ("ocp-floor",): "floor",
        ("ocp-floor", "vllm-even"): "floor_even",
        MXFP4_RECIPES: "every",
    }
    floor, ceil = asked["ocp-floor"], asked["flashinfer-ceil"]
    return predict.ask(
        f"{PAGE}.predict.clips",
        tuple(answers.values()),
        answer=answers[clipping],
        top=exact(ASKED),
        limit=exact(E2M1.max_value),
        block=MX_BLOCK,
        floor_became=exact(float(floor.decoded[floor.top])),
        ceil_scaled=exact(float(ceil.products[ceil.top])),
        ceil_became=exact(float(ceil.decoded[ceil.top])),
        floor_db=f"{floor.summary.sqnr_db:.2f}",
        ceil_db=f"{ceil.summary.sqnr_db:.2f}",
    )


def _rule_row(trace: schemes.RuleTrace) -> tuple[str, ...]:
    return (
        trace.recipe,
        f"`{hex_byte(trace.scale_byte)}`",
        f"`{bits(trace.scale_byte, 8)}`",
        figures.power_of_two(trace.scale_byte - 127),
        exact(float(trace.products[trace.top])),
        f"`{bits(int(trace.codes[trace.top]), 4)}`",
        exact(float(trace.decoded[trace.top])),
        f"{trace.summary.sqnr_db:.2f}",
        str(trace.summary.clipped),
    )


# ------------------------------------------------------------------ storage, models


def bytes_of(page: Lesson) -> dict[str, schemes.LayerBytes]:
    """Bytes of the chosen layer's experts in both schemes."""
    matrices = figures.matrices_of(page.view["stored"])
    return {scheme: schemes.layer_bytes(matrices, scheme) for scheme in figures.SHIPPED}


def storage_part(page: Lesson) -> None:
    """Bits a weight, and bytes of a real layer."""
    view = page.view
    stage, side = page.stage()
    with side:
        pick_one(page, "stored", tuple(figures.LAYERS), label="storage.layer", texts="layer")
        made = bytes_of(page)
        experts, matrices = figures.LAYERS[view["stored"]]
        page.finding(
            "storage.seen",
            experts=experts,
            shapes=" · ".join(f"{n} × {k}" for n, k in matrices),
            weights=f"{made['mxfp4'].elements:,}",
            mx=percent(made["mxfp4"].block_scales / made["mxfp4"].codes),
            nv=percent(made["nvfp4"].block_scales / made["nvfp4"].codes),
        )
        page.glossary("block_scale", "global_scale")
    with stage:
        page.figure(
            figures.storage_figure(made, theme=theme(), lang=lang()),
            alt=page.t("storage.alt"),
            finding=figures.describe_storage(made, lang()),
            rows=lambda: figures.storage_rows(made),
        )
    page.table(
        ("scheme", ">codes", ">block_scales", ">tensor_scales", ">total", ">bits"),
        [
            (
                scheme.upper(),
                f"{one.codes:,}",
                f"{one.block_scales:,}",
                f"{one.tensor_scales:,}",
                f"{one.total:,}",
                f"{one.bits:.6g}",
            )
            for scheme, one in made.items()
        ],
    )
    page.prose("storage.text")


def models_part(page: Lesson) -> None:
    """Who stores what, with the place where it was read."""
    page.prose("models.before")
    page.table(
        ("model", "scheme", "weight", "scale_tensors", "source"),
        [(use.name, use.scheme, use.weight, use.scale, use.source) for use in figures.USES],
    )
    page.prose("models.text", version=VLLM)
