"""Scales whose peers are no measure: two halves of a layer that differ, activation scales large, or 1.0, everywhere.

An outlier is one among many (`scales`), and a layer apart is one among layers (`siblings`).  Where half of a layer's
experts are far from the other half, or all of a file's scales may be the other way up, nothing says which is right: the
first is a warning, the others are notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from nvfp4viz.audit.facts import F32, Facts, ScaleTable, median_of
from nvfp4viz.audit.fills import divisor_of, measured_inputs, never_set
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.mirrors import mirror_findings
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
from nvfp4viz.audit.texts import id_list


def spread_findings(facts: Facts, *, activations: bool) -> Iterator[Finding]:
    """``scale.outlier`` of two groups in a layer; notes on all activation scales of the model or of a layer.

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
        beyond = list(_beyond_measure(facts))
        yield from beyond or _large_inputs(facts)
        yield from () if beyond else mirror_findings(facts)
        yield from _all_ones(facts, "input_scale")
    yield from _all_ones(facts, "weight_scale_2")


def _groups(facts: Facts, layer: int, role: str) -> Iterator[Finding]:
    """One finding a layer and role; the experts named are those of the smaller group."""
    found: dict[str, tuple[Mask, float, float]] = {}
    for kind in facts.view.projections_in[layer]:
        table = facts.tables.get((role, layer, kind))
        if table is None or not _is_wide(table.values[table.good()]) or has_wrong_convention(facts, table):
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
    kinds = in_order(found)
    ratio, own, others = max((max(own / others, others / own), own, others) for _, own, others in found.values())
    experts = tuple(np.flatnonzero(np.any([few for few, _, _ in found.values()], axis=0)).tolist())
    place = facts.place(layer, kinds, role, experts)
    fill = {"kinds": ", ".join(kinds), "ratio": times(ratio), "own": json_number(own), "others": json_number(others)}
    yield make("scale.outlier", "warn", text="scale.outlier.groups", role=role, layer=layer, **place, fill=fill)


def in_order(kinds: Iterable[str]) -> list[str]:
    """Projections as one names them, whatever order a layout has them in."""
    return sorted(kinds, key=("gate", "up", "gate_up", "down").index)


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


def undecided(facts: Facts, table: ScaleTable, far: Mask) -> Mask:
    """Those of a table's outliers (E,) that are too many to be called the wrong ones: a fifth, and more than one.

    A fifth, since of a quarter some may lie within reach of the others.

    One that was filled in, or whose partner of gate and up lies with the others, is wrong itself.
    """
    none: Mask = np.zeros_like(far)
    if far.sum() < 2 or 5 * far.sum() < table.good().sum():
        return none
    measured = _ordinary(facts, table)
    left: Mask = far & measured
    partner = facts.tables.get((table.role, table.layer, {"gate": "up", "up": "gate"}.get(table.projection, "")))
    if partner is not None:
        both = left & partner.good()
        own, other = (np.log2(each.values[both].astype(np.float64)) for each in (table, partner))
        left[both] = np.abs(own - other) <= OUTLIER_FLOOR
    return left if left.sum() >= 2 and 5 * left.sum() >= measured.sum() else none


def _is_wide(values: F32) -> bool:
    """Is there anything to look for?  Of most tables there is not."""
    return len(values) >= 4 and bool(values.max() / values.min() > 2**OUTLIER_FLOOR)


def _ordinary(facts: Facts, table: ScaleTable) -> Mask:
    """Usable numbers that have no finding of their own."""
    if table.role == "input_scale":
        return measured_inputs(facts, table)
    left: Mask = table.good() & ~never_set(table)
    pairs, _ = mismatched_pairs(facts, table.layer)
    return left & ~pairs if table.projection in ("gate", "up") and pairs.size else left


def _middle(values: F32, mask: Mask) -> float:
    return float(np.exp2(median_of(np.log2(values[mask].astype(np.float64)))))


