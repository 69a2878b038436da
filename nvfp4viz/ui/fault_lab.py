"""The parts of the Fault lab: settings, both answers, logits, what the audit says, the sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.checkpoint import FAULTS
from nvfp4viz.figures import fault_lab as figures
from nvfp4viz.figures.coverage import shown
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.fault_lab import (
    FaultSpot,
    baseline,
    break_checkpoint,
    compare_to,
    count_block_scales,
    scale_use,
    sweep,
)
from nvfp4viz.ui import caches, errors, predict, state, story_cards, story_runs
from nvfp4viz.ui.caches import Build
from nvfp4viz.ui.explorer import finding_cards
from nvfp4viz.ui.i18n import lang, listed, t
from nvfp4viz.ui.numbers import four
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.audit import Report
    from nvfp4viz.serving.fault_lab import Baseline, FaultEffect, SweepPoint
    from nvfp4viz.ui.lesson import Lesson

BASE = "tiny-moe-nvfp4-full"
# exponent-cast needs E8M0 block scales, which an NVFP4 file has none of.
FAULT_IDS = tuple(name for name in FAULTS if name != "exponent-cast")
SEEDED = ("random-bits", "block-nan", "block-negative")
"""Faults that a seed decides."""
ROLES = ("input_scale", "weight_scale_2", "weight_scale", "weight")
PAIR = ("gate", "up")
PROJECTIONS = (*PAIR, "down")
BACKENDS = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-marlin", "vllm-emulation")
PROMPTS = (*DEMO_PROMPTS, "own")
LAYERS, EXPERTS = story_runs.LAYERS, story_runs.EXPERTS
TOKENS = 32
ALLOCATOR = "zeros"
"""What the slot of a missing tensor reads as; the story's fourth step has other fates."""
# Half decades and, but for 1, no powers of two: those move exponents alone until a block scale leaves its range.
FACTORS = tuple(float(10 ** (k / 2)) for k in range(-8, 9))
# A power of two, to ask about.
SURPRISE = 4096.0
MOST_TOP = 5
_SWEPT = "fault_lab.swept"


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault and what it is tried on: all that decides the page's numbers."""

    spot: FaultSpot
    backend: str
    prompt: str


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What came of it: the runs, and what the audit says about the broken file."""

    trial: Trial
    effect: FaultEffect
    report: Report


def healthy_build(backend: str) -> Build:
    return Build(BASE, backend=backend)


def result(trial: Trial) -> Result:
    """The trial, from the cache where it has been run.

    Raises
    ------
    InputError
        A fault that does not fit its slot.
    ServingError
        A file that the server refuses to load.
    ModelError
        A prompt that the model cannot read.
    """
    return _result(trial, caches.stamp(caches.sample_path(BASE)))


@st.cache_resource(max_entries=48, show_spinner=False)
def _result(trial: Trial, identity: caches.Stamp) -> Result:
    from nvfp4viz.audit import audit
    from nvfp4viz.serving import load

    broken = break_checkpoint(caches.checkpoint(BASE), trial.spot)
    spot = trial.spot
    healthy = _healthy(trial.backend, trial.prompt, (spot.layer, spot.expert, spot.projection), identity)
    healthy = replace(healthy, spot=spot)
    faulty = load(broken, allocator=ALLOCATOR, backend=trial.backend)
    effect = compare_to(healthy, faulty)
    return Result(trial, effect, audit(broken))


@st.cache_resource(max_entries=48, show_spinner=False)
def _healthy(backend: str, prompt: str, slot: tuple[int, int, str], identity: caches.Stamp) -> Baseline:
    """The healthy side of every fault in one slot."""
    build = healthy_build(backend)
    answer = caches.generation(build, prompt, TOKENS).generation
    return baseline(caches.served(build), FaultSpot("nan", *slot), prompt, TOKENS, answer)


@st.cache_resource(max_entries=400, show_spinner=False)
def _point(trial: Trial, factor: float, identity: caches.Stamp) -> SweepPoint:
    return next(sweep(caches.checkpoint(BASE), trial.spot, (factor,), trial.prompt, backend=trial.backend, n=TOKENS))


def busiest(backend: str, prompt: str, layer: int) -> int:
    """The expert of a layer that a prompt and its answer visit most."""
    routes = caches.generation(healthy_build(backend), prompt, TOKENS).generation.trace.routes
    return int(np.bincount(routes[:, layer].ravel(), minlength=EXPERTS).argmax())


def prompt_of(page: Lesson) -> str:
    """The prompt's text, checked.

    Raises
    ------
    ModelError
        As `story_runs.checked`.
    """
    if page.view["prompt"] == "own":
        return story_runs.checked(page.view["ask"] or "")
    return DEMO_PROMPTS[page.view["prompt"]]


def projections_of(fault: str) -> tuple[str, ...]:
    """Where a fault can be put: a pair is gate and up."""
    return PAIR if fault == "pair-mismatch" else PROJECTIONS


def settle(page: Lesson) -> None:
    """The cursor may come from another checkpoint's page: make it a slot of this model, and the fault fit its role."""
    view = page.view
    spec = FAULTS[view["fault"]]
    page.refine(role=state.choice(spec.roles))
    if view["role"] is None:
        view.put(role=spec.roles[0])
    if view["layer"] is None:
        view.put(layer=0)
    choices = projections_of(view["fault"])
    page.refine(projection=state.choice(choices))
    if view["projection"] not in choices:
        view.put(projection=choices[-1])


