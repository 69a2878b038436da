"""Gate and up of an expert read the same input, so that their activation scales are one maximum measured twice.

One expert that is off among its peers is `scales`' outlier; what is seen here is a whole projection that is off, whose
experts agree with one another and not with their partners.  Ordinary modules that a server fuses have one number each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from nvfp4viz.audit.facts import F32, Facts, median_of
from nvfp4viz.audit.fills import FINGERPRINTS, fills_of, measured_inputs
from nvfp4viz.audit.findings import NAMES, make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import (
    OUTLIER_FLOOR,
    Mask,
    has_wrong_convention,
    json_number,
    mismatched_pairs,
    outliers,
)
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint.numbers import classify


class Siblings(NamedTuple):
    """A layer whose gate and up disagree about their input.

    Attributes
    ----------
    experts
        Those whose own two differ by so much.
    gate, up
        Medians of the effective scales, in log space.
    widest
        The largest ratio of one expert's two.
    """

    experts: tuple[int, ...]
    gate: float
    up: float
    widest: float


def sibling_findings(facts: Facts) -> Iterator[Finding]:
    """``scale.outlier`` of a layer's gate against its up, in files whose activation scales matter."""
    for layer in facts.layers:
        found = apart(facts, layer)
        if found is not None:
            place = facts.place(layer, ("gate", "up"), "input_scale", found.experts)
            low, high = sorted((found.gate, found.up))
            ratio = times(high / low)
            larger = "gate" if found.gate > found.up else "up"
            divisors = facts.view.divisors_in(layer)
            # The words speak of what is stored.
            medians = {
                kind: json_number(1 / scale if divisors else scale)
                for kind, scale in (("gate", found.gate), ("up", found.up))
            }
            yield make(
                "scale.outlier", "warn", text=f"scale.outlier.sibling{'.divisor' if divisors else ''}",
                role="input_scale", layer=layer, **place,
                fill={"ratio": ratio, "larger": larger, "pairs": len(found.experts), **medians,
                      "widest": json_number(found.widest)},
            )  # fmt: skip


def apart(facts: Facts, layer: int) -> Siblings | None:
    """Is the median ratio of gate to up, over at least three experts, as far from one as an outlier from its peers?

    Nothing is said where AWQ scales each projection's input by itself (``pre_quant_scale``), nor of values that an
    exporter filled in, which have their own finding.
    """
    gate, up = (facts.tables.get(("input_scale", layer, kind)) for kind in ("gate", "up"))
    if gate is None or up is None or "input_scale" not in facts.needs[layer]:
        return None
    both = gate.good() & up.good()
    if both.sum() < 3 or _far(gate.values[both], up.values[both]) is None:
        return None
    modules = facts.view.modules
    if any("pre_quant_scale" in module.extras for kind in ("gate", "up") if (module := modules.get((layer, 0, kind)))):
        return None
    for kind, masks in fills_of(facts, layer).items():
        for mask in masks.values() if kind in ("gate", "up") else ():
            both &= ~mask
    # A 1.0 was never set, and has its own note.
    both &= (gate.stored != 1) & (up.stored != 1)
    direction = _far(gate.values[both], up.values[both]) if both.sum() >= 3 else None
    if direction is None:
        return None
    own = np.zeros(len(both))
    own[both] = np.log2(gate.values[both].astype(np.float64)) - np.log2(up.values[both].astype(np.float64))
    ids = np.flatnonzero(own * direction > OUTLIER_FLOOR).tolist()
    middle = [float(np.exp2(median_of(np.log2(table.values[both].astype(np.float64))))) for table in (gate, up)]
    return Siblings(tuple(ids), *middle, float(np.exp2(np.abs(own[both]).max())))


# Powers of two by which a layer must be off the others, and may be off their reciprocal; and by which it must be off
# wherever it lies: massive activations make layers differ some thousand times, and a block scale has room for 2^14.
_LAYER_OFF, NEAR_RECIPROCAL, FAR = 10.0, 4.0, 14.0
# Second-level weight scales differ by ten times.
_WEIGHTS_FAR = 8.0


