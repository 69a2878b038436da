"""Two parts of the page on loading: one file's fates, and where one bad value spreads."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from nvfp4viz.figures import loading as figures
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.spread import Spread, spread_value
from nvfp4viz.ui import caches, predict
from nvfp4viz.ui.blas import use_one_thread
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.numbers import exact, four, percent
from nvfp4viz.ui.pick import pick_expert
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvfp4viz.serving.fates import Fate
    from nvfp4viz.serving.fault_lab import Baseline
    from nvfp4viz.serving.loader import LayerParameters
    from nvfp4viz.serving.served import ServedModel
    from nvfp4viz.ui.lesson import Lesson

PAGE = "loading"
PARTS = ("fates", "maxima", "promotion", "chain", "cause", "guard")
HOLED, FULL = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"
BACKENDS = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-marlin")
PROMPTS = tuple(DEMO_PROMPTS)
PROMPT = "logs"
TOKENS = 16
OPENING = ("zeros", "ones", "neighbour")
"""What the opening's loads find in memory: they say nothing, answer well, answer wrongly."""
ORDER = (*OPENING, *(name for name in ALLOCATORS if name not in OPENING))
"""All of them; what stands there already keeps its place when the others come."""
LITTLE = 0.01
"""What passes for a small error in the question."""
SLOTS = ("gate", "up", "down")
VALUES = ("zero", "nan", "inf", "one", "huge", "thousand", "thousandth", "negative", "own")
_FIXED = {"zero": 0.0, "nan": float("nan"), "inf": float("inf"), "one": 1.0, "huge": 1e38}
_FACTORS = {"thousand": 1000.0, "thousandth": 0.001, "negative": -1.0}


# ------------------------------------------------------------------ one file, several fates


def fates(prompt: str, backend: str, seed: int) -> tuple[Fate, ...]:
    """Every fate of the holed file, those of the opening first; from the cache where it has been run."""
    return tuple(fate(allocator, prompt, backend, seed) for allocator in ORDER)


def fate(allocator: str, prompt: str, backend: str, seed: int) -> Fate:
    """One fate of the holed file, from the cache where it has been run; a seed decides the random bits alone."""
    identity = caches.stamp(caches.sample_path(HOLED))
    return _fate(allocator, prompt, backend, seed if allocator == "random" else 0, identity)


@st.cache_resource(max_entries=200, show_spinner=False)
def _fate(allocator: str, prompt: str, backend: str, seed: int, identity: caches.Stamp) -> Fate:
    from nvfp4viz.serving.fates import fate_of

    use_one_thread()
    twin, heard = _twin(prompt, backend, identity), _heard(allocator, prompt, backend, identity)
    found = fate_of(_loaded(backend, allocator, seed, identity), twin, allocator, seed, backend, heard[::-1])
    heard.append(found.effect.faulty.token_ids)
    return found


@st.cache_resource(max_entries=200, show_spinner=False)
def _heard(allocator: str, prompt: str, backend: str, identity: caches.Stamp) -> list[tuple[int, ...]]:
    """The answers of other seeds so far: the next seed's bits often give one of them again."""
    return []


def twin_of(backend: str) -> ServedModel:
    """The holed file with its missing tensors from the full export, loaded: it differs in those slots alone."""
    return _loaded(backend, "", 0, caches.stamp(caches.sample_path(HOLED)))


@st.cache_resource(max_entries=32, show_spinner=False)
def _twin(prompt: str, backend: str, identity: caches.Stamp) -> Baseline:
    """The complete file's answer, which all fates of a prompt are held to."""
    from nvfp4viz.model import expect
    from nvfp4viz.serving.fault_lab import baseline

    asked, healthy = DEMO_PROMPTS[prompt], twin_of(backend)
    answer = healthy.generate(asked, TOKENS, guess=expect(caches.likely_answer(asked)))
    return baseline(healthy, None, asked, TOKENS, answer)


@st.cache_resource(max_entries=36, show_spinner=False)
def _loaded(backend: str, allocator: str, seed: int, identity: caches.Stamp) -> ServedModel:
    """The holed file on some memory, or without an allocator its complete twin; converted for each backend."""
    from nvfp4viz.serving import load
    from nvfp4viz.serving.fates import complete_with

    if backend != BACKENDS[0]:
        return _loaded(BACKENDS[0], allocator, seed, identity).on(backend, device="cpu")
    if not allocator:
        twin = complete_with(caches.checkpoint(HOLED), caches.checkpoint(FULL))
        return load(twin, backend=backend, device="cpu")
    if allocator != ALLOCATORS[0]:
        return _loaded(backend, ALLOCATORS[0], 0, identity).with_memory(allocator, seed, device="cpu")
    return load(caches.checkpoint(HOLED), allocator, backend=backend, device="cpu")


def shown_fates(page: Lesson) -> tuple[Fate, ...]:
    """The fates that the page's settings ask for."""
    return fates(page.view["p"], page.view["b"], page.view["seed"])


