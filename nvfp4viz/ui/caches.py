"""Bounded caches around pure library functions, keyed by content.  What sessions share is read-only.

``cache_resource`` hands every session the same object, so nothing here is ever changed after it was made: models keep
their arrays unwritable, and results are frozen records.  Keys hold the identity of the file, so a rebuilt sample is
read anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import streamlit as st

from nvfp4viz.ui.blas import use_one_thread
from nvfp4viz.ui.i18n import t

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nvfp4viz.audit import NaiveCheck, Report
    from nvfp4viz.checkpoint import Checkpoint
    from nvfp4viz.model import Generation
    from nvfp4viz.model.routing_log import RoutingLog
    from nvfp4viz.serving import ServedModel
    from nvfp4viz.serving.chain import ChainTrace
    from nvfp4viz.serving.remedies import RemedyResult

Stamp = tuple[tuple[str, int, int], ...]
Texts = tuple[tuple[str, tuple[str, ...]], ...]
"""Held-out texts by domain."""


Made = TypeVar("Made")


def kept(name: str, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives, made once in this session for as long as `key` stays the same; `name` tells it from others.

    For what belongs to one reader, such as an uploaded checkpoint; an error is not kept.
    """
    found: tuple[Hashable, Made] | None = st.session_state.get(name)
    if found is None or found[0] != key:
        found = key, make()
        st.session_state[name] = found
    return found[1]


@dataclass(frozen=True, slots=True)
class Build:
    """One way of serving a sample: what decides every number on the story page.

    Attributes
    ----------
    sample
        Id in ``sample_checkpoints``.
    backend, allocator, seed, per_token
        As in :func:`nvfp4viz.serving.load`.
    """

    sample: str
    backend: str = "vllm-cutlass"
    allocator: str = "zeros"
    seed: int = 0
    per_token: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What every remedy is asked: prompts, held-out texts by domain, tokens a reply."""

    prompts: tuple[str, ...]
    texts: Texts
    tokens: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A generation, how long it took when it was computed, in seconds, and what computed its experts."""

    generation: Generation
    seconds: float
    computed_on: str  # "cpu" or "cuda"


def sample_path(sample: str) -> Path:
    """Where a sample lies; one that is not shipped is built first, with progress on the page."""
    from sample_checkpoints import ensure, is_ready

    if is_ready(sample):
        return ensure(sample)
    with st.spinner(t("story.building_sample")):
        return ensure(sample)


