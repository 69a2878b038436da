"""Findings about what is quantised and how: whole experts, whole layers, the whole model.

These explain many slots with one cause and so come before `scales`: a missing expert is not four missing tensors, and
a weight-only checkpoint is not 30,000 missing activation scales.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import CLAIMS, MISSING, OK, UNREADABLE, Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.routers import router_names
from nvfp4viz.audit.two_files import of_each_file
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig
from nvfp4viz.checkpoint.canonical_view import config_experts
from nvfp4viz.errors import ServingError

Mask = npt.NDArray[np.bool_]


def scheme_findings(facts: Facts) -> Iterator[Finding]:
    """``expert.*``, ``weight.unquantised``, ``draft.unquantised`` and ``scheme.*``."""
    yield from _absent_experts(facts)
    quant = facts.checkpoint.quant_config
    yield from of_each_file(quant, lambda lists: _unquantised(facts, lists))
    yield from of_each_file(quant, lambda lists: _drafts(facts, lists))
    yield from _weight_only(facts)


def rank_holes(facts: Facts) -> dict[int, tuple[tuple[int, int], ...]]:
    """By layer, the first and last experts of whole ranks without an activation scale in any projection.

    What ranks of an expert-parallel calibration would leave (Model-Optimizer#831): of 2 to 16 ranks, or more where each
    has eight experts, up to three quarters.  They must explain most of what the layer lacks; below four experts a rank,
    and where more than half is gone, all.
    """
    found = {}
    for layer in facts.layers:
        if facts.view.is_whole(layer):
            continue
        masks = [facts.states["input_scale", layer, kind] == MISSING for kind in facts.view.projections_in[layer]]
        if not masks or not any(mask.any() for mask in masks):
            continue
        lost, total = np.logical_and.reduce(masks), len(masks[0])
        some = int(np.logical_or.reduce(masks).sum())
        best: tuple[int, tuple[tuple[int, int], ...]] = (0, ())
        for size in range(total // 2, 1, -1):
            if total % size or (total // size > 16 and size < 8):
                continue
            ranks = np.flatnonzero(lost.reshape(-1, size).all(axis=1)).tolist()
            known = len(ranks) * size
            # Of few experts two are neighbours by chance.
            rest = known // 2 if size >= 4 and known <= total // 2 else 0
            if best[0] < known <= 3 * total // 4 and some - known <= rest:
                best = known, tuple((rank * size, rank * size + size - 1) for rank in ranks)
        if best[1]:
            found[layer] = best[1]
    return found


def is_weight_only(facts: Facts) -> bool:
    """No activation scale anywhere among quantised NVFP4 experts, as far as the files can be read.

    Nothing is said of layouts that may have them under a name that is not public (Inkling).
    """
    if "NVFP4" in facts.view.activation_blocks:
        return False
    dialects = facts.view.dialects
    layers = [
        layer for layer in facts.layers
        if (own := dialects[layer]) is not None and own.block == "NVFP4" and own.names_activations
    ]  # fmt: skip
    states = [facts.states["input_scale", layer, kind] for layer in layers for kind in facts.view.projections_in[layer]]
    return bool(states) and not any((state == OK).any() or (state == UNREADABLE).any() for state in states)


def label_of(facts: Facts) -> str | None:
    """The algorithm that the configuration gives the quantised experts: the first that claims activations, if any."""
    labels = [facts.labels[layer] for layer in facts.layers if facts.block(layer) == "NVFP4"]
    return next((label for label in labels if label and not label.startswith("W4A16")), labels[0] if labels else None)


def _absent_experts(facts: Facts) -> Iterator[Finding]:
    """Experts, or one projection of them, of which nothing is stored."""
    view = facts.view
    stored: dict[tuple[int, str], list[int]] = {}
    for layer, expert, kind in view.modules:
        stored.setdefault((layer, kind), []).append(expert)
    for layer in facts.layers:
        size = view.experts_in[layer]
        present = {kind: np.zeros(size, np.bool_) for kind in view.projections_in[layer]}
        for kind, mask in present.items():
            mask |= bool(facts.checkpoint.blind_files)
            mask[[expert for expert in facts.promised.get((layer, kind), ()) if expert < size]] = True
            mask[stored.get((layer, kind), [])] = True
        if not present:
            continue
        whole = np.logical_or.reduce(list(present.values()))
        yield from absent_or_gap(facts, layer, None, ~whole)
        for kind, mask in present.items():
            yield from absent_or_gap(facts, layer, kind, whole & ~mask)


def absent_or_gap(facts: Facts, layer: int, projection: str | None, lost: Mask) -> Iterator[Finding]:
    """Ids missing between others are a gap, ids missing at the end are absent experts."""
    if not lost.any():
        return
    last = int(np.flatnonzero(~lost)[-1]) if (~lost).any() else -1
    gap, absent = lost.copy(), lost.copy()
    gap[last + 1 :] = False
    absent[: last + 1] = False
    if projection is not None:
        gap, absent = np.zeros_like(lost), lost
    for code, mask in (("expert.gap", gap), ("expert.absent", absent)):
        ids = tuple(np.flatnonzero(mask).tolist())
        if ids:
            text = f"{code}.projection" if projection else code
            severity, pruned = "error", layer in facts.pruned and projection is None
            if pruned and 2 * len(facts.pruned) >= len(facts.view.moe_layers):
                severity, text = "info", "expert.gap.pruned"
            elif pruned:
                # Pruning leaves gaps in nearly every layer.
                text = "expert.gap.renumbered"
            elif code == "expert.absent" and projection is None:
                text, severity = _word_for(facts, layer, len(lost))
            kinds = [projection] if projection else facts.view.projections_in[layer]
            names = [facts.view.module(layer, expert, kind).name for expert in ids for kind in kinds]
            fill = {"expected": len(lost)}
            yield make(
                code, severity, text=text, layer=layer, projection=projection, experts=ids,
                tensors=names,
                count=len(ids), fill=fill,
            )  # fmt: skip


def _word_for(facts: Facts, layer: int, expected: int) -> tuple[str, str]:
    """Whose word it is that a layer has so many experts, as text and severity of what is said of its last ones.

    Only another layer's is no proof: layers may be pruned one by one.
    """
    config = facts.checkpoint.config or {}
    if not facts.tower and config_experts(config, layer) is not None:
        return "expert.absent", "error"
    entries = (facts.checkpoint.tensors.get(name) for name in router_names(facts.view.blocks[layer]))
    if any(entry is not None and len(entry.shape) == 2 and entry.shape[0] == expected for entry in entries):
        return "expert.absent.router", "error"
    return "expert.absent.other", "warn"


def _unquantised(facts: Facts, quant: QuantConfig) -> Iterator[Finding]:
    """Plain weights where the configuration says quantised, and experts of another format than their layer's.

    Parameters
    ----------
    quant
        The sections whose exclude lists count.
    """
    view = facts.view
    plain: dict[tuple[int, str], list[int]] = {}
    others: dict[int, set[int]] = {}
    named: dict[int, set[int]] = {}
    unlisted: dict[int, set[int]] = {}
    for (layer, expert, projection), module in view.modules.items():
        if module.state == "unquantised" and layer in facts.labels:
            plain.setdefault((layer, projection), []).append(expert)
        elif module.state == "other" and view.dialects[layer] is not None and layer in facts.labels:
            others.setdefault(layer, set()).add(expert)
    for (layer, projection), experts in sorted(plain.items()):
        mixed, label = view.dialects[layer] is not None, facts.labels[layer]
        if not mixed and (label is None or not label.startswith(_FOUR_BIT) or _is_left_out(quant, view.blocks[layer])):
            continue
        meant = []
        for expert in sorted(experts):
            name = view.module(layer, expert, projection).name
            if not quant.is_excluded(name):
                meant.append(expert)
            elif mixed:
                (named if quant.lists(name) else unlisted).setdefault(layer, set()).add(expert)
        if mixed and label is None and not quant.sections:
            # Nothing says which of the two the layer should be.
            others.setdefault(layer, set()).update(meant)
        elif meant:
            names = tuple(dict.fromkeys(f"{view.module(layer, e, projection).name}.weight" for e in meant))
            whole = view.module(layer, meant[0], projection).whole
            yield make(
                "weight.unquantised", "error", role="weight", layer=layer, projection=projection,
                experts=None if whole else tuple(meant), tensors=names,
            )  # fmt: skip
    # File and configuration agree, and in vLLM a layer's experts are one packed parameter all the same; of other
    # loaders the specifications say no more.
    for found, text in ((named, "left-alone"), (unlisted, "unlisted")):
        for layer, ids in sorted(found.items()):
            names = tuple(f"{view.blocks[layer]}.{expert}" for expert in sorted(ids))
            yield make(
                "weight.unquantised", "backend", text=f"weight.unquantised.{text}", role="weight", layer=layer,
                experts=tuple(sorted(ids)), tensors=names, fill={"engines": ("vllm",)},
            )  # fmt: skip
    for layer, ids in sorted(others.items()):
        names = [view.module(layer, expert, kind).name for expert in sorted(ids) for kind in view.projections_in[layer]]
        yield make(
            "scheme.mixed-layer", "error", layer=layer, experts=tuple(sorted(ids)), tensors=names, count=len(ids)
        )


def _is_left_out(quant: QuantConfig, block: str) -> bool:
    """Is a block of experts excluded as a whole?  Else each expert has to be asked for."""
    return quant.is_excluded(block) and not quant.lists_below(block)


# Towers that vLLM leaves unquantised whatever the configuration says (``modelopt.py``, 0.33.0).
_LEFT_ALONE = ("vision_tower", "vision_model", "vit_large_projector")


def tower_findings(checkpoint: Checkpoint, tower: CanonicalView) -> Iterator[Finding]:
    """``weight.unquantised`` of another tower's plain experts that no list excludes."""
    yield from of_each_file(checkpoint.quant_config, lambda lists: _plain_tower(checkpoint.quant_config, tower, lists))


def _plain_tower(quant: QuantConfig, tower: CanonicalView, lists: QuantConfig) -> Iterator[Finding]:
    names = [
        f"{module.name}.weight"
        for module in tower.modules.values()
        if module.state == "unquantised"
        and not lists.is_excluded(module.name)
        and (quant.algo_of(module.name) or "").startswith(_FOUR_BIT)
    ]
    alone = [name for name in names if any(part in _LEFT_ALONE for part in name.split("."))]
    others = [name for name in names if name not in alone]
    for severity, text, found in (("info", "tower", alone), ("error", "other", others)):
        if found:
            yield make("weight.unquantised", severity, text=f"weight.unquantised.{text}", role="weight", tensors=found)


# What a configuration calls four-bit experts.
_FOUR_BIT = ("NVFP4", "W4A16", "W4A8", "W4A4", "MXFP4")


def _drafts(facts: Facts, lists: QuantConfig) -> Iterator[Finding]:
    """Draft layers outside the scheme; where the configuration does not exclude them, a server quantises them."""
    view, quant = facts.view, facts.checkpoint.quant_config
    # FP8 ones are quantised; where a list leaves them out, they are told of with what stands beside them.
    plain: dict[int, list[str]] = {}
    for (layer, _, _), module in view.modules.items():
        if module.state == "unquantised" and layer in view.draft_layers and layer not in facts.layers:
            plain.setdefault(layer, []).append(module.name)
    if not plain:
        return
    blocks = {view.blocks[layer]: names for layer, names in sorted(plain.items())}
    yield make("draft.unquantised", "info", tensors=blocks, count=len(plain))
    listed = [
        block for block, names in blocks.items()
        if (quant.algo_of(block) or "").startswith(_FOUR_BIT)
        and not _is_left_out(lists, block) and not all(map(lists.is_excluded, names))
    ]  # fmt: skip
    if listed:
        text = "config.unquantised-not-excluded.draft"
        yield make("config.unquantised-not-excluded", "warn", text=text, tensors=listed)


def _weight_only(facts: Facts) -> Iterator[Finding]:
    if not is_weight_only(facts):
        yield from _promoted(facts)
        return
    view = facts.view
    claims, text, detail = promotion(facts)
    if not claims:
        count = sum(module.state == "quantised" for module in view.modules.values())
        yield make("scheme.weight-only", "info", count=count)
        return
    lost = [
        slot.name
        for layer in facts.layers
        if "input_scale" in facts.needs[layer]
        for slot in view.slots(layer, role="input_scale")
        if facts.states["input_scale", layer, slot.projection][slot.expert] == MISSING
    ]
    lost = list(dict.fromkeys(lost))
    yield make(
        "scheme.mislabelled", "backend", text=f"scheme.mislabelled.{text}", role="input_scale", tensors=lost,
        count=len(lost), fill={"detail": detail},
    )  # fmt: skip


def _promoted(facts: Facts) -> Iterator[Finding]:
    """Activation scales of experts that vLLM's promotion rule takes for weight-only, and other servers do not."""
    layers = [layer for layer in facts.layers if "input_scale" in facts.needs[layer] and facts.block(layer) == "NVFP4"]
    if facts.tower or not layers or promotion(facts)[1] != "promoted":
        return
    stored = [
        slot.name for layer in layers for slot in facts.view.slots(layer, role="input_scale") if slot.entry is not None
    ]
    names = dict.fromkeys(stored)
    if names:
        yield make("config.conflict", "warn", text="config.conflict.promoted", role="input_scale", tensors=names)


def promotion(facts: Facts) -> tuple[bool, str, str]:
    """Does the configuration claim W4A4, and does vLLM's promotion rule save it?

    Returns
    -------
    claims
        The configuration says that activations are quantised too.
    text
        ``"promoted"``, or why the rule cannot fire: ``"no-groups"``, ``"sidecar"``, ``"empty-groups"``,
        ``"group-with-activations"``, ``"other-algorithm"``, ``"other-algorithm.listed"``, ``"other-method"``,
        ``"other-method.groups"``, ``"refused"``.
    detail
        What was found, short.
    """
    # serving traces the rule as vLLM asks it; imported late because it brings the whole forward pass along.
    from nvfp4viz.serving.quant_config import resolve_quantization

    checkpoint = facts.checkpoint
    used = checkpoint.quant_config.used
    algo = label_of(facts)
    if used is None or algo is None or not algo.startswith(CLAIMS):
        return False, "", ""
    try:
        resolved = resolve_quantization(checkpoint.config, checkpoint.hf_quant_config)
    except ServingError as error:
        what = next((str(error.params[key]) for key in ("algo", "fields", "found") if key in error.params), "")
        return True, "refused", f"{error.params.get('file', '')}: {what}"
    if resolved.method != "modelopt":
        return True, f"other-method{'.groups' * bool(used.config_groups)}", str(resolved.method)
    if resolved.promoted:
        return True, "promoted", str(resolved.source)
    step = next((step for step in resolved.steps if step.holds is False), None)
    if step is None or step.id == "algo-exactly-nvfp4":
        # An allow-list gives the experts another algorithm than the one that the rule looks at.
        return True, f"other-algorithm{'.listed' * (algo != used.algo)}", str(used.algo)
    if step.id == "no-input-activations":
        return True, "group-with-activations", step.found
    if step.id == "groups-are-objects" or used.config_groups not in (None, {}):
        return True, "group-with-activations", step.found
    if used.config_groups == {}:
        return True, "empty-groups", used.file
    return True, "sidecar" if used.file == "hf_quant_config.json" else "no-groups", used.file


def is_promoted(checkpoint: Checkpoint) -> bool:
    """Does vLLM's promotion rule fire on the configuration alone?"""
    from nvfp4viz.serving.quant_config import resolve_quantization

    try:
        return resolve_quantization(checkpoint.config, checkpoint.hf_quant_config).promoted
    except ServingError:
        return False


def vllm_refuses(checkpoint: Checkpoint) -> str | None:
    """The algorithm that vLLM's ModelOpt loader does not know, such as ``NVFP4_AWQ``; None where it knows it.

    None too where a section names neither its method nor an algorithm: ``config.incomplete`` says so.
    """
    from nvfp4viz.serving.quant_config import resolve_quantization

    try:
        resolve_quantization(checkpoint.config, checkpoint.hf_quant_config)
    except ServingError as error:
        used = checkpoint.quant_config.used
        named = used is None or used.explicit or "quant_method" not in used.missing
        return str(checkpoint.quant_config.algo) if named and error.code == "serving.quant-algo" else None
    return None
