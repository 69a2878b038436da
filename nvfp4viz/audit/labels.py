"""What the configuration calls the quantised weights, against how they are stored.

Servers choose a kernel and allocate its parameters by the label alone: NVFP4 tensors under ``FP8`` or ``INT4_AWQ``, or
left out of a ``MIXED_PRECISION`` list, stop every load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nvfp4viz.audit.facts import label_in
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import Linear
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.quantconfig import matches

CONFLICTS = (
    "config.conflict.method", "config.conflict.format", "config.conflict.format.linear", "config.conflict.left-out"
)  # fmt: skip
"""Texts after which the packed codes fit no parameter of what the server builds."""


def label_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> Iterator[Finding]:
    """``config.conflict``: another exporter's method, another number format, or experts that a list leaves out."""
    if checkpoint.quant_config.used is None:
        return
    wrong = _wrong_method(checkpoint, view)
    if wrong:
        yield wrong
        return
    found = list(_wrong_labels(checkpoint, view))
    yield from found or _wrong_linears(checkpoint, linears)


def expert_labels(checkpoint: Checkpoint, view: CanonicalView) -> list[str]:
    """What the configuration calls the experts of each of the model's own quantised layers."""
    layers = [layer for layer in view.moe_layers if view.dialects[layer] is not None]
    return [label_in(checkpoint, view, layer) or "" for layer in layers]


def _wrong_method(checkpoint: Checkpoint, view: CanonicalView) -> Finding | None:
    """The configuration names another exporter's method."""
    quant = checkpoint.quant_config
    dialects = {id(found): found for layer in view.moe_layers if (found := view.dialects[layer])}
    if not dialects or quant.used is None:
        return None
    blocks = {dialect.block for dialect in dialects.values()}
    named = {_block_of(label) or label for label in expert_labels(checkpoint, view) if label}
    method = quant.used.method
    fits = method is None or any(method.startswith(m) for dialect in dialects.values() for m in dialect.methods)
    # An allow-list or `moe_quant_algo` may set experts apart from the method of everything else.
    if fits or (named and named <= blocks and quant.sets_experts_apart):
        return None
    fill = {"method": printable(str(method), 60), "dialect": view.dialect}
    return make("config.conflict", "error", text="config.conflict.method", count=1, fill=fill)


def _block_of(label: str) -> str | None:
    """The kind of block that an algorithm's name contains: ``"W4A8_NVFP4_FP8"`` has NVFP4's."""
    return next((block for block in ("MXFP4", "NVFP4") if block in label), None)


def _wrong_labels(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """Layers whose experts are stored in another format than the configuration gives them; one finding a claim."""
    groups: dict[tuple[str | None, str], list[int]] = {}
    for layer in view.moe_layers:
        dialect = view.dialects[layer]
        if dialect is None:
            continue
        claims = {_claim(checkpoint, view.blocks[layer], view.module(layer, 0, kind).name) for kind in view.projections}
        for claim in claims - {""}:
            if claim is None or _block_of(claim) != dialect.block:
                groups.setdefault((claim, dialect.block), []).append(layer)
    for (claim, block), layers in groups.items():
        only = layers[0] if len(layers) == 1 and len(view.moe_layers) > 1 else None
        text = "config.conflict.left-out" if claim is None else "config.conflict.format"
        yield make(
            "config.conflict", "error", text=text, layer=only,
            tensors=[view.blocks[layer] for layer in layers],
            fill={
                "claimed": printable(claim or "", 60), "found": block, "layers": id_list(tuple(layers)),
                "numbers": layers,
            },
        )  # fmt: skip


def _claim(checkpoint: Checkpoint, *modules: str) -> str | None:
    """What the configuration gives a module: a name, None where an allow-list leaves it out, ``""`` for no word."""
    quant = checkpoint.quant_config
    used = quant.used
    assert used is not None
    label = quant.algo_of(*modules)
    if label is None and used.algo == "MIXED_PRECISION" and used.explicit:
        # vLLM takes the first entry below the experts too, under whatever name it stands there.
        return "" if any(section.lists_below(modules[0]) for section in quant.sections) else None
    if used.method == "compressed-tensors" and not used.explicit and label in (None, used.algo):
        return _said_of_groups(used.config_groups, modules[-1]) or label or ""
    # DeepSeek's method speaks of everything around the experts, and is old where `expert_dtype` is not there yet.
    return "" if label is None or (label == "FP8" and used.method == "fp8" and not used.expert_algo) else label


def _said_of_groups(groups: Any, module: str) -> str:
    """compressed-tensors whose groups give a module something else than four-bit floats, such as ``"8-bit float"``.

    A group that names the module, or matches it with ``re:``, goes before one that names a class (``"Linear"``).
    """
    named, classes = [], []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if isinstance(weights, dict) and isinstance(targets, list):
            patterns = [target for target in targets if isinstance(target, str)]
            if any(matches(pattern, module) for pattern in patterns):
                named.append(weights)
            elif any("." not in pattern and not pattern.startswith("re:") for pattern in patterns):
                classes.append(weights)
    kinds = [f"{each.get('num_bits')}-bit {each.get('type')}" for each in named or classes]
    return "" if "4-bit float" in kinds else ", ".join(dict.fromkeys(kinds))


def _wrong_linears(checkpoint: Checkpoint, linears: Sequence[Linear]) -> Iterator[Finding]:
    """The same for ordinary modules, where the configuration names them something that they are not."""
    quant = checkpoint.quant_config
    groups: dict[tuple[str, str], list[str]] = {}
    for linear in linears:
        if linear.format not in ("NVFP4", "MXFP4") or quant.is_excluded(linear.name):
            continue
        claim = _claim(checkpoint, linear.name)
        # Of an ordinary module that a list leaves out nothing is said: exporters name fused ones in several ways.
        if claim and _block_of(claim) != linear.format:
            groups.setdefault((claim, linear.format), []).append(linear.name)
    for (claim, found), names in groups.items():
        fill = {"claimed": printable(claim, 60), "found": found}
        yield make("config.conflict", "error", text="config.conflict.format.linear", tensors=names, fill=fill)
