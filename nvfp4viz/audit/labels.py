"""What the configuration calls the quantised weights, against how they are stored.

Servers choose a kernel and allocate its parameters by the label alone: NVFP4 tensors under ``FP8`` or ``INT4_AWQ``, or
left out of a ``MIXED_PRECISION`` list, stop every load.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from nvfp4viz.audit.facts import label_in
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8, SIBLINGS, Linear, fp8_scale
from nvfp4viz.audit.module_names import is_draft, is_quantised_by_all, without_numbers
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, SourceConfig
from nvfp4viz.checkpoint.dialects.collect import layer_number
from nvfp4viz.checkpoint.module_rules import group_algo
from nvfp4viz.checkpoint.problems import printable

CONFLICTS = (
    "config.conflict.method", "config.conflict.format", "config.conflict.format.linear", "config.conflict.left-out",
    "config.conflict.left-out.linear",
    "config.conflict.untargeted", "config.conflict.untargeted.linear", "config.conflict.method.one-file",
    "config.conflict.format.one-file",
)  # fmt: skip
"""Texts after which the packed codes fit no parameter of what the server builds."""

TWO_LABELS = ("config.conflict.moe-algo", "config.conflict.packing")
"""Texts about one right and one wrong label; ``engines`` of such a finding read the wrong one."""


def label_findings(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], lists: QuantConfig
) -> Iterator[Finding]:
    """``config.conflict``: another exporter's method, another number format, or experts that a list leaves out.

    Parameters
    ----------
    lists
        The sections whose exclude lists count.
    """
    if checkpoint.quant_config.used is None:
        return
    found = list(_wrong_labels(checkpoint, view, lists))
    wrong = _wrong_method(checkpoint, view)
    # Where something speaks of the experts by name, what it calls them says more than the method.
    if wrong and not (found and checkpoint.quant_config.sets_experts_apart):
        yield wrong
        return
    yield from found
    yield from _two_names(checkpoint, view)
    yield from _wrong_packing(checkpoint, view, linears)
    told = {layer for item in found for layer in item.params["numbers"]}
    yield from _wrong_experts(checkpoint, view, told, lists)
    # Where the experts are not what the configuration says, it says nothing new of their neighbours.
    if not any(item.severity == "error" for item in found):
        yield from _wrong_linears(checkpoint, view, linears, lists)
        yield from _left_out_linears(checkpoint, view, linears)
    yield from _no_static_inputs(checkpoint, view)


def expert_labels(checkpoint: Checkpoint, view: CanonicalView) -> list[str]:
    """What the configuration calls the experts of each of the model's own quantised layers."""
    layers = [layer for layer in view.moe_layers if view.dialects[layer] is not None]
    return [label_in(checkpoint, view, layer) or "" for layer in layers]


def expert_conflicts(checkpoint: Checkpoint, view: CanonicalView, section: SourceConfig) -> list[Finding]:
    """Errors about the routed experts' label, were one of two files the only one."""
    alone = copy.copy(checkpoint)
    alone.quant_config = QuantConfig((section,))
    method = _wrong_method(alone, view)
    found = [method] if method is not None else list(_wrong_labels(alone, view, alone.quant_config))
    return [item for item in found if item.severity == "error" and item.text in NAMED]


# What a list leaves out, another file may name.
NAMED = ("config.conflict.method", "config.conflict.format")


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


