"""Scales whose peers are no measure: two halves of a layer that differ, and activation scales large everywhere.

An outlier is one among many (`scales`), and a layer apart is one among layers (`siblings`).  Where half of a layer's
experts are far from the other half, or all of a file's scales may be the other way up, nothing says which is right: the
first is a warning, the second a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nvfp4viz.audit.facts import F32, Facts, ScaleTable, median_of
from nvfp4viz.audit.fills import back_fills
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import (
    OUTLIER_FLOOR,
    Mask,
    has_wrong_convention,
    json_number,
    mismatched_pairs,
    outliers,
)
from nvfp4viz.audit.siblings import apart, times


def spread_findings(facts: Facts, *, activations: bool) -> Iterator[Finding]:
    """``scale.outlier`` of two groups in a layer; ``scale.convention`` (``info``) of all activation scales.

    Parameters
    ----------
    activations
        The scheme needs activation scales.
    """
    for layer in facts.layers:
        for role in ("input_scale", "weight_scale_2"):
            if role != "input_scale" or (activations and role in facts.needs[layer]):
                yield from _groups(facts, layer, role)
    if activations:
        yield from _large_inputs(facts)


def _groups(facts: Facts, layer: int, role: str) -> Iterator[Finding]:
    """One finding a layer and role; the experts named are those of the smaller group."""
    found: dict[str, tuple[Mask, float, float]] = {}
    for kind in facts.view.projections_in[layer]:
        table = facts.tables.get((role, layer, kind))
        if table is None or not _is_wide(table.values[table.good()]) or has_wrong_convention(table):
            continue
        good = _ordinary(facts, table)
        groups = two_groups(table.values, good)
        if groups is not None:
            few = groups if 2 * groups.sum() <= good.sum() else good & ~groups
            found[kind] = few, _middle(table.stored, few), _middle(table.stored, good & ~few)
    if role == "input_scale" and found.keys() - {"down"} and apart(facts, layer) is not None:
        # That gate and up are far from each other is said already.
        found = {kind: each for kind, each in found.items() if kind == "down"}
    if not found:
        return
    ratio, own, others = max((max(own / others, others / own), own, others) for _, own, others in found.values())
    experts = tuple(np.flatnonzero(np.any([few for few, _, _ in found.values()], axis=0)).tolist())
    place = facts.place(layer, found, role, experts)
    fill = {"kinds": ", ".join(found), "ratio": times(ratio), "own": json_number(own), "others": json_number(others)}
    yield make("scale.outlier", "warn", text="scale.outlier.groups", role=role, layer=layer, **place, fill=fill)


def two_groups(values: F32, good: Mask) -> Mask | None:
    """The upper of two groups between which more lies than between an outlier and its peers; None where there are none.

    A median and the distances from it do not see them: of two halves the distance is the gap itself.

    >>> two_groups(np.float32([2e-3, 2.2e-3, 500, 510]), np.ones(4, bool)).tolist()
    [False, False, True, True]
    >>> two_groups(np.float32([1e-3, 3e-3, 9e-3, 2e-2]), np.ones(4, bool)), two_groups(np.ones(1), np.ones(1, bool))
    (None, None)
    """
    if good.sum() < 4:
        return None
    logs = np.log2(values[good].astype(np.float64))
    ordered = np.sort(logs)
    steps = np.diff(ordered)
    at = int(np.argmax(steps))
    low, high = ordered[: at + 1], ordered[at + 1 :]
    # A group is narrow beside the gap, and no single value: that one is an outlier, as the others may be.
    narrow = max(low[-1] - low[0], high[-1] - high[0]) < steps[at]
    if steps[at] <= OUTLIER_FLOOR or not narrow or min(len(low), len(high)) < 2 or outliers(values, good).any():
        return None
    out = np.zeros(values.shape, np.bool_)
    out[good] = logs > (low[-1] + high[0]) / 2
    return out


def _is_wide(values: F32) -> bool:
    """Is there anything to look for?  Of most tables there is not."""
    return len(values) >= 4 and bool(values.max() / values.min() > 2**OUTLIER_FLOOR)


def _ordinary(facts: Facts, table: ScaleTable) -> Mask:
    """Usable numbers that have no finding of their own."""
    good = table.good()
    one = good & (table.stored == 1)
    left: Mask = good.copy() if np.array_equal(one, good) else good & ~one
    if table.role != "input_scale":
        pairs, _ = mismatched_pairs(facts, table.layer)
        return left & ~pairs if table.projection in ("gate", "up") and pairs.size else left
    if facts.block(table.layer) == "NVFP4" and facts.view.scheme != "W4A8":
        for mask in back_fills(facts, table.layer).get(table.projection, {}).values():
            left &= ~mask
    return left


def _middle(values: F32, mask: Mask) -> float:
    return float(np.exp2(median_of(np.log2(values[mask].astype(np.float64)))))


# Powers of two between which the median of activation scales is the other convention's: multipliers are amax/2688, and
# an amax above 2688 in the median of every layer was never measured.
_WRONG_SIDE = (0.0, 20.0)


def _large_inputs(facts: Facts) -> Iterator[Finding]:
    """All layers' experts have a median above one: stored the other way up, or meant (FLUX.2 has 146 to 171)."""
    layers = [at for at in facts.view.moe_layers if "input_scale" in facts.needs[at] and facts.block(at) == "NVFP4"]
    tables = [
        table for at in layers for kind in facts.view.projections_in[at]
        if (table := facts.tables.get(("input_scale", at, kind))) is not None
    ]  # fmt: skip
    if facts.view.scheme == "W4A8" or any(
        has_wrong_convention(table) for table in facts.scalars("weight_scale_2") if table.layer in layers
    ):
        return
    kept: Mapping[int, list[F32]] = {at: [] for at in layers}
    stored = []
    for table in tables:
        # One number is enough to see that there is nothing to see.
        if not table.values.size or _is_small(table.values[0]):
            return
        good = _ordinary(facts, table)
        kept[table.layer].append(table.values[good])
        stored.append(table.stored[good])
    numbers = {at: np.concatenate(found) for at, found in kept.items() if found}
    middles = [float(np.log2(median_of(found))) for found in numbers.values() if found.size]
    count = sum(found.size for found in numbers.values())
    if count < 3 or not middles or not all(_WRONG_SIDE[0] < middle < _WRONG_SIDE[1] for middle in middles):
        return
    divisors = facts.view.divisors_in(layers[0])
    names = [facts.view.slot(table.layer, 0, table.projection, "input_scale").name for table in tables]
    fill = {"median": json_number(float(median_of(np.concatenate(stored)))), "numbers": layers}
    text = f"scale.convention.inputs{'.divisor' if divisors else ''}"
    yield make("scale.convention", "info", text=text, role="input_scale", tensors=names, count=count, fill=fill)


def _is_small(value: np.float32) -> bool:
    return bool(0 < value < 1)