def _new_fault() -> None:
    """Another fault has other roles and another number."""
    st.session_state.update({"fault_lab.role": None, "fault_lab.value": None})


def _to_busiest() -> None:
    st.session_state["expert"] = None


def what_controls(page: Lesson) -> str | None:
    """Prompt and backend; the prompt's text, or None while the reader has written none."""
    view = page.view
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        st.selectbox(
            page.t("prompt"),
            PROMPTS,
            format_func=lambda name: page.t(f"prompts.{name}"),
            width=200,
            **view.widget("prompt"),
        )
        st.selectbox(page.t("backend"), BACKENDS, width=260, **view.widget("backend"))
        if view["prompt"] == "own":
            st.text_input(
                page.t("own"),
                placeholder=page.t("own_placeholder"),
                width=420,
                max_chars=state.MOST_TEXT,
                **view.widget("ask"),
            )
    if view["prompt"] == "own" and not (view["ask"] or "").strip():
        page.prose("own_waiting")
        return None
    return prompt_of(page)


def controls(page: Lesson, prompt: str) -> Trial:
    """Which fault, and where."""
    view = page.view
    st.selectbox(
        page.t("fault"),
        FAULT_IDS,
        format_func=lambda name: page.t(f"faults.{name}"),
        on_change=_new_fault,
        **view.widget("fault"),
    )
    st.caption(page.t("inject", fault=view["fault"]))
    spec = FAULTS[view["fault"]]
    if view["expert"] is None or view["expert"] >= EXPERTS:
        view.put(expert=busiest(view["backend"], prompt, view["layer"]))
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        st.number_input(page.t("layer"), 0, LAYERS - 1, step=1, width=110, **view.widget("layer"))
        st.number_input(page.t("expert"), 0, EXPERTS - 1, step=1, width=110, **view.widget("expert"))
    st.button(
        page.t("busiest"),
        key="fault_lab.busiest",
        icon=":material/target:",
        help=page.t("busiest_help"),
        on_click=_to_busiest,
    )
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        st.selectbox(page.t("projection"), projections_of(view["fault"]), width=110, **view.widget("projection"))
        st.selectbox(page.t("role"), spec.roles, width=180, **view.widget("role"))
    with st.container(horizontal=True, gap="small"):
        if spec.value is not None:
            st.number_input(
                page.t("value"),
                value=None,
                format="%g",
                placeholder=f"{spec.value:g}",
                width=150,
                **view.widget("value"),
            )
        if view["fault"] in SEEDED:
            st.number_input(page.t("seed"), 0, 999, step=1, width=150, **view.widget("seed"))
    spot = FaultSpot(
        view["fault"],
        view["layer"],
        view["expert"],
        view["projection"],
        view["role"],
        view["value"] if spec.value is not None else None,
        view["seed"],
    )
    return Trial(spot, view["backend"], prompt)