def _no_static_inputs(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """Quark's ``is_dynamic: false`` beside MXFP4 experts of which none has an activation scale, under any name."""
    used = checkpoint.quant_config.used
    layers = [layer for layer in view.moe_layers if (found := view.dialects[layer]) and found.block == "MXFP4"]
    if not layers or used is None or not used.static_inputs or checkpoint.blind_files:
        return
    names = (*checkpoint.tensors, *checkpoint.unreadable)
    if not any("expert" in name and ("input_scale" in name or "input_quantizer" in name) for name in names):
        yield make("config.conflict", "warn", text="config.conflict.static-inputs", count=len(layers))


def _block_of(label: str) -> str | None:
    """The kind of block that an algorithm's name contains: ``"W4A8_NVFP4_FP8"`` has NVFP4's."""
    return next((block for block in ("MXFP4", "NVFP4") if block in label), None)


def _wrong_labels(checkpoint: Checkpoint, view: CanonicalView, lists: QuantConfig) -> Iterator[Finding]:
    """Layers whose experts are stored in another format than the configuration gives them; one finding a claim."""
    groups: dict[tuple[str | None, str, bool], list[int]] = {}
    for layer in (*view.moe_layers, *view.draft_layers):
        draft, found = layer in view.draft_layers, _stored_in(lists, view, layer)
        if found is None or (draft and is_native(checkpoint, found)):
            continue
        names = [view.module(layer, 0, kind).name for kind in view.projections_in[layer]]
        claims = {_claim(checkpoint, view.blocks[layer], name) for name in names}
        for claim in claims - {""}:
            named = _block_of(claim) if claim else None
            # FP8 contradicts a four-bit name and nothing else.
            if named is not None if found == "FP8" else named != found:
                groups.setdefault((claim, found, draft), []).append(layer)
    mixed = checkpoint.quant_config.algo == "MIXED_PRECISION"
    for (claim, block, draft), layers in groups.items():
        # One word that is wrong about everything is one cause.
        if draft and (claim, block, False) in groups:
            continue
        only = layers[0] if not draft and len(layers) == 1 and len(view.moe_layers) > 1 else None
        kind = "format" if claim is not None else "left-out" if mixed else "untargeted"
        # Only speculative decoding loads a draft layer.
        yield make(
            "config.conflict", "warn" if draft else "error", text=f"config.conflict.{kind}{'.draft' * draft}",
            layer=only, tensors=[view.blocks[layer] for layer in layers],
            fill={"claimed": printable(claim or "", 60), "found": block, **layer_list(layers)},
        )  # fmt: skip


def _two_names(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """``moe_quant_algo`` that no layer's experts have, beside something that names them as they are stored."""
    quant = checkpoint.quant_config
    stored = {layer: found.block for layer in view.moe_layers if (found := view.dialects[layer])}
    for claim in dict.fromkeys(section.moe_algo for section in quant.sections):
        if claim is None or _block_of(claim) in stored.values():
            continue
        layers = [
            layer for layer, block in stored.items()
            if _block_of(_claim(checkpoint, view.blocks[layer], _first_module(view, layer)) or "") == block
        ]  # fmt: skip
        if layers:
            fill = {
                "claimed": printable(claim, 60), "found": ", ".join(sorted({stored[layer] for layer in layers})),
                **layer_list(layers), "engines": ("vllm", "tensorrt-llm"),
            }  # fmt: skip
            names = [view.blocks[layer] for layer in layers]
            yield make("config.conflict", "backend", text="config.conflict.moe-algo", tensors=names, fill=fill)


def _first_module(view: CanonicalView, layer: int) -> str:
    return view.module(layer, 0, view.projections_in[layer][0]).name


# compressed-tensors' names for how codes are packed.
_PACKINGS = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized"}


def _wrong_packing(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> Iterator[Finding]:
    """``format`` of compressed-tensors, or of one of its groups, that is another packing than the group's numbers."""
    used = checkpoint.quant_config.used
    if used is None or used.method != "compressed-tensors" or not isinstance(used.config_groups, dict):
        return
    said: dict[tuple[str, str], set[str]] = {}
    for group in used.config_groups.values():
        block = _block_of(group_algo(group)) if isinstance(group, dict) else None
        own = group.get("format") if isinstance(group, dict) else None
        form = own if isinstance(own, str) else used.packing
        # Of several formats the file names none.
        if block and form and form != "mixed-precision" and form != _PACKINGS[block]:
            # The package unpacks by the format; vLLM and SGLang ask it whether activations are quantised at all.
            engines = {"transformers", "vllm", "sglang"} if group.get("input_activations") else {"transformers"}
            said.setdefault((form, block), set()).update(engines)
    for (form, block), engines in said.items():
        experts = [view.blocks[at] for at in view.moe_layers if (found := view.dialects[at]) and found.block == block]
        names = experts or [linear.name for linear in linears if linear.format == block]
        if names:
            fill = {"claimed": printable(form, 60), "found": _PACKINGS[block], "engines": tuple(sorted(engines))}
            yield make("config.conflict", "backend", text="config.conflict.packing", tensors=names, fill=fill)


def _stored_in(lists: QuantConfig, view: CanonicalView, layer: int) -> str | None:
    """The number format of a layer's experts: a four-bit one, or ``"FP8"`` where the configuration does not exclude."""
    dialect = view.dialects[layer]
    if dialect is not None:
        return dialect.block
    modules = [view.module(layer, 0, kind) for kind in view.projections_in[layer]]
    weights = [entry for module in modules if (entry := module.tensors.get("weight")) is not None]
    fp8 = bool(weights) and all(entry.dtype in FP8 for entry in weights)
    return "FP8" if fp8 and not lists.is_excluded(view.blocks[layer]) else None


def is_native(checkpoint: Checkpoint, block: str) -> bool:
    """DeepSeek's own draft experts stay in MXFP4, whatever the model's own became (aiconfigurator#1513)."""
    # A section whose method is missing has a finding for that, and may have been DeepSeek's.
    fp8 = any(
        (section.method or "").startswith(("fp8", "deepseek"))
        or ("quant_method" in section.missing and not section.explicit)
        for section in checkpoint.quant_config.sections
    )
    said = (checkpoint.config or {}).get("expert_dtype")
    return block == "MXFP4" and fp8 and said in (None, "fp4", "mxfp4")


def _claim(checkpoint: Checkpoint, *modules: str) -> str | None:
    """What the configuration gives a module: a name, None where a list leaves it out, ``""`` for no word."""
    quant = checkpoint.quant_config
    used = quant.used
    assert used is not None
    label = quant.algo_of(*modules)
    if label is None and used.algo == "MIXED_PRECISION" and used.explicit and used.quantized_layers:
        # vLLM takes the first entry below the experts too, under whatever name it stands there.
        return "" if quant.lists_below(modules[0]) else None
    if label is None and quant.leaves_out(*modules):
        return None
    # DeepSeek's method speaks of everything around the experts, and is old where `expert_dtype` is not there yet.
    return "" if label is None or (label == "FP8" and used.method == "fp8" and not used.expert_algo) else label


def _wrong_experts(
    checkpoint: Checkpoint, view: CanonicalView, told: Collection[int], lists: QuantConfig
) -> Iterator[Finding]:
    """An allow-list that names experts one by one, and forgets some or calls them something else.

    vLLM goes by the first entry below the experts and never notices; a loader that asks for each module does.
    """
    quant = checkpoint.quant_config
    listed: dict[int, dict[str, Any]] = {}
    for layer in view.moe_layers:
        if view.dialects[layer] is not None and not view.is_whole(layer) and layer not in told:
            below: dict[str, Any] = {}
            for section in quant.sections:
                below |= section.listed_below(view.blocks[layer])
            if below:
                listed[layer] = below
    if not listed:
        return
    named: dict[int, dict[str, int]] = {layer: {} for layer in listed}
    for (layer, expert, _), module in view.modules.items():
        if layer in named and module.state == "quantised":
            named[layer][module.name[len(view.blocks[layer]) + 1 :]] = expert
    for layer, below in listed.items():
        stored, dialect = named[layer], view.dialects[layer]
        assert dialect is not None
        experts = {str(expert) for expert in stored.values()}
        if not all(tail in stored or tail in experts for tail in below):
            # It knows them under other names, such as a fused module's.
            continue
        wrong: dict[str, list[str]] = {}
        for tail, expert in stored.items():
            entry = below.get(tail, below.get(str(expert)))
            algo = entry.get("quant_algo") if isinstance(entry, dict) else None
            if entry is None or (isinstance(algo, str) and _block_of(algo.upper()) != dialect.block):
                wrong.setdefault("" if entry is None else printable(str(algo).upper(), 60), []).append(tail)
        for claim, tails in wrong.items():
            names = [f"{view.blocks[layer]}.{tail}" for tail in tails]
            if not claim:
                # A pattern may name it after all.
                tails = [tail for tail, name in zip(tails, names, strict=True) if lists.is_excluded(name)]
                names = [f"{view.blocks[layer]}.{tail}" for tail in tails]
            if not tails:
                continue
            yield make(
                "config.conflict", "warn", text=f"config.conflict.{'format' if claim else 'left-out'}.experts",
                layer=layer, experts=tuple(sorted({stored[tail] for tail in tails})), tensors=names,
                fill={"claimed": claim, "found": dialect.block},
            )  # fmt: skip


def _speaks_of_linears(quant: QuantConfig) -> bool:
    """Does the method quantise ordinary layers too?  gpt-oss's does not."""
    method = quant.used.method if quant.used else None
    return method is None or method.startswith(("modelopt", "compressed-tensors", "quark"))


def _means_fused(quant: QuantConfig, name: str) -> bool:
    """Do the groups' targets match what servers build of this module and its neighbours, such as ``qkv_proj``?"""
    parent, _, last = name.rpartition(".")
    return any(not quant.leaves_out(f"{parent}.{built}") for built in TOGETHER.get(last, ()))


def _targets(quant: QuantConfig) -> bool:
    """Does the method quantise what its groups' targets match, and nothing else?"""
    return quant.used is not None and (quant.used.method or "").startswith("compressed-tensors")


def _wrong_linears(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], lists: QuantConfig
) -> Iterator[Finding]:
    """The same for ordinary modules, where the configuration names them something that they are not."""
    quant = checkpoint.quant_config
    groups: dict[tuple[str | None, str, bool], list[str]] = {}
    for linear in linears:
        if linear.format == "FP8":
            # Towers, heads and what a method does not speak of are FP8 for reasons of their own.
            if not is_quantised_by_all(linear.name):
                continue
        elif linear.format not in ("NVFP4", "MXFP4"):
            continue
        if lists.is_excluded(linear.name):
            continue
        claim = _claim(checkpoint, linear.name)
        if claim is None and _means_fused(quant, linear.name):
            continue
        if linear.format == "FP8":
            wrong = _block_of(claim) if claim else claim is None and fp8_scale(linear) is not None and _targets(quant)
            if wrong and _speaks_of_linears(quant):
                groups.setdefault((claim, "FP8", is_draft(linear.name, view.layers)), []).append(linear.name)
            continue
        # Of an ordinary module that a list leaves out nothing is said: exporters name fused ones in several ways.
        if (claim and _block_of(claim) != linear.format) or (claim is None and quant.algo != "MIXED_PRECISION"):
            groups.setdefault((claim, linear.format, is_draft(linear.name, view.layers)), []).append(linear.name)
    for (claim, found, draft), names in groups.items():
        fill = {"claimed": printable(claim or "", 60), "found": found}
        text = "config.conflict.untargeted.linear" if claim is None else "config.conflict.format.linear"
        severity = "warn" if draft else "error"
        yield make("config.conflict", severity, text=f"{text}{'.draft' * draft}", tensors=names, fill=fill)


# What a list may call several modules together.
TOGETHER = {
    "q_proj": ("qkv_proj", "qkv"), "k_proj": ("qkv_proj", "qkv"), "v_proj": ("qkv_proj", "qkv"),
    "gate_proj": ("gate_up_proj",), "up_proj": ("gate_up_proj",), "w1": ("w13",), "w3": ("w13",),
    "q_a_proj": ("fused_qkv_a_proj",), "kv_a_proj_with_mqa": ("fused_qkv_a_proj",),
    "in_proj_qkv": ("in_proj_qkvz",), "in_proj_z": ("in_proj_qkvz",),
    "in_proj_b": ("in_proj_ba",), "in_proj_a": ("in_proj_ba",),
}  # fmt: skip


def _left_out_linears(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> Iterator[Finding]:
    """Quantised modules that an allow-list forgets, so that servers build them unquantised.

    It must name their namesakes in other layers, or of their layer something else and of their parent nothing, or only
    what is stored under that name: a list may have another name for them.  Outside the layers it must name nothing that
    ends like them.  A module is built as what it is fused with.
    """
    quant = checkpoint.quant_config
    method = quant.used.method if quant.used is not None else None
    if quant.algo != "MIXED_PRECISION" or not (method is None or method.startswith("modelopt")):
        return
    named = {without_numbers(linear.name) for linear in linears if quant.listed_algo(linear.name)}
    stored, experts = {linear.name for linear in linears}, tuple(view.blocks.values())
    ends = {name.rpartition(".")[2] for section in quant.sections for name in section.quantized_layers}
    found: dict[tuple[str, bool], list[str]] = {}
    for linear in linears:
        scaled = linear.format in ("NVFP4", "MXFP4") or (linear.format == "FP8" and fp8_scale(linear) is not None)
        if not scaled or quant.listed_algo(linear.name) or quant.lists(linear.name):
            continue
        parent, _, last = linear.name.rpartition(".")
        others = {other for family in SIBLINGS if last in family for other in family} | {*TOGETHER.get(last, ())}
        if any(quant.listed_algo(f"{parent}.{other}") for other in others):
            continue
        head = layer_number(linear.name, view.layers)[2]
        beside = bool(head) and is_quantised_by_all(linear.name) and quant.lists_below(head)
        if beside:
            entries = (f"{parent}.{rest}" for section in quant.sections for rest in section.listed_below(parent))
            beside = all(entry in stored or entry.startswith(experts) for entry in entries)
        alone = not head and last not in ends
        if without_numbers(linear.name) in named or beside or alone:
            found.setdefault((linear.format, is_draft(linear.name, view.layers)), []).append(linear.name)
    for (kind, draft), names in found.items():
        yield make(
            "config.conflict", "warn" if draft else "error", text=f"config.conflict.left-out.linear{'.draft' * draft}",
            tensors=names, fill={"found": kind},
        )  # fmt: skip
