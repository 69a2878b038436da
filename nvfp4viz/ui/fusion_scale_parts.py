"""The parts of the page on fusion that measure: a scale that parts must share, and the three kinds side by side."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import streamlit as st

from nvfp4viz.figures import blocks
from nvfp4viz.figures import fusion as figures
from nvfp4viz.moe.fusion_bits import FusionBits, measure_fusions
from nvfp4viz.quant import sweep_headroom
from nvfp4viz.quant.shared_scale import SHARE_WAYS, share_scale
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches, predict, registry
from nvfp4viz.ui.export import about
from nvfp4viz.ui.fusion_parts import PAGE, pick
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import exact, four
from nvfp4viz.ui.pick import pick_expert, pick_layer
from nvfp4viz.ui.theme import theme

WHAT = ("qkv", "mlp", "expert")
STRETCHES = (1.0, 2.0, 8.0, 64.0, 512.0, 4096.0, 32768.0, 262144.0)
FACTORS = (1.0, 8.0, 512.0, 4096.0, 32768.0, 262144.0)
SAMPLE = "tiny-moe-bf16"
ASKED_LAYER = 2
MEASURED_EXPERTS = 8
OUTLIERS = 10.0


@st.cache_resource(max_entries=64, show_spinner=False)
def weights(what: str, layer: int, expert: int) -> dict[str, npt.NDArray[Any]]:
    """tiny-moe's own BF16 weights of projections that read one input."""
    opened, prefix = caches.checkpoint(SAMPLE), f"model.layers.{layer}"
    if what == "qkv":
        return {name: np.asarray(opened.read(f"{prefix}.self_attn.{name}_proj.weight")) for name in "qkv"}
    if what == "mlp":
        return {name: np.asarray(opened.read(f"{prefix}.mlp.{name}_proj.weight")) for name in ("gate", "up")}
    gate, up = np.split(np.asarray(opened.read(f"{prefix}.experts.gate_up_proj"))[expert], 2)
    return {"gate": gate, "up": up}


@st.cache_resource(max_entries=64, show_spinner=False)
def shared(what: str, layer: int, expert: int, stretch: float) -> figures.Found:
    """The five ways; the first part times ``stretch``, a power of two that BF16 takes exactly."""
    parts = dict(weights(what, layer, expert))
    first = next(iter(parts))
    parts[first] = (parts[first].astype(np.float32) * np.float32(stretch)).astype(ml_dtypes.bfloat16)
    return share_scale(parts)


def shared_of(page: Lesson) -> figures.Found:
    """The five ways that the page's settings ask for."""
    view = page.view
    return shared(view["what"], view["layer"], view["expert"], view["stretch"])


def shared_rows(page: Lesson) -> figures.Rows:
    """Every part in every way, and which weights they are."""
    view = page.view
    of = {"checkpoint": SAMPLE, "weights": view["what"], "layer": view["layer"], "first_part_times": view["stretch"]}
    if view["what"] == "expert":
        of["expert"] = view["expert"]
    return about(of, figures.scale_rows(shared_of(page)))


def snippet_of(page: Lesson) -> dict[str, object]:
    """What fills the code of the two parts here, ``fusion_scale`` and ``fusion_kinds``; nothing for the others."""
    view = page.view
    if view["part"] == "scale":
        own = {name: view[name] for name in ("what", "layer", "expert", "stretch")}
        return own | {"outliers": OUTLIERS, "factors": FACTORS}
    return {"layer": ASKED_LAYER, "experts": MEASURED_EXPERTS} if view["part"] == "kinds" else {}


@st.cache_resource(max_entries=2, show_spinner=False)
def measured() -> tuple[FusionBits, ...]:
    """Every fusion on tiny-moe's layer that the questions are about."""
    stacked = np.asarray(caches.checkpoint(SAMPLE).read(f"model.layers.{ASKED_LAYER}.experts.gate_up_proj"))
    return measure_fusions(weights("qkv", ASKED_LAYER, 0), stacked[:MEASURED_EXPERTS])


