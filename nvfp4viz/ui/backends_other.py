"""The parts of the page on backends for what are no NVFP4 experts: linear layers, and MXFP4 experts."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.selection import GPUS, Selection
from nvfp4viz.ui import errors, predict
from nvfp4viz.ui.backends_parts import PAGE, draw_ladder, gpus_named, ladder, pick, toggles
from nvfp4viz.ui.i18n import listed
from nvfp4viz.ui.lesson import Lesson

LINEAR_PICKS = ("auto", *linear.LINEAR_CHOICES, linear.NO_KERNEL)
MX_PICKS = ("auto", *mx.MX_CHOICES)
DISABLED = ("none", *(row.enum for row in linear.LINEAR))


def linear_request(page: Lesson) -> linear.LinearRequest:
    """The linear layers that the settings describe."""
    v = page.view
    disabled = "" if v["off"] == "none" else v["off"]
    return linear.LinearRequest(v["gpu"], v["lin"], v["fi"], v["hum"], v["fp4"], v["inv"], disabled, v["lpick"])


def mx_request(page: Lesson) -> mx.Mxfp4Request:
    """The same for MXFP4 experts."""
    v = page.view
    return mx.Mxfp4Request(v["gpu"], v["model"], v["want"], v["form"], v["fi"], v["hum"], v["mpick"])


def _seen(page: Lesson, part: str, found: Selection) -> None:
    gpu = gpus_named(page, page.view["gpu"])
    if found.winner is not None:
        page.finding(f"{part}.seen", gpu=gpu, winner=found.winner.enum)
        return
    if not found.rests_with:
        struck = linear.struck(linear_request(page)) if part == "linear" else ()
        settings = listed(_setting(page, name) for name in struck)
        page.finding(f"{part}.seen_{'struck' if struck else 'none'}", gpu=gpu, settings=settings)
        return
    after = next((each.backend.enum for each in found.candidates if each.outcome == "able"), None)
    names = listed(row.enum for row in found.rests_with)
    page.finding(f"{part}.seen_open" if after is None else f"{part}.seen_after", gpu=gpu, names=names, after=after)


def _setting(page: Lesson, name: str) -> str:
    """A setting of the linear layers as it is given to vLLM."""
    if name == "choice":
        return f"`--linear-backend {page.view['lpick']}`"
    return {"batch_invariant": "`VLLM_BATCH_INVARIANT`", "disabled": "`VLLM_DISABLED_KERNELS`"}[name]


# ------------------------------------------------------------------ linear layers

NO_NAME = linear.LinearRequest(choice=linear.NO_KERNEL)
"""What the question is about: the opening state, with a name that no kernel of the list answers to."""
FALLBACK = "Marlin"
"""The wrong answer nearest to hand: it accepts on every GPU, so one would fall back on it."""


def linear_part(page: Lesson) -> None:
    """The ladder for linear layers, whose rules for a choice are softer."""
    if not _what_of_the_name(page):
        page.finding("linear.before", version=VLLM)
        order = linear.linear_order(NO_NAME)
        draw_ladder(page, [("asked", str(k), row.enum, row.choice) for k, row in enumerate(order, 1)])
        return
    stage, side = page.stage()
    with side:
        pick(page, "gpu", GPUS)
        pick(page, "lpick", LINEAR_PICKS)
        pick(page, "lin", linear.LINEAR_SCHEMES)
        pick(page, "off", DISABLED)
        toggles(page, "fi", "hum", "fp4", "inv")
    request = linear_request(page)
    found = linear.select_linear(request)
    with stage:
        _seen(page, "linear", found)
        if found.warning is not None:
            with st.container(border=True, key="backends_warning"):
                st.markdown(f":material/warning: {_warned(page, request, found.warning)}")
        if found.error is not None:
            errors.show(found.error, key="linear")
        ladder(page, found)
    page.prose("linear.text", version=VLLM)


def _warned(page: Lesson, request: linear.LinearRequest, warning: str) -> str:
    """What vLLM only warns of; a name that is dropped may leave a longer list than no name does."""
    alone = linear.linear_order(replace(request, choice="auto"))
    longer = warning == "no-kernel" and linear.linear_order(request) != alone
    names = listed(row.enum for row in alone)
    key = f"warning.{warning}{'-longer' * longer}"
    return page.t(key, choice=request.choice, scheme=request.scheme, alone=names)


def _what_of_the_name(page: Lesson) -> bool:
    """Asked: what does a name without a kernel do, which stops the server where it is said of experts?"""
    auto = linear.select_linear(replace(NO_NAME, choice="auto")).winner
    assert auto is not None
    found = linear.select_linear(NO_NAME)
    taken = found.winner.enum if found.winner is not None else "–"
    # Batch invariance does to a name that has a kernel what no flag could.
    named = linear.LINEAR[0].choice
    invariant = linear.select_linear(linear.LinearRequest(batch_invariant=True, choice=named)).winner
    assert invariant is not None
    return predict.ask(
        f"{PAGE}.predict.name",
        ("stops", "marlin", "first"),
        answer={auto.enum: "first", FALLBACK: "marlin"}.get(taken, "stops"),
        gpu=NO_NAME.gpu,
        name=NO_NAME.choice,
        first=auto.enum,
        marlin=FALLBACK,
        taken=taken,
        named=named,
        invariant=invariant.enum,
        version=VLLM,
    )


# ------------------------------------------------------------------ MXFP4 experts

UNASKED = mx.Mxfp4Request("sm_100")
"""What the question is about: a GPU with candidates for every activation format, and none asked for."""
ACTIVATIONS = ("bf16", "mxfp8", "mxfp4")


def mxfp4_part(page: Lesson) -> None:
    """The ladder for MXFP4 experts of two model families."""
    if not _what_activations(page):
        _who_could(page)
        return
    stage, side = page.stage()
    with side:
        pick(page, "gpu", GPUS)
        pick(page, "mpick", MX_PICKS)
        pick(page, "model", mx.MODELS)
        if page.view["model"] == "gpt-oss":
            pick(page, "want", mx.WANTED)
        pick(page, "form", mx.FORMATS)
        toggles(page, "fi", "hum")
    found = mx.select_mxfp4(mx_request(page))
    with stage:
        _seen(page, "mx", found)
        if found.error is not None:
            errors.show(found.error, key="mxfp4")
        ladder(page, found)
    page.prose("mx.text", version=VLLM)


def _what_activations(page: Lesson) -> bool:
    """Asked: what are activations multiplied in, where nobody asks for a format and the GPU has them all?"""
    winner, asking, other = (
        mx.select_mxfp4(request).winner
        for request in (UNASKED, replace(UNASKED, wanted="mxfp8"), replace(UNASKED, model="deepseek-v4"))
    )
    assert isinstance(winner, mx.MxBackend)
    assert asking is not None
    assert other is not None
    return predict.ask(
        f"{PAGE}.predict.activations",
        ACTIVATIONS,
        answer=winner.activation,
        gpu=UNASKED.gpu,
        winner=winner.enum,
        activation=winner.activation.upper(),
        asking=asking.enum,
        other=other.enum,
        version=VLLM,
    )


def _who_could(page: Lesson) -> None:
    """Before the answer: who might run there, by what each multiplies in; ``?`` where not all conditions were read."""
    page.finding("mx.before", gpu=UNASKED.gpu, version=VLLM)
    could: dict[str, dict[str, str]] = {activation: {} for activation in ACTIVATIONS}
    for wanted in mx.WANTED:
        for row in mx.mxfp4_order(replace(UNASKED, wanted=wanted)):
            mark = {None: "", "open": "?"}.get(mx.mxfp4_failed(row, UNASKED))
            if mark is not None:
                could[row.activation][row.enum] = row.enum + mark
    page.table(("activation", "candidates"), [(name.upper(), listed(could[name].values())) for name in ACTIVATIONS])
