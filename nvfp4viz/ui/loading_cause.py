"""Two parts of the page on loading: how the cause is found, and the guard that makes it unnecessary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.errors import ServingError
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches, errors, predict, snippets
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.loading_parts import BACKENDS, HOLED, PAGE, PROMPT, TOKENS, fate, quoted, twin_of
from nvfp4viz.ui.numbers import percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvfp4viz.serving.bisect import Bisection
    from nvfp4viz.serving.fates import Fate, MeasureResult
    from nvfp4viz.ui.lesson import Lesson

SEEDS = (0, 1, 2)
LOADS = (("zeros", 0), *(("random", seed) for seed in SEEDS))
"""The file on fresh memory, then on a cached block of each start: allocators and seeds."""
GUARDED = ("tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full")


@st.cache_resource(max_entries=64, show_spinner=False)
def _bisection(allocator: str, prompt: str, seed: int, identity: caches.Stamp) -> Bisection:
    from nvfp4viz.serving.bisect import bisect_experts

    suspect = caches.served(caches.Build(HOLED, allocator=allocator, seed=seed))
    return bisect_experts(suspect, twin_of(BACKENDS[0]), DEMO_PROMPTS[prompt])


def bisection_of(page: Lesson) -> Bisection:
    """The search on the page's settings."""
    return _bisection(page.view["a"], page.view["p"], page.view["seed"], caches.stamp(caches.sample_path(HOLED)))


def cause_part(page: Lesson) -> None:
    """Three instruments, in the order in which they narrow it down."""
    if not _how_many_runs(page):
        _harness(page)
        return
    view = page.view
    left, middle, right = st.columns(3)
    left.selectbox(
        page.t("fates.prompt"), tuple(DEMO_PROMPTS), format_func=lambda n: page.t(f"prompt.{n}"), **view.widget("p")
    )
    middle.selectbox(
        page.t("chain.memory"), ALLOCATORS, format_func=lambda name: page.t(f"memory.{name}"), **view.widget("a")
    )
    right.number_input(page.t("fates.seed"), 0, 9, **view.widget("seed"))
    _harness(page)
    _allocator_off(page)
    _halving(page)


def _harness_runs(page: Lesson) -> list[tuple[str, str]]:
    """Both paths over the same bytes, with what each answers."""
    prompt, allocator, seed = DEMO_PROMPTS[page.view["p"]], page.view["a"], page.view["seed"]
    seed = seed if allocator == "random" else 0
    builds = (
        caches.Build(HOLED, backend=backend, allocator=allocator, seed=seed)
        for backend in ("vllm-cutlass", "vllm-marlin")
    )
    return [(build.backend, caches.generation(build, prompt, TOKENS).generation.text) for build in builds]


def _harness(page: Lesson) -> None:
    """Is it the file's weights?  The same bytes through a path that shares nothing with the suspect."""
    page.heading("cause.harness")
    page.table(
        ("path", "answer"),
        [(page.t(f"harness.{name.replace('-', '_')}"), quoted(text)) for name, text in _harness_runs(page)],
    )
    page.prose("cause.harness_text")


def _loads(prompt: str) -> list[Fate]:
    return [fate(allocator, prompt, BACKENDS[0], seed) for allocator, seed in LOADS]


def _allocator_off(page: Lesson) -> None:
    """Does it depend on memory?  The same file and code, with and without recycled blocks."""
    page.heading("cause.caching")
    with st.spinner(page.t("fates.busy", fates=len(SEEDS))):
        loads = _loads(page.view["p"])
    names = ("`PYTORCH_NO_CUDA_MEMORY_CACHING=1`", *(page.t("cause.cached", seed=seed) for seed in SEEDS))
    page.table(
        ("setting", "memory", "answer", ">nan"),
        [
            (name, page.t(f"memory.{fate.allocator}"), quoted(fate.text), percent(round(fate.nan_share, 4)))
            for name, fate in zip(names, loads, strict=True)
        ],
    )
    page.prose("cause.caching_text")
    answers = len({fate.effect.faulty.token_ids for fate in loads})
    page.finding("cause.memory_seen", answers=answers, loads=len(loads))


def _halving(page: Lesson) -> None:
    """Which expert?  Halve the layers, then the experts of one layer."""
    page.heading("cause.bisection")
    found = bisection_of(page)
    page.table(
        (">run", "over", "suspect", "differs", "nan_logits"),
        [
            (
                str(number),
                page.t("over.layers") if step.over == "layers" else page.t("over.experts", layer=step.layer),
                f"{step.first}–{step.last}",
                page.t("yes" if step.differs else "no"),
                page.t("yes" if step.nan else "no"),
            )
            for number, step in enumerate(found.steps, start=1)
        ],
    )
    if found.layer is None or found.expert is None:
        page.finding("cause.untouched")
        return
    view = caches.served(caches.Build(HOLED)).view
    slot = view.slot(found.layer, found.expert, "down", "input_scale")
    page.finding(
        "cause.found" if slot.entry is None else "cause.found_present",
        layer=found.layer,
        expert=found.expert,
        runs=len(found.steps),
        name=slot.name,
    )


