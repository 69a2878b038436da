"""The audit itself: open, look, explain."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nvfp4viz.audit.backends import activation_of, automatic_backend, is_clamped
from nvfp4viz.audit.biases import bias_findings, bias_shape_findings
from nvfp4viz.audit.configs import config_findings
from nvfp4viz.audit.containers import (
    changed_findings,
    container_findings,
    fingerprint,
    slow_findings,
    unread_findings,
)
from nvfp4viz.audit.coverage import SlotRow, coverage, slot_rows
from nvfp4viz.audit.facts import Facts, collect
from nvfp4viz.audit.findings import make, of_tower, ordered, with_drafts_named
from nvfp4viz.audit.forecast import forecast
from nvfp4viz.audit.fp8 import fp8_findings, partial_text
from nvfp4viz.audit.fp8_inputs import fp8_input_findings
from nvfp4viz.audit.fp8_numbers import fp8_number_findings
from nvfp4viz.audit.gates import gate_findings
from nvfp4viz.audit.kv import kv_findings
from nvfp4viz.audit.layers import layer_findings, no_layer_findings
from nvfp4viz.audit.linears import SIBLINGS, Linear, collect_linears, linear_findings
from nvfp4viz.audit.mlp_shapes import absent_findings, mlp_findings
from nvfp4viz.audit.notes import mixed_findings, note_findings
from nvfp4viz.audit.parallel import is_about_ranks, parallel_findings, split_linears
from nvfp4viz.audit.pre_quant import pre_quant_findings, pre_quant_of_linears
from nvfp4viz.audit.report import (
    SCHEMA,
    BackendForecast,
    ContainerInfo,
    Finding,
    FormatInfo,
    ModelInfo,
    Report,
    worst,
)
from nvfp4viz.audit.routers import router_findings
from nvfp4viz.audit.scales import (
    block_findings,
    convention_findings,
    pair_findings,
    scale_findings,
)
from nvfp4viz.audit.schemes import (
    is_promoted,
    is_weight_only,
    label_of,
    promotion,
    rank_holes,
    scheme_findings,
    tower_findings,
    vllm_refuses,
)
from nvfp4viz.audit.shapes import shape_findings
from nvfp4viz.audit.siblings import layer_apart_findings, sibling_findings
from nvfp4viz.audit.sisters import sister_findings
from nvfp4viz.audit.spread import spread_findings
from nvfp4viz.audit.texts import words
from nvfp4viz.audit.weightless import weightless_findings
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Source, canonical, canonical_of, inspect, printable


@dataclass(frozen=True, slots=True)
class Audit:
    """A report with what it was made from, for callers that go on looking."""

    report: Report
    checkpoint: Checkpoint
    view: CanonicalView
    facts: Facts
    linears: tuple[Linear, ...] = ()
    ep: int | None = None

    def rows(self) -> tuple[SlotRow, ...]:
        """Every slot with its status."""
        return tuple(slot_rows(self.facts, self.report.findings))


def audit(
    source: str | Path | Source | Checkpoint,
    *,
    gpu: str | None = None,
    shown_as: str | None = None,
    tp: int | None = None,
    ep: int | None = None,
    siblings: Sequence[tuple[str, ...]] = SIBLINGS,
) -> Report:
    """Audit a checkpoint: files, configuration, every scalar scale, and what each backend will make of it.

    Reads headers, side files and the experts' scalars; never a weight.

    Parameters
    ----------
    source
        A folder, a file, an ``*.index.json``, a `Source`, or a checkpoint that is open already.
    gpu
        Such as ``"sm_120"``: adds the backend that vLLM picks there.
    shown_as
        What the report calls the source; by default its own name without any path.
    tp, ep
        Tensor- and expert-parallel ranks: checks where they cut.
    siblings
        Ordinary modules that servers fuse, by the last part of their names.

    Raises
    ------
    CheckpointError
        ``source.*``: there is nothing to look at.  Files of which nothing can be read are a report.
    """
    return run_audit(source, gpu=gpu, shown_as=shown_as, tp=tp, ep=ep, siblings=siblings).report


def run_audit(
    source: str | Path | Source | Checkpoint,
    *,
    gpu: str | None = None,
    shown_as: str | None = None,
    tp: int | None = None,
    ep: int | None = None,
    siblings: Sequence[tuple[str, ...]] = SIBLINGS,
) -> Audit:
    """As `audit`, with everything that the report was made from."""
    # A file may hold any bits, signalling NaN among them; the findings speak of them, NumPy need not.
    with without_collector(), np.errstate(all="ignore"):
        # What this audit cannot read, another may.
        checkpoint = source.reopened() if isinstance(source, Checkpoint) else inspect(source)
        done = _audit(checkpoint, shown_as, siblings)
        done = done if tp is None and ep is None else for_ranks(done, tp, ep)
    return done if gpu is None else for_gpu(done, gpu)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector from walking half a million new records, none of them garbage, again and again.

    In a server with a large heap that walking is more than half of an audit's time.  Of two that overlap, the one that
    came first turns the collector on again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def for_gpu(done: Audit, gpu: str) -> Audit:
    """The same audit with the backend that vLLM picks on a GPU (``"sm_120"``), none for plain experts."""
    scheme = _served_scheme(done.facts)
    mxfp4 = done.view.dialect if done.view.scheme == "MXFP4" else None
    config = done.checkpoint.config or {}
    auto = automatic_backend(
        gpu, activation_of(config), scheme.weight_only or scheme.promoted, mxfp4, is_clamped(config)
    )
    plain = done.report.format.scheme == "UNQUANTISED" and not done.report.backends
    auto = None if plain or vllm_refuses(done.checkpoint) else auto
    return replace(done, report=msgspec.structs.replace(done.report, auto=auto, gpu=gpu))


def for_ranks(done: Audit, tp: int | None, ep: int | None) -> Audit:
    """The same audit for experts split over tensor- and expert-parallel ranks (None: not asked); reads nothing."""
    if not (done.view.complete and done.view.moe_layers):
        return done
    kept = [item for item in done.report.findings if not is_about_ranks(item)]
    told = [*parallel_findings(done.facts, tp, ep), *split_linears(done.facts, done.linears, tp)]
    findings = ordered([*kept, *told])
    return replace(
        done,
        ep=ep,
        report=msgspec.structs.replace(
            done.report,
            verdict=worst([item.severity for item in findings]),
            findings=findings,
            backends=backend_forecasts(done.facts, findings, ep),
        ),
    )


def backend_forecasts(facts: Facts, findings: Sequence[Finding], ep: int | None = None) -> tuple[BackendForecast, ...]:
    """The forecasts, where some layer's experts have a scheme.

    None where files were not read, which may hold worse, nor of one shard alone: each forecast is about the whole.  Of
    experts that are gone from all layers the configuration says which scheme they had.
    """
    view = facts.view
    if facts.checkpoint.unread or facts.checkpoint.beside:
        return ()
    algo = next((item.params["algo"] for item in findings if item.text.startswith("expert.absent.all")), None)
    if algo is not None:
        return forecast(
            facts, findings, promoted=is_promoted(facts.checkpoint), weight_only=algo.startswith("W4A16"),
            refused=vllm_refuses(facts.checkpoint), block="MXFP4" if "MXFP4" in algo else "NVFP4", ep=ep,
        )  # fmt: skip
    if not (view.complete and any(facts.block(layer) for layer in view.moe_layers)):
        return ()
    scheme, refused = _served_scheme(facts), vllm_refuses(facts.checkpoint)
    return forecast(facts, findings, promoted=scheme.promoted, weight_only=scheme.weight_only, refused=refused, ep=ep)


def _audit(checkpoint: Checkpoint, shown_as: str | None, siblings: Sequence[tuple[str, ...]]) -> Audit:
    before = checkpoint.bytes_read
    view = canonical(checkpoint)
    facts = collect(checkpoint, view) if view.complete else Facts(checkpoint, view)
    linears = collect_linears(checkpoint, view)
    findings = list(config_findings(checkpoint, view, linears))
    # Where nothing can be read there is nothing to say about the format.
    readable = any(header.readable for header in checkpoint.files)
    in_full = view.complete and bool(view.moe_layers)
    scheme = _served_scheme(facts)
    if in_full:
        findings += _expert_findings(facts, scheme, checkpoint.config or {})
        findings += layer_findings(facts)
        findings += _other_towers(facts)
        findings += note_findings(facts, linears)
        findings += parallel_findings(facts, None, None)
    if readable:
        findings += _one_shard(checkpoint)
        findings += no_layer_findings(checkpoint, view)
        findings += _partial(checkpoint, view, in_full)
        # Of a model without experts nothing but its modules tells.
        unread = in_full and not scheme.activations
        findings += linear_findings(checkpoint, facts, linears, siblings, weight_only=unread)
        # Of FP8 experts alone nothing else asks for the sizes.
        findings += () if view.complete else shape_findings(facts, checkpoint.config or {})
        findings += () if view.complete else router_findings(facts, checkpoint.config or {})
        findings += pre_quant_of_linears(checkpoint, view, linears)
        findings += fp8_findings(checkpoint, view, linears)
        findings += weightless_findings(checkpoint, view, linears)
        findings += fp8_number_findings(checkpoint, view)
        findings += mixed_findings(checkpoint, view, linears)
        findings += fp8_input_findings(checkpoint, view, linears, siblings)
        findings += mlp_findings(checkpoint, view, linears)
        findings += absent_findings(checkpoint, view, linears) if in_full else ()
        findings += gate_findings(checkpoint, view, linears)
        findings += sister_findings(checkpoint, view, linears)
        findings += bias_findings(checkpoint, view)
        sizes = any(item.code == "weight.shape" or item.text.startswith("config.conflict.size") for item in findings)
        findings += () if sizes else bias_shape_findings(checkpoint, view)
        findings += kv_findings(checkpoint, view)
    # A file may be lost while its numbers are read.
    findings = [*container_findings(checkpoint), *findings, *(unread_findings(checkpoint) if readable else ())]
    findings += [*changed_findings(checkpoint), *slow_findings(checkpoint)]
    findings = with_drafts_named(findings, view)
    report = Report(
        schema=SCHEMA,
        source=shown_as if shown_as is not None else checkpoint.name,
        fingerprint=fingerprint(checkpoint.tensors),
        verdict=worst([item.severity for item in findings]),
        format=FormatInfo(
            view.dialect if readable else "unknown", view.scheme, checkpoint.quant_config.files, view.group_size
        ),
        model=_model(view),
        container=_container(checkpoint, checkpoint.opening_bytes + checkpoint.bytes_read - before),
        coverage=coverage(facts, findings, activations=scheme.activations or scheme.mislabelled),
        findings=ordered(findings),
        backends=backend_forecasts(facts, findings),
    )
    return Audit(report, checkpoint, view, facts, linears)


def _expert_findings(facts: Facts, scheme: _Scheme, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything about the routed experts of one view, and of the configuration that it belongs to."""
    yield from scheme_findings(facts)
    yield from pre_quant_findings(facts)
    holes = rank_holes(facts) if scheme.activations else {}
    yield from scale_findings(facts, activations=scheme.activations, rank_holes=holes)
    yield from sibling_findings(facts) if scheme.activations else ()
    yield from layer_apart_findings(facts, "input_scale") if scheme.activations else ()
    yield from layer_apart_findings(facts, "weight_scale_2")
    yield from spread_findings(facts, activations=scheme.activations)
    yield from convention_findings(facts)
    yield from pair_findings(facts)
    yield from block_findings(facts)
    yield from shape_findings(facts, config)
    yield from router_findings(facts, config)