def layer_apart_findings(facts: Facts, role: str) -> Iterator[Finding]:
    """``scale.outlier`` of one layer's scales that are far off the other layers' or about their reciprocal.

    Its experts agree with one another, so that only other layers show it; an activation scale above one alone proves
    nothing, and layers do differ, but not by a thousand times and up to where the other convention would be, nor by
    2^14.  A weight scale above one is the other convention (`scales.has_wrong_convention`).
    """
    inputs = role == "input_scale"
    found: dict[int, list[tuple[str, float, float]]] = {}
    mirrors: dict[int, list[tuple[str, float, float]]] = {}
    halves: dict[str, tuple[dict[int, float], dict[int, float]]] = {}
    for kind in ("gate", "up", "gate_up", "down"):
        tables = {at: table for at in facts.view.moe_layers if (table := facts.tables.get((role, at, kind)))}
        tables = {at: table for at, table in tables.items() if role in facts.needs[at] and len(table.values)}
        # Experts of a layer differ by some 30 times: the first is enough to see that there is nothing to see.
        firsts = {at: log_of(table.values[0]) for at, table in tables.items()}
        usual = median_of(np.array(list(firsts.values()))) if firsts else 0.0
        least = (_LAYER_OFF if inputs else _WEIGHTS_FAR) / 2
        if len(firsts) < 2 or not any(abs(first - usual) >= least for first in firsts.values()):
            continue
        # What has a finding of its own is no measure for the layer's others, nor a layer the other way up for layers.
        middles = {
            at: log_of(median_of(table.values[own])) for at, table in tables.items()
            if not has_wrong_convention(facts, table) and (own := unexplained(facts, at, kind, role)).any()
        }  # fmt: skip
        for at, own in middles.items():
            others = [middle for other, middle in middles.items() if other != at]
            rest = float(median_of(np.array(others))) if len(others) >= 2 else own
            # Of two halves neither is the odd one.
            agreed = 2 * sum(abs(middle - rest) < _LAYER_OFF / 2 for middle in others) > len(middles)
            mirrored = abs(own - rest) >= _LAYER_OFF and abs(own + rest) <= NEAR_RECIPROCAL
            far = abs(own - rest) >= (FAR if inputs else _WEIGHTS_FAR)
            if agreed and far:
                found.setdefault(at, []).append((kind, own, rest))
            elif agreed and mirrored and inputs:
                mirrors.setdefault(at, []).append((kind, own, rest))
        split = _split(middles, _LAYER_OFF if inputs else _WEIGHTS_FAR)
        if split is not None and not any(kind == other for one in found.values() for other, _, _ in one):
            halves[kind] = split
    for at, kinds in mirrors.items():
        # An exporter that stores reciprocals does so for all projections; one of them may just be that loud.
        if {kind for kind, _, _ in (*kinds, *found.get(at, ()))} == set(facts.view.projections_in[at]):
            found.setdefault(at, []).extend(kinds)
    yield from _of_halves(facts, role, _far_halves(halves) if inputs else halves)
    for at, kinds in sorted(found.items()):
        if inputs and apart(facts, at) is not None:
            # That one of gate and up is off is said already.
            kinds = [one for one in kinds if one[0] == "down"]
        # A slot without a value, with an unusable one, or odd in its own layer, has its own finding.
        left = {kind: mask for kind, _, _ in kinds if (mask := unexplained(facts, at, kind, role)).any()}
        kinds = [one for one in kinds if one[0] in left]
        if not kinds:
            continue
        _, own, rest = max(kinds, key=lambda one: abs(one[1] - one[2]))
        experts = tuple(np.flatnonzero(np.any([*left.values()], axis=0)).tolist())
        divisors = facts.view.divisors_in(at)
        shown_own, shown_rest = (json_number(2 ** (-power if divisors else power)) for power in (own, rest))
        fill = {
            "ratio": times(2 ** abs(own - rest)), "own": shown_own, "others": shown_rest, "kinds": ", ".join(left),
        }  # fmt: skip
        place = facts.place(at, left, role, experts)
        if place["experts"] is not None:
            place["count"] = int(sum(mask.sum() for mask in left.values()))
            place["tensors"] = _names(facts, at, left, role)
        kind = ".weight" if not inputs else "" if abs(own + rest) <= NEAR_RECIPROCAL else ".far"
        text = f"scale.outlier.layer{kind}{'.divisor' if divisors else ''}"
        yield make("scale.outlier", "warn", text=text, role=role, layer=at, **place, fill=fill)


def _split(middles: Mapping[int, float], far: float) -> tuple[dict[int, float], dict[int, float]] | None:
    """Layers below and above a gap of so many powers of two, the fewer ones first; None where there is no such gap."""
    ordered = sorted(middles.items(), key=lambda item: item[1])
    steps = [after[1] - before[1] for before, after in pairwise(ordered)]
    if not steps or max(steps) < far:
        return None
    at = steps.index(max(steps)) + 1
    low, high = dict(ordered[:at]), dict(ordered[at:])
    return (low, high) if len(low) < len(high) else (high, low)


def _far_halves(
    halves: Mapping[str, tuple[dict[int, float], dict[int, float]]],
) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """Those of some projections' halves that lie far apart, and mirror images among the same layers beside one."""
    far = {kind: few.keys() for kind, (few, many) in halves.items() if _apart(few, many) >= FAR}
    return {
        kind: (few, many) for kind, (few, many) in halves.items()
        if kind in far or (few.keys() in far.values() and abs(_middle_of(few) + _middle_of(many)) <= NEAR_RECIPROCAL)
    }  # fmt: skip


def _apart(few: Mapping[int, float], many: Mapping[int, float]) -> float:
    """Powers of two between two groups."""
    low, high = sorted((few, many), key=_middle_of)
    return min(high.values()) - max(low.values())