# Powers of two: activations of at most 10^-8 or at least 10^8 throughout a model were never measured.
_TINY, _HUGE = -38.0, 16.0


def _beyond_measure(facts: Facts) -> Iterator[Finding]:
    """``scale.outlier`` of a file of whose layers each has activation scales that no activations have."""
    layers = [at for at in facts.view.moe_layers if "input_scale" in facts.needs[at]]
    found: dict[str, list[ScaleTable]] = {}
    for kind in ("gate", "up", "gate_up", "down"):
        tables = [table for at in layers if (table := facts.tables.get(("input_scale", at, kind))) is not None]
        # One number is enough to see that there is nothing to see.
        if not tables or not tables[0].values.size or 2**_TINY < tables[0].values[0] < 2**_HUGE:
            continue
        goods = [_ordinary(facts, table) for table in tables]
        kept = [table.values[good] for table, good in zip(tables, goods, strict=True) if good.any()]
        middles = [float(np.log2(median_of(values))) for values in kept]
        if sum(map(ScaleTable.numbers, tables, goods)) >= 3 and (max(middles) < _TINY or min(middles) > _HUGE):
            found[kind] = tables
    if not found:
        return
    tables = [table for each in found.values() for table in each]
    divisors = facts.view.divisors_in(layers[0])
    usual = median_of(np.concatenate([(table.stored if divisors else table.values)[table.good()] for table in tables]))
    over = divisor_of(facts, layers[0])
    scale = 1 / float(usual) if divisors else float(usual)
    yield make(
        "scale.outlier", "warn", text=f"scale.outlier.file{'.divisor' if divisors else ''}", role="input_scale",
        tensors=[facts.view.slot(table.layer, 0, table.projection, "input_scale").name for table in tables],
        count=sum(table.numbers(table.good()) for table in tables),
        fill={"kinds": ", ".join(in_order(found)), "median": json_number(float(usual)), "numbers": layers,
              "amax": f"{scale * over:.1e}"},
    )  # fmt: skip


def _large_inputs(facts: Facts) -> Iterator[Finding]:
    """Projections of which all layers have a median above one: the other way up, or meant (FLUX.2 has 146 to 171)."""
    layers = [at for at in facts.view.moe_layers if "input_scale" in facts.needs[at] and facts.block(at) == "NVFP4"]
    if facts.view.scheme == "W4A8" or any(
        has_wrong_convention(facts, table) for table in facts.scalars("weight_scale_2") if table.layer in layers
    ):
        return
    by_kind: dict[str, list[ScaleTable]] = {}
    for table in facts.scalars("input_scale"):
        if table.layer in layers:
            by_kind.setdefault(table.projection, []).append(table)
    found = {kind: large for kind, tables in by_kind.items() if (large := _large(facts, tables)) is not None}
    if found.keys() & {"gate", "up"} and any(apart(facts, at) is not None for at in layers):
        # Which of the two is off is another finding's question.
        found = {kind: large for kind, large in found.items() if kind not in ("gate", "up")}
    if not found:
        return
    kinds = in_order(found)
    names = [facts.view.slot(at, 0, kind, "input_scale").name for kind in kinds for at in layers if kind in
             facts.view.projections_in[at]]  # fmt: skip
    fill = {
        "median": json_number(float(median_of(np.concatenate(list(found.values()))))), "numbers": layers,
        "kinds": ", ".join(kinds),
    }  # fmt: skip
    text = f"scale.convention.inputs{'.divisor' if facts.view.divisors_in(layers[0]) else ''}"
    count = sum(map(len, found.values()))
    yield make("scale.convention", "info", text=text, role="input_scale", tensors=names, count=count, fill=fill)