def _other_towers(own: Facts) -> Iterator[Finding]:
    """The same for experts of other towers, whose layers are numbered from zero again; they join ``own.towers``."""
    checkpoint, left = own.checkpoint, own.view.other_blocks
    # The configuration's numbers are the main tower's.
    for _ in range(8):
        if not left:
            return
        lost, whole = checkpoint.unreadable, not checkpoint.blind_files
        tower = canonical_of(checkpoint.tensors, None, checkpoint.quant_config, unreadable=lost, whole=whole, only=left)
        if tower.complete:
            facts = collect(checkpoint, tower)
            facts.tower = tower.family
            own.towers += (facts,)
            for item in _expert_findings(facts, _served_scheme(facts), {}):
                yield of_tower(item, facts.tower)
        yield from tower_findings(checkpoint, tower)
        left = tower.other_blocks


def describe(item: Finding | BackendForecast, language: str = "en") -> tuple[str, str]:
    """Message and advice in a language (a forecast's advice is empty)."""
    return words(item.text, item.params, language)


def _one_shard(checkpoint: Checkpoint) -> list[Finding]:
    """A shard that was asked for alone: the others of its checkpoint were not looked at."""
    others = len(checkpoint.beside)
    if not others:
        return []
    if checkpoint.part is not None:
        text, fill = f"audit.partial.one-shard.{checkpoint.part}", {"file": printable(checkpoint.files[0].file, 200)}
        return [make("audit.partial", "info", text=text, count=1, fill=fill)]
    fill = {"file": printable(checkpoint.source.only or "", 200), "others": others}
    return [make("audit.partial", "info", text="audit.partial.one-shard", count=others, fill=fill)]