def _of_halves(
    facts: Facts, role: str, halves: Mapping[str, tuple[dict[int, float], dict[int, float]]]
) -> Iterator[Finding]:
    """``scale.outlier`` of layers of which so many lie so far from the others that nothing says which are right."""
    if (
        role == "input_scale"
        and halves.keys() & {"gate", "up"}
        and any(apart(facts, at) is not None for at in facts.view.moe_layers)
    ):
        halves = {kind: split for kind, split in halves.items() if kind == "down"}
    if not halves:
        return
    few, many = max(halves.values(), key=lambda split: abs(_middle_of(split[0]) - _middle_of(split[1])))
    divisors = facts.view.divisors_in(facts.view.moe_layers[0])
    own, others = (json_number(2 ** (-power if divisors else power)) for power in (_middle_of(few), _middle_of(many)))
    tables = [facts.tables[role, at, kind] for kind, split in halves.items() for at in split[0]]
    fill = {
        "kinds": ", ".join(halves), "own": own, "others": others, "numbers": sorted(few),
        "among": id_list(tuple(sorted(few))), "rest": id_list(tuple(sorted(many))),
        "ratio": times(2 ** abs(_middle_of(few) - _middle_of(many))),
    }  # fmt: skip
    yield make(
        "scale.outlier", "warn", text=f"scale.outlier.layers{'.divisor' if divisors else ''}", role=role,
        tensors=[facts.view.slot(table.layer, 0, table.projection, role).name for table in tables],
        count=sum(table.numbers(table.good()) for table in tables), fill=fill,
    )  # fmt: skip


def _middle_of(layers: Mapping[int, float]) -> float:
    return float(median_of(np.array(list(layers.values()))))


def unexplained(facts: Facts, layer: int, kind: str, role: str) -> Mask:
    """Experts whose scale has no finding of its own (`scales`)."""
    table = facts.tables[role, layer, kind]
    # Of a 1.0 that all have `spread` tells, of one among others `scales`.
    left = table.good() & ~outliers(table.values, table.good()) & (table.stored != 1)
    if role == "input_scale":
        return left & measured_inputs(facts, table)
    pairs, _ = mismatched_pairs(facts, layer)
    return left & ~pairs if kind in ("gate", "up") and pairs.size else left


def _names(facts: Facts, layer: int, left: Mapping[str, Mask], role: str) -> list[str]:
    """The first tensors of these slots, in `Facts.place`'s order; one that holds all experts', once."""
    slots = ((expert, kind) for expert in range(facts.view.experts_in[layer]) for kind in left if left[kind][expert])
    names = (facts.view.slot(layer, expert, kind, role).name for expert, kind in slots)
    return list(dict.fromkeys(islice(names, NAMES * len(left))))


def log_of(value: np.float32) -> float:
    """Its power of two; 0 of what is no number above zero."""
    return float(np.log2(value)) if value > 0 and np.isfinite(value) else 0.0


def _far(gate: F32, up: F32) -> int | None:
    """1 where gate is far above up in the median of their ratios, −1 where it is far below, else None."""
    middle = float(median_of(np.log2(gate.astype(np.float64)) - np.log2(up.astype(np.float64))))
    return None if abs(middle) <= OUTLIER_FLOOR else 1 if middle > 0 else -1


# Attention whose keys and values come from another input than its queries.
_CROSS = re.compile(r"cross|enc(?:oder|dec)_?(?:decoder_)?attn|attn2")


def apart_in_linears(
    scales: Mapping[str, float], families: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], list[tuple[list[str], float]]]:
    """Fused ordinary modules whose activation scales differ by more than an outlier from its peers.

    Parameters
    ----------
    scales
        Effective multipliers by module, each somebody's own: neither AWQ's nor weight-only.
    families
        Last parts of the names of modules that a server fuses.

    Returns
    -------
    found
        By family: the modules of one parent, the one of the largest scale first, and the largest ratio between two.
        Values that exporters fill in, and values that are no scale, count for none.
    """
    by_parent: dict[str, dict[str, float]] = {}
    for module, value in scales.items():
        scale = np.float32(value)
        if not classify(np.array([scale]))[0] and not any(_is(scale, known) for known, _ in FINGERPRINTS):
            parent, _, last = module.rpartition(".")
            by_parent.setdefault(parent, {})[last] = value
    out: dict[tuple[str, ...], list[tuple[list[str], float]]] = {}
    for family in families:
        for parent, members in by_parent.items():
            there = sorted((last for last in family if last in members), key=lambda last: -members[last])
            if len(there) < 2 or ("q" in family[0] and _CROSS.search(parent)):
                continue
            ratio = members[there[0]] / members[there[-1]]
            if np.log2(ratio) > OUTLIER_FLOOR:
                out.setdefault(family, []).append(([f"{parent}.{last}" for last in there], ratio))
    return out


def _is(scale: np.float32, known: np.float32) -> bool:
    return bool(np.abs(scale - known) <= np.spacing(known))


def times(ratio: float) -> str:
    """A ratio for a sentence.

    >>> times(1000.2), times(3.12e7)
    ('1,000', '30,000,000')
    """
    return f"{ratio if ratio < 1e6 else float(f'{ratio:.0e}'):,.0f}"