def scale_part(page: Lesson) -> None:
    """What one scale for several parts costs, after the question what the maximum does."""
    if not _what_maximum_does():
        return
    view = page.view
    stage, side = page.stage()
    with side:
        pick(page, "what", WHAT)
        if view["what"] == "expert":
            pick_expert(page)
        else:
            pick_layer(page, st.columns(2)[0])
        found = shared_of(page)
        names = list(found["own"])
        st.select_slider(
            page.t("pick.stretch", part=names[0]),
            STRETCHES,
            format_func=lambda value: f"× {figures.times(value)}",
            **view.widget("stretch"),
        )
        served = "first" if view["what"] == "expert" else "max"
        worst = figures.worst_part(found, served)
        page.finding(
            f"scale.seen.{served}" if worst.factor != 1 else "scale.seen.equal",
            part=worst.name,
            factor=figures.times(worst.factor),
            first=names[0],
            db=figures.decibels(worst.summary.sqnr_db),
            own=figures.decibels(found["own"][worst.name].summary.sqnr_db),
        )
        page.glossary("global_scale", "block_scale", "sqnr", "amax")
    with stage:
        page.figure(
            figures.scales_figure(found, theme=theme(), lang=lang()),
            alt=page.t("scale.alt"),
            finding=figures.describe_scales(found, lang()),
            rows=lambda: figures.scale_rows(found),
        )
    page.table(
        ("part", ">own_scale", ">max_scale", ">max_factor", ">first_factor", *(f">{way}_db" for way in SHARE_WAYS)),
        [
            (
                name,
                four(found["own"][name].own_scale),
                four(found["max"][name].used_scale),
                f"× {figures.times(found['max'][name].factor)}",
                f"× {figures.times(found['first'][name].factor)}",
                *(figures.decibels(found[way][name].summary.sqnr_db) for way in SHARE_WAYS),
            )
            for name in names
        ],
    )
    page.prose("scale.text", version=VLLM)
    page.heading("scale.input_heading")
    page.table(
        (">input_factor", ">db", ">subnormal", ">zeroed"),
        [
            (
                f"× {figures.times(p.factor)}",
                figures.decibels(p.summary.sqnr_db),
                f"{p.subnormal:,}",
                f"{p.summary.zeroed:,}",
            )
            for p in _input_scales()
        ],
    )
    page.prose("scale.input_text", outliers=exact(OUTLIERS))


@st.cache_resource(max_entries=1, show_spinner=False)
def _input_scales() -> tuple[Any, ...]:
    return sweep_headroom(blocks.outlier_pair(OUTLIERS)[0], FACTORS)


def _what_maximum_does() -> bool:
    """Asked: what happens to the part with the smaller scale?"""
    found = shared("qkv", ASKED_LAYER, 0, 1.0)
    worst = figures.worst_part(found, "max")
    name = worst.name
    own, rerounded = found["own"][name], found["rerounded"][name]
    loss = own.summary.sqnr_db - worst.summary.sqnr_db
    # Exact copies, the loss of one more rounding, or a factor that nothing makes up for.
    answer = "nothing" if loss == 0 else "large" if worst.factor != 1 else "coarser"
    return predict.ask(
        f"{PAGE}.predict.maximum",
        ("nothing", "coarser", "large"),
        answer=answer,
        layer=ASKED_LAYER,
        part=name,
        factor=figures.times(worst.factor),
        own=figures.decibels(own.summary.sqnr_db),
        max=figures.decibels(worst.summary.sqnr_db),
        rerounded=figures.decibels(rerounded.summary.sqnr_db),
        shared=figures.decibels(found["shared"][name].summary.sqnr_db),
    )


def kinds_part(page: Lesson) -> None:
    """The three kinds beside each other, after the question which of them can change bits."""
    page.table(
        ("kind", "becomes_one", "example"),
        [
            tuple(page.t(f"kind.{kind}.{cell}") for cell in ("name", "one", "example"))
            for kind in ("weights", "launches", "kernels")
        ],
    )
    found = measured()
    if not _which_change(found):
        return
    page.heading("kinds.heading")
    page.table(
        ("fusion", "kind", ">launches", ">compared", ">differ", "saves"),
        [
            (
                page.t(f"fused.{one.id}.name"),
                page.t(f"kind.{one.kind}.name"),
                f"{one.before}\u00a0→\u00a0{one.after}",
                f"{one.values:,}",
                f"{one.differ:,}",
                page.t(f"fused.{one.id}.saves"),
            )
            for one in found
        ],
    )
    page.prose("kinds.text", layer=ASKED_LAYER, experts=MEASURED_EXPERTS, version=VLLM)
    page.glossary("grouped_gemm", "fused_projection", "swiglu")
    registry.link("mega_kernel")


def _which_change(found: tuple[FusionBits, ...]) -> bool:
    by_id = {one.id: one for one in found}
    changed = {one.kind for one in found if one.differ}
    answers = {
        frozenset[str](): "none",
        frozenset({"kernels"}): "kernels",
        frozenset({"weights", "kernels"}): "weights_kernels",
        frozenset({"weights", "launches", "kernels"}): "all",
    }
    return predict.ask(
        f"{PAGE}.predict.bits",
        tuple(answers.values()),
        answer=answers[frozenset(changed)],
        **{f"{name}_differ": f"{one.differ:,}" for name, one in by_id.items()},
        **{f"{name}_values": f"{one.values:,}" for name, one in by_id.items()},
    )
