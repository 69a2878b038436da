"""Findings about the configuration: absent, contradictory, incomplete, or against the tensors."""

from __future__ import annotations

from collections.abc import Iterator

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, SourceConfig
from nvfp4viz.checkpoint.canonical import EXPERT_KEYS, config_number
from nvfp4viz.checkpoint.problems import printable


def config_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """All ``config.*`` findings but ``config.invalid``, which opening the files has found already."""
    sections = checkpoint.quant_config.sections
    quantised = view.scheme != "UNQUANTISED"
    broken = {item.file for item in checkpoint.problems if item.code == "config.invalid" and item.severity == "error"}
    if quantised and not sections and not broken:
        yield _absent(checkpoint)
    for section in sections:
        if section.missing:
            fill = {"file": section.file, "fields": ", ".join(section.missing)}
            yield make("config.incomplete", "backend", count=len(section.missing), fill=fill)
    if len(sections) == 2:
        yield from _contradictions(*sections)
    yield from _against_tensors(checkpoint, view)


def _absent(checkpoint: Checkpoint) -> Finding:
    """A lone file says nothing about its configuration; a folder without one does not load as quantised."""
    if checkpoint.config is not None:
        return make("config.absent", "error", count=1)
    lone = checkpoint.source.only is not None or not any(n.endswith(".json") for n in checkpoint.source.files())
    return make("config.absent", "info" if lone else "warn", text="config.absent.no-files", count=1)


def _contradictions(first: SourceConfig, second: SourceConfig) -> Iterator[Finding]:
    """The two files differ; loaders read one or the other."""
    fill: dict[str, object]
    for key, one, two in (
        ("quant_algo", first.algo, second.algo),
        ("group_size", first.group_size, second.group_size),
    ):
        if one is not None and two is not None and one != two:
            fill = {"key": key, "first": printable(str(one), 60), "second": printable(str(two), 60)}
            yield make("config.conflict", "error", text="config.conflict.files", count=1, fill=fill)
    if first.exclude is not None and second.exclude is not None:
        differing = sorted(set(first.exclude) ^ set(second.exclude))
        if differing:
            fill = {"pattern": printable(differing[0]), "differing": len(differing)}
            yield make("config.conflict", "warn", text="config.conflict.exclude", count=len(differing), fill=fill)


def _against_tensors(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    quant = checkpoint.quant_config
    used = quant.used
    fill: dict[str, object]
    # vLLM knows modelopt, modelopt_fp4 and modelopt_mixed.
    if view.complete and view.moe_layers and used and used.method and not used.method.startswith(view.dialect):
        fill = {"method": printable(used.method, 60), "dialect": view.dialect}
        yield make("config.conflict", "error", text="config.conflict.method", count=1, fill=fill)
    if view.scheme == "W4A4" and (quant.algo or "").startswith("W4A16"):
        yield make("config.conflict", "warn", text="config.conflict.weight-only", count=1)
    claimed = config_number(checkpoint.config or {}, EXPERT_KEYS)
    if claimed is not None and view.moe_layers and view.experts > claimed:
        fill = {"claimed": claimed, "found": view.experts}
        yield make("config.conflict", "error", text="config.conflict.experts", count=view.experts - claimed, fill=fill)
    # An allow-list that leaves something out says nothing about exclusion.
    if quant.algo != "MIXED_PRECISION":
        excluded = [name for name in _second_levels(checkpoint, view) if quant.is_excluded(name.rpartition(".")[0])]
        if excluded:
            yield make("config.excluded-but-quantised", "warn", tensors=excluded)


def _second_levels(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[str]:
    """Second-level weight scales: of every ordinary module, and of one expert per layer and projection.

    Patterns name layers or kinds of modules; 40,000 expert names times 500 patterns would cost seconds.
    """
    yield from (
        name
        for name in checkpoint.tensors
        if name.endswith((".weight_scale_2", ".weight_global_scale")) and ".experts." not in name
    )
    for layer in view.moe_layers:
        for projection in view.projections:
            entries = (
                view.module(layer, expert, projection).tensors.get("weight_scale_2")
                for expert in range(view.experts_in[layer])
            )
            first = next((entry for entry in entries if entry is not None), None)
            if first is not None:
                yield first.name