def quoted(text: str, most: int = 40) -> str:
    """An answer as a cell of a table: one line in the mono face, padding counted.

    >>> quoted("<pad><pad><pad>"), quoted("two\nlines")
    ('`<pad>` × 3', '`two⏎lines`')
    """
    line, count = figures.one_line(text.replace("`", "ˋ"), most)
    return f"`{line}`" + (f" × {count}" if count > 1 else "")


def fates_part(page: Lesson) -> None:
    """The same file loaded five times: what its empty slots held decides the answer."""
    opening = fates(PROMPT, BACKENDS[0], 0)
    stage, side = page.stage()
    with side:
        revealed = _how_far_off(page, opening)
    if not revealed:
        with stage:
            _three_fates(page, opening)
        return
    view = page.view
    with side:
        st.selectbox(
            page.t("fates.prompt"), PROMPTS, format_func=lambda name: page.t(f"prompt.{name}"), **view.widget("p")
        )
        st.selectbox(page.t("fates.backend"), BACKENDS, **view.widget("b"))
        st.number_input(page.t("fates.seed"), 0, 9, **view.widget("seed"))
        with st.spinner(page.t("fates.busy", fates=len(ALLOCATORS))):
            found = shown_fates(page)
        slots = found[0].unwritten
        page.finding(
            "fates.seen",
            slots=len(slots),
            answers=len({fate.effect.faulty.token_ids for fate in found}),
            fates=len(found),
            same=sum(fate.same_text for fate in found),
        )
        page.glossary("uninitialised_memory", "input_scale")
    with stage:
        page.figure(
            figures.fates_figure(found, theme=theme(), lang=lang()),
            alt=page.t("fates.alt"),
            finding=figures.describe_fates(found, lang()),
            rows=lambda: figures.fate_rows(found),
        )
    page.table(("memory", "answer", "same", ">slot", ">nan", ">first"), _answers(page, found))
    first = found[0].unwritten[0]
    ones = next(fate for fate in opening if fate.allocator == "ones")
    page.prose("fates.text", name=first.name, error=percent(round(float(ones.effect.layer_error[-1]), 4)))


def _three_fates(page: Lesson, fates: Sequence[Fate]) -> None:
    """The complete twin and the three kinds of fate, while the numbers of the good one and the others wait for the
    reader's guess."""
    shown = [fate for name in OPENING for fate in fates if fate.allocator == name]
    nothing, well, wrong = shown
    page.figure(
        figures.fates_figure(
            shown,
            covered=[fate.allocator for fate in fates if fate not in shown],
            unmeasured=[well.allocator],
            theme=theme(),
            lang=lang(),
        ),
        alt=page.t("fates.alt"),
        finding=page.t(
            "fates.opening",
            prompt=DEMO_PROMPTS[PROMPT],
            whole=quoted(well.effect.healthy.text),
            slots=len(well.unwritten),
            well=quoted(well.text),
            wrong=quoted(wrong.text),
            answer=quoted(nothing.text),
            nan=percent(round(nothing.nan_share, 4)),
        ),
        rows=lambda: figures.fate_rows([nothing, wrong]),
    )


def _answers(page: Lesson, found: Sequence[Fate]) -> list[tuple[str, ...]]:
    """The twin's answer, then each fate's."""
    twin = found[0].effect.healthy.text
    rows = [(page.t("complete"), quoted(twin), page.t("yes"), "–", percent(0), "–")]
    for fate in found:
        value = fate.unwritten[0].value
        assert value is not None, "the first missing slot is a scalar"
        rows.append(
            (
                page.t(f"memory.{fate.allocator}"),
                quoted(fate.text),
                page.t("yes" if fate.same_text else "no"),
                exact(value),
                percent(round(fate.nan_share, 4)),
                "–" if fate.first_broken is None else f"L{fate.first_broken}",
            )
        )
    return rows


def _how_far_off(page: Lesson, asked: Sequence[Fate]) -> bool:
    """Asked: a load answers as the complete file does; how far are its numbers off?"""
    ones = next(fate for fate in asked if fate.allocator == OPENING[1])
    error = float(ones.effect.layer_error[-1])
    return predict.ask(
        f"{PAGE}.predict.fates",
        ("same", "little", "much"),
        answer="same" if error == 0 else "little" if error < LITTLE else "much",
        slots=len(asked[0].unwritten),
        little=percent(LITTLE),
        seed=next(fate.seed for fate in asked if fate.allocator == "random"),
        error=percent(round(error, 4)),
    )


# ------------------------------------------------------------------ per-backend maxima


def parameters_of(layer: int) -> LayerParameters:
    """A layer of the fully calibrated export, as loaded."""
    return caches.served(caches.Build(FULL)).parameters_of(layer)


def value_of(page: Lesson) -> float:
    """The value that the page's settings put into the slot."""
    view = page.view
    name = view["v"]
    if name == "own":
        with np.errstate(over="ignore"):
            return float(np.float32(view["own"]))  # a slot is a float32: beyond its range stands an infinity
    if name in _FIXED:
        return _FIXED[name]
    stored = parameters_of(view["layer"]).values("input_scale", view["projection"])[view["expert"]]
    return float(stored) * _FACTORS[name]


