"""Findings about what is quantised and how: whole experts, whole layers, the whole model.

These explain many slots with one cause and so come before `scales`: a missing expert is not four missing tensors, and
a weight-only checkpoint is not 30,000 missing activation scales.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import MISSING, NOT_NEEDED, OK, UNREADABLE, Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint.dialects.per_expert import ROLES
from nvfp4viz.errors import ServingError

Mask = npt.NDArray[np.bool_]


def scheme_findings(facts: Facts) -> Iterator[Finding]:
    """``expert.*``, ``weight.unquantised``, ``draft.unquantised`` and ``scheme.*``."""
    yield from _absent_experts(facts)
    yield from _unquantised(facts)
    yield from _drafts(facts)
    yield from _weight_only(facts)
    yield from _pre_quant_scales(facts)


def rank_holes(facts: Facts) -> dict[int, tuple[int, ...]]:
    """Layers in which one rank-sized range of experts has no activation scale in any projection.

    A range that starts at a multiple of its size, divides the number of experts, and is at least a sixteenth of
    them: what a rank of an expert-parallel calibration would leave (Model-Optimizer#831).
    """
    found = {}
    for layer in facts.layers:
        masks = [facts.states["input_scale", layer, kind] == MISSING for kind in facts.view.projections]
        if not masks or not all(np.array_equal(mask, masks[0]) for mask in masks):
            continue
        lost = np.flatnonzero(masks[0])
        size, total = len(lost), len(masks[0])
        is_range = size >= 2 and lost[-1] - lost[0] + 1 == size
        if is_range and size < total and total % size == 0 and lost[0] % size == 0 and total // size <= 16:
            found[layer] = tuple(lost.tolist())
    return found


def is_weight_only(facts: Facts) -> bool:
    """No activation scale anywhere among quantised experts, as far as the files can be read."""
    if facts.view.scheme != "W4A16":
        return False
    states = [states for (role, _, _), states in facts.states.items() if role == "input_scale"]
    return bool(states) and not any((state == OK).any() or (state == UNREADABLE).any() for state in states)


def label_of(facts: Facts) -> str | None:
    """The algorithm that the configuration gives the quantised experts."""
    module = next((m.name for m in facts.view.modules.values() if m.state == "quantised"), "")
    return facts.checkpoint.quant_config.algo_of(module)


def _absent_experts(facts: Facts) -> Iterator[Finding]:
    """Experts, or one projection of them, of which nothing is stored."""
    view = facts.view
    stored: dict[tuple[int, str], list[int]] = {}
    for layer, expert, kind in view.modules:
        stored.setdefault((layer, kind), []).append(expert)
    for layer in facts.layers:
        size = view.experts_in[layer]
        present = {kind: np.zeros(size, np.bool_) for kind in view.projections}
        for kind, mask in present.items():
            readable = [facts.states[role, layer, kind] != UNREADABLE for role in ROLES]
            mask |= ~np.logical_and.reduce(readable)
            mask |= bool(facts.checkpoint.blind_files)
            mask[stored.get((layer, kind), [])] = True
        if not present:
            continue
        whole = np.logical_or.reduce(list(present.values()))
        yield from _absent_or_gap(facts, layer, None, ~whole)
        for kind, mask in present.items():
            yield from _absent_or_gap(facts, layer, kind, whole & ~mask)


def _absent_or_gap(facts: Facts, layer: int, projection: str | None, lost: Mask) -> Iterator[Finding]:
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
            kinds = [projection] if projection else facts.view.projections
            names = [facts.view.module(layer, expert, kind).name for expert in ids for kind in kinds]
            fill = {"expected": len(lost)}
            yield make(
                code, "error", text=text, layer=layer, projection=projection, experts=ids, tensors=names,
                count=len(ids), fill=fill,
            )  # fmt: skip


def _unquantised(facts: Facts) -> Iterator[Finding]:
    """Plain weights where the configuration says quantised and does not exclude them."""
    view, quant = facts.view, facts.checkpoint.quant_config
    lost: dict[tuple[int, str], list[int]] = {}
    others: dict[int, set[int]] = {}
    quantised = {layer for (layer, _, _), module in view.modules.items() if module.state == "quantised"}
    for (layer, expert, projection), module in view.modules.items():
        if layer in view.draft_layers:
            continue
        if module.state == "unquantised":
            algo = quant.algo_of(module.name)
            if algo is not None and "NVFP4" in algo and not quant.is_excluded(module.name):
                lost.setdefault((layer, projection), []).append(expert)
        elif module.state == "other" and layer in quantised:
            others.setdefault(layer, set()).add(expert)
    for (layer, projection), experts in sorted(lost.items()):
        ids = tuple(sorted(experts))
        names = [f"{view.module(layer, expert, projection).name}.weight" for expert in ids]
        yield make(
            "weight.unquantised", "error", role="weight", layer=layer, projection=projection, experts=ids, tensors=names
        )
    for layer, found in sorted(others.items()):
        yield make("scheme.mixed-layer", "error", layer=layer, experts=tuple(sorted(found)), count=len(found))


def _drafts(facts: Facts) -> Iterator[Finding]:
    plain = [layer for layer in facts.view.draft_layers if layer not in facts.layers]
    if plain:
        blocks = [facts.view.blocks[layer] for layer in plain]
        yield make("draft.unquantised", "info", tensors=blocks, count=len(plain))


def _weight_only(facts: Facts) -> Iterator[Finding]:
    if not is_weight_only(facts):
        return
    view = facts.view
    lost = [
        slot.name
        for layer in facts.layers
        for slot in view.slots(layer, role="input_scale")
        if facts.states["input_scale", layer, slot.projection][slot.expert] == MISSING
    ]
    claims, text, detail = promotion(facts)
    if not claims:
        yield make("scheme.weight-only", "info", count=len(lost))
        return
    yield make(
        "scheme.mislabelled", "backend", text=f"scheme.mislabelled.{text}", role="input_scale", tensors=lost,
        count=len(lost), fill={"detail": detail},
    )  # fmt: skip


def promotion(facts: Facts) -> tuple[bool, str, str]:
    """Does the configuration claim W4A4, and does vLLM's promotion rule save it?

    Returns
    -------
    claims
        The configuration says that activations are quantised too.
    text
        ``"promoted"``, or why the rule cannot fire: ``"no-groups"``, ``"sidecar"``, ``"empty-groups"``,
        ``"group-with-activations"``, ``"other-algorithm"``, ``"other-method"``, ``"refused"``.
    detail
        What was found, short.
    """
    # serving traces the rule as vLLM asks it; imported late because it brings the whole forward pass along.
    from nvfp4viz.serving.quant_config import resolve_quantization

    checkpoint = facts.checkpoint
    used = checkpoint.quant_config.used
    algo = label_of(facts)
    if used is None or algo is None or not algo.startswith("NVFP4"):
        return False, "", ""
    try:
        resolved = resolve_quantization(checkpoint.config, checkpoint.hf_quant_config)
    except ServingError as error:
        return True, "refused", error.what
    if resolved.method != "modelopt":
        return True, "other-method", str(resolved.method)
    if resolved.promoted:
        return True, "promoted", str(resolved.source)
    step = next((step for step in resolved.steps if step.holds is False), None)
    if step is None or step.id == "algo-exactly-nvfp4":
        return True, "other-algorithm", algo
    if step.id == "no-input-activations":
        return True, "group-with-activations", step.found
    if step.id == "groups-are-objects" or used.config_groups not in (None, {}):
        return True, "group-with-activations", step.found
    if used.config_groups == {}:
        return True, "empty-groups", used.file
    return True, "sidecar" if used.file == "hf_quant_config.json" else "no-groups", used.file


def _pre_quant_scales(facts: Facts) -> Iterator[Finding]:
    """AWQ's ``pre_quant_scale`` on some experts of a projection only (Model-Optimizer#1142, #1354)."""
    view = facts.view
    for layer in facts.layers:
        for projection in view.projections:
            states = facts.states["weight", layer, projection]
            ids = [e for e in range(len(states)) if states[e] != NOT_NEEDED]
            have = [e for e in ids if "pre_quant_scale" in view.module(layer, e, projection).extras]
            lack = tuple(sorted(set(ids) - set(have)))
            if have and lack:
                names = [f"{view.module(layer, e, projection).name}.pre_quant_scale" for e in lack]
                yield make(
                    "scheme.pre-quant-scale", "error", layer=layer, projection=projection, experts=lack, tensors=names
                )