def cause_rows(page: Lesson) -> list[dict[str, object]]:
    """The runs of all three instruments, each with the columns that it has."""
    columns = ("instrument", "backend", "memory", "seed", "answer", "nan_share", "over", "layer", "first", "last")
    empty = dict.fromkeys((*columns, "logits_differ", "logits_nan"))
    memory = {"memory": page.view["a"], "seed": page.view["seed"]}
    harness = [
        {"instrument": "harness", "backend": backend, "answer": text} | memory for backend, text in _harness_runs(page)
    ]
    allocator = [
        {"instrument": "allocator", "backend": f.backend, "memory": f.allocator, "seed": f.seed, "answer": f.text}
        | {"nan_share": f.nan_share}
        for f in _loads(page.view["p"])
    ]
    bisection = [
        {"instrument": "bisection", "over": step.over, "layer": step.layer, "first": step.first, "last": step.last}
        | {"logits_differ": step.differs, "logits_nan": step.nan}
        | memory
        for step in bisection_of(page).steps
    ]
    return about({"prompt": page.view["p"]}, [empty | row for row in (*harness, *allocator, *bisection)])


def _how_many_runs(page: Lesson) -> bool:
    """Asked: how many runs of the prompt find one expert among all?"""
    found = _bisection("zeros", PROMPT, 0, caches.stamp(caches.sample_path(HOLED)))
    layers = caches.served(caches.Build(HOLED)).parameters
    experts = sum(parameters.experts for parameters in layers)
    runs = len(found.steps)
    answer = "few" if runs <= 2 * experts.bit_length() else "half" if runs <= experts // 2 else "each"
    return predict.ask(
        f"{PAGE}.predict.cause",
        ("few", "half", "each"),
        answer=answer,
        experts=experts,
        half=experts // 2,
        some=experts.bit_length(),
        runs=runs,
        layer=found.layer,
        expert=found.expert,
    )


# ------------------------------------------------------------------ the guard


@st.cache_resource(max_entries=8, show_spinner=False)
def _measures(seed: int, identity: caches.Stamp) -> tuple[MeasureResult, ...]:
    from nvfp4viz.serving.fates import measures

    return measures(caches.checkpoint(HOLED), caches.served(caches.Build(HOLED)).view, seed)


def measures_of(seed: int) -> tuple[MeasureResult, ...]:
    """What each measure finds in the holed file."""
    return _measures(seed, caches.stamp(caches.sample_path(HOLED)))


def guard_rows(page: Lesson) -> list[dict[str, object]]:
    """How many of the slots that the file does not fill each measure finds, by what memory held."""
    seed = page.view["seed"]
    rows = [
        {"measure": found.measure, "memory": found.allocator, "found": found.found, "expected": found.expected}
        for found in measures_of(seed)
    ]
    return about({"seed": seed}, rows)


def guard_part(page: Lesson) -> None:
    """Three measures compared, the function, and what it says."""
    if not _values_alone(page):
        _found_slots(page, shown=ALLOCATORS[:1])
        return
    _found_slots(page)
    page.prose("guard.measures", vllm=VLLM)
    page.heading("guard.function")
    page.prose("guard.use")
    source = snippets.fill("loading_guard", {"expert": 2})
    st.code(source, language="python")
    st.caption(t("ui.code.output"))
    st.code(snippets.run(source), language=None, wrap_lines=True)
    page.heading("guard.real")
    view = page.view
    left, right = st.columns(2)
    left.selectbox(page.t("guard.file"), GUARDED, **view.widget("file"))
    right.selectbox(page.t("fates.backend"), BACKENDS, **view.widget("b"))
    try:
        _guarded(view["file"], view["b"])
    except ServingError as error:
        errors.show(error)
        return
    page.finding("guard.passes", file=view["file"], backend=view["b"])


def _found_slots(page: Lesson, shown: Sequence[str] = ALLOCATORS) -> None:
    """What each measure finds, by what memory held; a question mark where it is not `shown`."""
    found = measures_of(page.view["seed"])
    counts = {(result.measure, result.allocator): f"{result.found} / {result.expected}" for result in found}
    names = tuple(dict.fromkeys(result.measure for result in found))
    page.table(
        ("memory", *(f">{name}" for name in names)),
        [
            (page.t(f"memory.{allocator}"), *(counts[name, allocator] if allocator in shown else "?" for name in names))
            for allocator in ALLOCATORS
        ],
    )


def _guarded(sample: str, backend: str) -> None:
    """Load with the guard on; it reads nothing that a backend does not read.

    Raises
    ------
    ServingError
        ``serving.guard``.
    """
    from nvfp4viz.serving import load

    load(caches.checkpoint(sample), backend=backend, guard=True, device="cpu")


def _values_alone(page: Lesson) -> bool:
    """Asked: is a look at the loaded values enough?"""
    found = [result for result in measures_of(0) if result.measure == "values"]
    missed = [result for result in found if result.found < result.expected]
    answer = "all" if not missed else "none" if len(missed) == len(found) else "some"
    return predict.ask(
        f"{PAGE}.predict.guard",
        ("all", "some", "none"),
        answer=answer,
        slots=found[0].expected,
        fates=len(found),
        whole=len(found) - len(missed),
        nothing=sum(result.found == 0 for result in found),
    )