def spreads_of(page: Lesson) -> tuple[Spread, ...]:
    """Every backend's reading of the changed layer."""
    view = page.view
    return spread_value(parameters_of(view["layer"]), view["projection"], view["expert"], value_of(page))


def slot_of(page: Lesson) -> dict[str, object]:
    """The slot that is changed and what is put into it: what the rows to download are about."""
    view = page.view
    of = {"layer": view["layer"], "slot_of_expert": view["expert"], "projection": view["projection"]}
    return of | {"slot_holds": value_of(page)}


def maxima_part(page: Lesson) -> None:
    """One slot's value, and the experts that compute with another scale because of it."""
    stage, side = page.stage()
    with side:
        revealed = _who_notices(page)
    if not revealed:
        with stage:
            _as_stored(page)
        return
    view = page.view
    with side:
        pick_expert(page)
        st.segmented_control(page.t("pick.projection"), SLOTS, required=True, **view.widget("projection"))
        st.selectbox(
            page.t("maxima.value"), VALUES, format_func=lambda name: page.t(f"value.{name}"), **view.widget("v")
        )
        if view["v"] == "own":
            st.number_input(page.t("maxima.own"), format="%.6g", **view.widget("own"))
        found = spreads_of(page)
        stored = parameters_of(view["layer"]).values("input_scale", view["projection"])[view["expert"]]
        page.finding("maxima.seen", stored=exact(stored), value=exact(value_of(page)), expert=view["expert"])
        page.glossary("input_scale", "alpha")
    with stage:
        page.figure(
            figures.spread_figure(found, theme=theme(), lang=lang()),
            alt=page.t("maxima.alt"),
            finding=figures.describe_spread(found, lang()),
            rows=lambda: figures.spread_rows(found),
        )
    expert = view["expert"]
    page.table(
        ("backend", "rule", ">before", ">read", ">encode", ">alpha", ">reached"),
        _spread_table(page, found, expert),
    )
    trtllm = next(spread for spread in found if spread.scale_c is not None)
    assert trtllm.scale_c is not None
    page.prose("maxima.text", expert=expert, scale_c=four(trtllm.scale_c[expert]))
    page.prose("maxima.open", version=VLLM)


def opening_slot() -> dict[str, Any]:
    """The slot that the opening puts its own value into."""
    stored = parameters_of(0).values("input_scale", "down")[0]
    return {"layer": 0, "expert": 0, "projection": "down", "value": float(stored)}


def _as_stored(page: Lesson) -> None:
    """The layer as its file has it: what each backend reads before any slot is changed."""
    slot = opening_slot()
    layer = parameters_of(slot["layer"])
    found = spread_value(layer, slot["projection"], slot["expert"], slot["value"])
    page.figure(
        figures.spread_figure(found, theme=theme(), lang=lang()),
        alt=page.t("maxima.alt"),
        finding=page.t("maxima.stored", experts=layer.experts),
        rows=lambda: figures.spread_rows(found),
    )


def _spread_table(page: Lesson, found: Sequence[Spread], expert: int) -> list[tuple[str, ...]]:
    """The chosen expert's numbers, a row for neighbours that have the same: a dash where none is read, ``?`` where the
    facts do not say."""
    rows = []
    for cells, alike in groupby(found, key=lambda spread: _spread_cells(page, spread, expert)):
        rows.append((listed(spread.reading.name.removeprefix("vllm-") for spread in alike), *cells))
    return rows


def _spread_cells(page: Lesson, spread: Spread, expert: int) -> tuple[str, ...]:
    without = "?" if spread.changed is None else "–"
    parts = [without if part is None else four(part[expert]) for part in (spread.before, spread.after, spread.gscale)]
    alpha = "?" if spread.alpha is None else four(spread.alpha[expert])
    reached = "?" if spread.reached is None else str(spread.reached)
    return page.t(f"rule.{spread.reading.rule}"), *parts, alpha, reached


def _who_notices(page: Lesson) -> bool:
    """Asked: one zero, and one NaN, in a slot of down: how many experts does a per-layer maximum hand them to?"""
    layer = parameters_of(0)
    zero, nan, hidden = (
        {spread.reading.name: spread.reached for spread in spread_value(layer, projection, 0, value)}
        for projection, value in (("down", 0.0), ("down", float("nan")), ("gate", 0.0))
    )
    shared = "vllm-flashinfer-cutlass"
    answers = {(0, layer.experts): "hides", (1, 1): "one", (layer.experts, layer.experts): "all"}
    return predict.ask(
        f"{PAGE}.predict.maxima",
        tuple(answers.values()),
        answer=answers[zero[shared], nan[shared]],
        experts=layer.experts,
        zero=zero[shared],
        nan=nan[shared],
        alone=zero["vllm-cutlass"],
        gate=hidden["vllm-cutlass"],
    )