def answers(page: Lesson, done: Result) -> None:
    """Both answers side by side and what changed, in one sentence."""
    effect = done.effect
    replies = [
        story_runs.reply_of(page.view["prompt"], done.trial.prompt, made, TOKENS)
        for made in (effect.healthy, effect.faulty)
    ]
    losses = (effect.healthy_loss, effect.faulty_loss)
    st.html(story_cards.style())
    story_cards.cards(
        story_cards.card(
            page.t(f"card.{name}"),
            page.t("card.loss", loss=four(loss)),
            reply,
            page.t("card.foot", n=len(reply.token_ids), pads=reply.pads),
        )
        for name, reply, loss in zip(("healthy", "faulty"), replies, losses, strict=True)
    )
    spot = done.trial.spot
    page.finding(
        f"seen.{outcome(effect)}",
        layer=spot.layer,
        expert=spot.expert,
        what=_what(page, spot),
        backend=done.trial.backend,
        visits=effect.visits,
        read=len(effect.read),
        token=int(effect.faulty.token_ids[0]),
        at=first_other(effect),
    )
    if spot.fault == "missing":
        page.prose("seen.missing", fate=t(f"empty_answer.fates.{ALLOCATOR}"))
    if effect.first_broken is not None and _use(done.trial) == "layer":
        page.prose("seen.shared", backend=done.trial.backend, layer=spot.layer)


def _what(page: Lesson, spot: FaultSpot) -> str:
    """What a fault damages: one tensor, or for the two that move whole matrices all that they move."""
    whole = spot.fault in ("gate-up-swap", "duplicate-expert")
    return page.t(f"what.{spot.fault if whole else 'tensor'}", role=spot.role, projection=spot.projection)


def _use(trial: Trial) -> str | None:
    """How the scale enters the computation; None for what is no second-level scale."""
    spot = trial.spot
    if spot.role not in FAULTS["scaled"].roles:
        return None
    return scale_use(str(spot.role), spot.projection, trial.backend)


def outcome(effect: FaultEffect) -> str:
    """``unvisited``, ``untouched``, ``same``, ``other`` or ``silent``: what became of the answer."""
    if effect.faulty.token_ids == effect.healthy.token_ids:
        if effect.first_broken is not None:
            return "same"
        return "untouched" if effect.visits else "unvisited"
    return "silent" if not any(effect.faulty.token_ids) else "other"


def first_other(effect: FaultEffect) -> int | None:
    """The first token of the answer, counted from 1, that is another or only there once; None where there is none."""
    pairs = zip_longest(effect.healthy.token_ids, effect.faulty.token_ids)
    return next((at for at, (good, bad) in enumerate(pairs, start=1) if good != bad), None)


def layers(page: Lesson, done: Result) -> None:
    page.figure(
        figures.layers_figure(done.effect, theme=theme(), lang=lang()),
        alt=page.t("figure.layers_alt"),
        finding=figures.describe_layers(done.effect, lang()),
        rows=lambda: figures.layers_rows(done.effect),
    )


def logits(page: Lesson, done: Result) -> None:
    """The most likely first tokens before, and what the fault leaves of them."""
    page.prose("logits.text")
    page.table(
        ("token", ">id", ">healthy", ">faulty"),
        [
            (f"`{shown(row['token'])}`", str(row["id"]), four(row["healthy"]), four(row["faulty"]))
            for row in logit_rows(done)
        ],
    )
    nans, token = int(np.isnan(done.effect.faulty_logits).sum()), int(done.effect.faulty.token_ids[0])
    if nans:
        page.finding("logits.nan", nans=nans, all=len(done.effect.faulty_logits), token=token)