def _partial(checkpoint: Checkpoint, view: CanonicalView, in_full: bool) -> list[Finding]:
    """What is not looked into, so that silence is not taken for health."""
    if view.moe_layers and not view.complete:
        return [make("audit.partial", "info", text=partial_text(checkpoint, view), count=1)]
    if not in_full:
        return [make("audit.partial", "info", text="audit.partial.no-experts", count=1)]
    out = []
    guessed = [view.blocks[at] for at, found in view.dialects.items() if found and "weight" not in found.certain]
    if guessed:
        out.append(make("audit.partial", "info", text="audit.partial.guessed", tensors=guessed))
    if view.other_blocks:
        out.append(make("audit.partial", "info", text="audit.partial.towers", tensors=view.other_blocks))
    return out


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Which scales matter: what the tensors have, and how the configuration makes servers read them.

    Attributes
    ----------
    activations
        Activation scales are needed.
    weight_only
        Labelled weight-only, or without any label and without activation scales.
    promoted
        Labelled W4A4, and vLLM's rule serves it as W4A16.
    mislabelled
        Labelled W4A4 without any activation scale.
    """

    activations: bool
    weight_only: bool
    promoted: bool
    mislabelled: bool


def _served_scheme(facts: Facts) -> _Scheme:
    label = label_of(facts) or ""
    claims, reason, _ = promotion(facts)
    bare = is_weight_only(facts)
    weight_only = label.startswith("W4A16") or (bare and not claims)
    promoted = claims and reason == "promoted"
    # What vLLM promotes other servers read by its name.
    activations = bool(facts.view.activation_blocks) and not weight_only
    return _Scheme(activations, weight_only, promoted, bare and claims)


def _model(view: CanonicalView) -> ModelInfo:
    return ModelInfo(
        view.architecture, view.layers, view.moe_layers, view.experts, view.projections, view.top_k, view.draft_layers
    )


def _container(checkpoint: Checkpoint, bytes_read: int) -> ContainerInfo:
    return ContainerInfo(
        files=len(checkpoint.files),
        tensors=len(checkpoint.tensors),
        bytes=checkpoint.nbytes,
        header_bytes=checkpoint.header_bytes,
        bytes_read=bytes_read,
        side_bytes=checkpoint.side_bytes,
    )