def _large(facts: Facts, tables: list[ScaleTable]) -> F32 | None:
    """The stored numbers of one projection, where each layer's median is one that was hardly measured."""
    # One number is enough to see that there is nothing to see.
    if not tables[0].values.size or 0 < tables[0].values[0] < 1:
        return None
    goods = [_ordinary(facts, table) for table in tables]
    kept = [table.values[good] for table, good in zip(tables, goods, strict=True) if good.any()]
    if sum(map(ScaleTable.numbers, tables, goods)) < 3:
        return None
    # Multipliers are amax/2688, and an amax above that in the median of every layer was hardly ever measured.
    if not all(median_of(values) > 1 for values in kept):
        return None
    stored: F32 = np.concatenate([table.stored[good] for table, good in zip(tables, goods, strict=True)])
    return stored


def _all_ones(facts: Facts, role: str) -> Iterator[Finding]:
    """``scale.identity`` of layers in which nobody has set a number: as stored each of a projection's is 1.

    `never_set` has the ones among other numbers.
    """
    found: dict[int, list[str]] = {}
    for table in facts.scalars(role):
        if role in facts.needs[table.layer] and all_ones(facts, table).any():
            found.setdefault(table.layer, []).append(table.projection)
    if not found:
        return
    layers = [at for at in facts.layers if role in facts.needs[at]]
    if all(set(found.get(at, ())) == set(facts.view.projections_in[at]) for at in layers):
        yield _ones_of(facts, role, "model", layers, {kind for at in layers for kind in facts.view.projections_in[at]})
    elif role == "input_scale":
        for at, kinds in found.items():
            masks = [facts.tables[role, at, kind].good() for kind in kinds]
            place = facts.place(at, kinds, role, tuple(np.flatnonzero(np.any(masks, axis=0)).tolist()))
            yield make(
                "scale.identity", "info", text=f"scale.identity.layer{_inverted(facts, at)}", role=role, layer=at,
                **place, value=1.0, projection=kinds[0] if len(kinds) == 1 else None,
                fill={"kinds": ", ".join(in_order(kinds)), "numbers": [at], "over": divisor_of(facts, at)},
            )  # fmt: skip
    else:
        by_kinds: dict[tuple[str, ...], list[int]] = {}
        for at, kinds in found.items():
            by_kinds.setdefault(tuple(in_order(kinds)), []).append(at)
        for some, among in by_kinds.items():
            yield _ones_of(facts, role, "layers", among, some)


def all_ones(facts: Facts, table: ScaleTable) -> Mask:
    """Usable numbers (E,) of a projection all of which are 1 as stored, less those that differ from their partner."""
    none: Mask = np.zeros(len(table.values), np.bool_)
    if not (table.stored == 1).any():
        return none
    good = table.good()
    if not good.any() or not (table.stored[good] == 1).all():
        return none
    if table.role == "weight_scale_2" and table.projection in ("gate", "up"):
        pairs, _ = mismatched_pairs(facts, table.layer)
        good = good & ~pairs if pairs.size else good
    return good


def _ones_of(facts: Facts, role: str, scope: str, layers: list[int], kinds: Iterable[str]) -> Finding:
    """One note about several layers."""
    tables = [facts.tables[role, at, kind] for at in layers for kind in facts.view.projections_in[at] if kind in kinds]
    one = layers[0] if len(layers) == 1 and scope != "model" else None
    shown = in_order(kinds)
    of_weight = ".weight" if role != "input_scale" else ""
    return make(
        "scale.identity", "info", text=f"scale.identity.{scope}{of_weight}{_inverted(facts, layers[0])}", role=role,
        layer=one, projection=shown[0] if one is not None and len(shown) == 1 else None,
        tensors=[facts.view.slot(table.layer, 0, table.projection, role).name for table in tables],
        count=sum(table.numbers(all_ones(facts, table)) for table in tables), value=1.0,
        fill={"kinds": ", ".join(shown), "among": id_list(tuple(layers)), "numbers": layers,
              "over": divisor_of(facts, layers[0])},
    )  # fmt: skip


def _inverted(facts: Facts, layer: int) -> str:
    return ".divisor" if facts.view.divisors_in(layer) else ""