def logit_rows(done: Result) -> list[dict[str, object]]:
    """The top tokens of either run, and token 0, with both logits."""
    good, bad = done.effect.healthy_logits, done.effect.faulty_logits
    top = list(np.argsort(-good, kind="stable")[:MOST_TOP])
    finite = [i for i in np.argsort(-np.nan_to_num(bad, nan=-np.inf), kind="stable")[:MOST_TOP] if np.isfinite(bad[i])]
    ids = dict.fromkeys(int(i) for i in [*top, *finite, 0])
    return [{"id": i, "token": story_runs.text_of(i), "healthy": float(good[i]), "faulty": float(bad[i])} for i in ids]


def audit_says(page: Lesson, done: Result) -> None:
    """Whether a check of the file sees this fault."""
    spec = FAULTS[done.trial.spot.fault]
    found = done.report.findings
    # A neighbour's number is plausible, and beside its partner's it may be another.
    if not spec.findings and not found:
        page.prose("audit.cannot")
    elif spec.deep:
        page.prose("audit.deep")
    elif found:
        page.prose("audit.sees")
    finding_cards(found, key="fault_lab")
    if not found:
        page.finding("audit.silent", verdict=t(f"explorer.verdicts.{done.report.verdict}"))


def sweep_part(page: Lesson, done: Result) -> None:
    """Predict one factor, then run them all when asked."""
    spot = done.trial.spot
    if spot.role not in FAULTS["scaled"].roles:
        page.prose("sweep.scalars_only", roles=listed(f"`{role}`" for role in FAULTS["scaled"].roles))
        return
    at = FaultSpot("scaled", spot.layer, spot.expert, spot.projection, spot.role)
    trial = Trial(at, done.trial.backend, done.trial.prompt)
    where = {"layer": at.layer, "expert": at.expert, "projection": at.projection, "role": at.role}
    with st.spinner(page.t("running")):
        big = result(
            Trial(FaultSpot(*(at.fault, at.layer, at.expert, at.projection, at.role), SURPRISE), *_on(trial))
        ).effect
    ends = {"unvisited": "same", "untouched": "same", "same": "same", "other": "other", "silent": "silent"}
    use = scale_use(str(at.role), at.projection, trial.backend)
    if not predict.ask(
        "fault_lab.predict.big",
        ("same", "other", "silent"),
        ends[outcome(big)],
        factor=f"{SURPRISE:.0f}",
        error=figures.describe_layers(big, lang()),
        use=page.t(f"sweep.use.{use}", backend=trial.backend),
        **where,
    ):
        return
    cancels = use in ("twice", "pair", "layer")
    if cancels and big.healthy_scales is not None and big.faulty_scales is not None and big.visits:
        counts = count_block_scales(big.faulty_scales)
        page.finding(
            "sweep.blocks",
            blocks=big.faulty_scales.size,
            before=count_block_scales(big.healthy_scales)["normal"],
            **counts,
        )
    page.prose("sweep.lead", points=len(FACTORS), low=four(FACTORS[0]), high=four(FACTORS[-1]), **where)
    if cancels:
        page.prose("sweep.powers")
    asked = st.button(page.t("sweep.run"), key="fault_lab.run")
    if asked:
        st.session_state[_SWEPT] = trial
    if st.session_state.get(_SWEPT) == trial:
        points = list(_swept(page, trial))
        page.figure(
            figures.sweep_figure(points, theme=theme(), lang=lang()),
            alt=page.t("figure.sweep_alt"),
            finding=figures.describe_sweep(points, lang()),
            rows=lambda: figures.sweep_rows(points),
        )


def _on(trial: Trial) -> tuple[str, str]:
    return trial.backend, trial.prompt


def _swept(page: Lesson, trial: Trial) -> Iterable[SweepPoint]:
    """The points one after the other with a bar; stopping the page keeps those that are done."""
    bar = st.progress(0.0, page.t("sweep.busy", done=0, points=len(FACTORS)))
    identity = caches.stamp(caches.sample_path(BASE))
    for count, factor in enumerate(FACTORS, start=1):
        with errors.passing(bar):
            point = _point(trial, factor, identity)
        yield point
        bar.progress(count / len(FACTORS), page.t("sweep.busy", done=count, points=len(FACTORS)))
    bar.empty()