def stamp(path: Path) -> Stamp:
    """Identity of a checkpoint's files: name, size and time of each."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())


def checkpoint(sample: str) -> Checkpoint:
    """A sample, opened: headers only."""
    path = sample_path(sample)
    return _checkpoint(str(path), stamp(path))


def served(build: Build) -> ServedModel:
    """A sample, loaded and converted for a backend."""
    path = sample_path(build.sample)
    return _served(build, str(path), stamp(path))


def likely_answer(prompt: str) -> tuple[int, ...]:
    """The tokens that the calibrated model gave when the samples were measured, for a prompt of the pages; else none.

    A guess that saves time and changes no bit: `nvfp4viz.model.generate`.
    """
    return _likely_answers().get(prompt, ())


@cache
def _likely_answers() -> dict[str, tuple[int, ...]]:
    from nvfp4viz.model import Tokenizer
    from nvfp4viz.model.corpus import DEMO_PROMPTS
    from nvfp4viz.model.tokenizer import EOS
    from sample_checkpoints import MEASURED

    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["answers"]
    encode = Tokenizer().encode  # begins with BOS, an answer does not
    return {DEMO_PROMPTS[domain]: (*encode(text)[1:], EOS) for domain, text in measured.items()}


def generation(build: Build, prompt: str, n: int, guessing: bool = True) -> Timed:
    """What a build answers to a prompt, with its trace; greedy, so the same everywhere.

    Without ``guessing`` token after token is computed, so that the time is that of any prompt.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.  Errors are not cached.
    """
    path = sample_path(build.sample)
    return _generation(build, prompt, n, guessing, str(path), stamp(path))


@st.cache_resource(max_entries=16, show_spinner=False)
def _checkpoint(path: str, identity: Stamp) -> Checkpoint:
    from nvfp4viz.checkpoint import open_checkpoint

    return open_checkpoint(path)


@st.cache_resource(max_entries=16, show_spinner=False)
def _served(build: Build, path: str, identity: Stamp) -> ServedModel:
    from nvfp4viz.serving import load

    use_one_thread()
    return load(
        _checkpoint(path, identity),
        allocator=build.allocator,
        seed=build.seed,
        backend=build.backend,
        per_token=build.per_token,
    )


@st.cache_resource(max_entries=256, show_spinner=False)
def _generation(build: Build, prompt: str, n: int, guessing: bool, path: str, identity: Stamp) -> Timed:
    from nvfp4viz.model import expect

    model = _served(build, path, identity)
    guess = expect(likely_answer(prompt)) if guessing else None
    start = perf_counter()
    generation = model.generate(prompt, n, guess=guess)
    return Timed(generation, perf_counter() - start, model.computes_on)


def calibration_counts(run: str) -> NDArray[np.int32]:
    """Tokens that each expert saw in a calibration run (``"news"`` or ``"all"``): ``(layers, experts)``, read-only."""
    from sample_checkpoints import CALIBRATION

    path = CALIBRATION / f"{run}.json"
    return _calibration_counts(str(path), stamp(path))


@st.cache_resource(max_entries=4, show_spinner=False)
def _calibration_counts(path: str, identity: Stamp) -> NDArray[np.int32]:
    from nvfp4viz.model.calibrate import CalibrationStats

    counts = CalibrationStats.read(Path(path)).counts.astype(np.int32)
    counts.setflags(write=False)
    return counts


def routing_log(name: str) -> RoutingLog:
    """A recorded log of ``sample_checkpoints/routing.npz``; read-only."""
    from sample_checkpoints import ROUTING

    return _routing_log(name, str(ROUTING), stamp(ROUTING))


@st.cache_resource(max_entries=16, show_spinner=False)
def _routing_log(name: str, path: str, identity: Stamp) -> RoutingLog:
    from nvfp4viz.model.routing_log import RoutingLog

    return RoutingLog.read(Path(path), name)


def chain(build: Build, healthy: Build, prompt: str, n: int) -> tuple[ChainTrace | None, ChainTrace | None]:
    """The first route of a prompt into an unwritten slot, and the same place in a healthy build."""
    paths = sample_path(build.sample), sample_path(healthy.sample)
    return _chain(build, healthy, prompt, n, *((str(path), stamp(path)) for path in paths))


def remedy(remedy_id: str, broken: Build, calibrated: Build, ask: Ask) -> RemedyResult:
    """A remedy, really run: loaded, asked, and its loss measured."""
    paths = sample_path(broken.sample), sample_path(calibrated.sample)
    return _remedy(remedy_id, broken, ask, *((str(path), stamp(path)) for path in paths))


def forget_remedies() -> None:
    """Drop the results, so that the next look runs them again."""
    _remedy.clear()


@st.cache_resource(max_entries=64, show_spinner=False)
def _chain(
    build: Build, healthy: Build, prompt: str, n: int, broken_file: tuple[str, Stamp], healthy_file: tuple[str, Stamp]
) -> tuple[ChainTrace | None, ChainTrace | None]:
    from nvfp4viz.serving.chain import trace_chain, twin_of

    found = trace_chain(_served(build, *broken_file), prompt, n=n)
    return found, None if found is None else twin_of(found, _served(healthy, *healthy_file), n=n)


@st.cache_resource(max_entries=128, show_spinner=False)
def _remedy(
    remedy_id: str, broken: Build, ask: Ask, broken_file: tuple[str, Stamp], calibrated_file: tuple[str, Stamp]
) -> RemedyResult:
    from nvfp4viz.serving.remedies import run_remedy

    use_one_thread()
    return run_remedy(
        remedy_id,
        ask.prompts,
        broken=_checkpoint(*broken_file),
        calibrated=_checkpoint(*calibrated_file),
        texts=dict(ask.texts),
        allocator=broken.allocator,
        seed=broken.seed,
        n=ask.tokens,
    )


def naive(sample: str) -> NaiveCheck:
    """The check that most people would write, on a sample."""
    path = sample_path(sample)
    return _naive(str(path), stamp(path))


def report(sample: str) -> Report:
    """The audit of a sample."""
    path = sample_path(sample)
    return _report(str(path), stamp(path))


@st.cache_resource(max_entries=16, show_spinner=False)
def _naive(path: str, identity: Stamp) -> NaiveCheck:
    from nvfp4viz.audit import naive_check

    return naive_check(_checkpoint(path, identity))


@st.cache_resource(max_entries=32, show_spinner=False)
def _report(path: str, identity: Stamp) -> Report:
    from nvfp4viz.audit import audit

    return audit(path)


def repair_losses(policy: str, value: float | None, texts: Texts) -> dict[str, float]:
    """What the broken sample loses on texts once a repair policy has mended it, in nats per character by domain.

    Raises
    ------
    InputError
        ``repair.*``.
    """
    path = sample_path("tiny-moe-nvfp4-holes")
    return _repair_losses(policy, value, texts, str(path), stamp(path))


def losses(build: Build, texts: Texts) -> dict[str, float]:
    """What a build loses on texts, in nats per character by domain."""
    path = sample_path(build.sample)
    return _losses(build, texts, str(path), stamp(path))


@st.cache_resource(max_entries=32, show_spinner=False)
def _repair_losses(policy: str, value: float | None, texts: Texts, path: str, identity: Stamp) -> dict[str, float]:
    from nvfp4viz.audit.repair import plan_repair, repaired_checkpoint
    from nvfp4viz.serving import load
    from nvfp4viz.serving.evaluation import evaluate
    from nvfp4viz.serving.remedies import REMEDIES

    use_one_thread()
    mended = repaired_checkpoint(plan_repair(_checkpoint(path, identity), policy, value=value))
    # Each as the story's remedy of that name is served.
    backend = REMEDIES["weight-only" if policy == "weight-only" else "peer-max"].backend
    served = load(mended, backend=backend)
    return {domain: evaluate(served, found) for domain, found in texts}


@st.cache_resource(max_entries=8, show_spinner=False)
def _losses(build: Build, texts: Texts, path: str, identity: Stamp) -> dict[str, float]:
    from nvfp4viz.serving.evaluation import evaluate

    served = _served(build, path, identity)
    return {domain: evaluate(served, found) for domain, found in texts}
