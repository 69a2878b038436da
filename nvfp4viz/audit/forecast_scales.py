"""What a layer's activation scales do on a backend, by how far one reaches; `forecast_weights` has those of weights.

`nvfp4viz.audit.forecast` adds what files, configuration and bytes do, and takes the worst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nvfp4viz.audit.backends import CLIPS_BELOW, FATES, LOSES_ABOVE, NOTHING_ABOVE, Family, outcome_of_scales
from nvfp4viz.audit.facts import OK, Facts, median_of
from nvfp4viz.audit.fills import boundless, fills_of, never_set
from nvfp4viz.audit.scales import outliers
from nvfp4viz.audit.siblings import times
from nvfp4viz.audit.spread import undecided
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint.numbers import CLASSES

# Worst first.  "ignored" is worse than "safe" only in that something is wrong that the backend does not read.
OUTCOMES = ("load-error", "unsupported", "nan", "undefined", "zero", "degraded", "ignored", "safe")
STATIC_INPUT = "why.static-input"
# Which of two scales is the right one, a file does not say; and a scale that is far off may be meant.  Where the
# difference is large the products may also overflow or vanish.
MILD, WILD, HARSH = ("degraded", "safe"), ("degraded", "nan", "safe", "zero"), 7.0


@dataclass(slots=True)
class Effect:
    """What one thing that is wrong does on one backend; `text` and `fill` say why (`nvfp4viz.audit.texts`).

    ``causes`` are the findings that it comes from, as `nvfp4viz.audit.forecast` names them beside another.
    """

    outcome: str
    possible: tuple[str, ...]
    scope: str
    layers: set[int]
    text: str
    fill: dict[str, Any] = field(default_factory=dict)
    causes: tuple[str, ...] = ()


def of_activations(family: Family, scales: LayerScales) -> Iterable[Effect]:
    """What one layer's activation scales do."""
    layer = scales.layer
    if family.engine == "tensorrt-llm" and scales.missing:
        fill = {"tensor": scales.first_missing(), "slots": scales.missing}
        yield Effect("load-error", (), "model", {layer}, "why.key-error", fill)
    elif family.reach == "none":
        if scales.wrong:
            yield Effect("ignored", (), "none", {layer}, "why.ignored", {"slots": scales.wrong})
    else:
        open_ones = _undecided(scales, layer, family)
        yield from open_ones
        yield from _filled(scales, layer, family)
        if scales.any_bad or (scales.wrong and not open_ones):
            yield from _per_expert(scales, layer) if family.reach == "expert" else [_one_maximum(scales, layer, family)]


def _undecided(scales: LayerScales, layer: int, family: Family) -> list[Effect]:
    """Many that lie far from the others: either may be right, so that the forecast is open."""
    single = family.reach == "expert"
    read = [kind for kind in scales.split if (kind != "down" or family.reads_down) and scales.split[kind].any()]
    # By one maximum nothing is lost while that is near enough to either group's own.
    read = [kind for kind in read if single or scales.widths[kind] > LOSES_ABOVE]
    if not read:
        return []
    widest = max(scales.widths[kind] for kind in read)
    slots = sum(int(scales.split[kind].sum()) for kind in read)
    fill = {"layer": layer, "ratio": times(widest), "slots": slots, "kinds": ", ".join(read)}
    ends = WILD if widest > NOTHING_ABOVE else ("degraded", "safe", "zero")
    return [Effect("degraded", ends, "experts" if single else "layer", {layer}, "why.undecided", fill)]


def _filled(scales: LayerScales, layer: int, family: Family) -> Iterable[Effect]:
    """Plausible numbers that nobody measured: too small, if the expert's activations are as large as others'."""
    single = family.reach == "expert"
    slots = 0
    for group in (scales.first, ["down"] if family.reads_down else []):
        kinds = [kind for kind in group if kind in scales.filled]
        measured = [float(value) for kind in kinds for value in scales.values[kind][scales.measured[kind]]]
        # By one maximum the largest that was measured stands for all.
        if measured and not single:
            continue
        least = CLIPS_BELOW * max(measured, default=np.inf)
        slots += sum(int((scales.values[kind][scales.filled[kind]] < least).sum()) for kind in kinds)
    if slots:
        yield Effect("safe", MILD, "none", {layer}, "why.filled", {"layer": layer, "slots": slots})


def of_static_inputs(family: Family, scales: LayerScales) -> Iterable[Effect]:
    """What one layer's stored FP8 activation scales do beside MXFP4 weights (Quark's ``is_dynamic: false``).

    Which backends read them, and how far one reaches there, was not read: one that does divides by the scale and
    multiplies with it, as for NVFP4, so that each unusable slot is judged by itself; one that does not quantises by
    block or leaves activations in BF16.
    """
    layer, bad = scales.layer, scales.unusable()
    if family.reach != "none":
        yield from _filled(scales, layer, replace(family, reach="expert"))
    slots = sum(int(mask.sum()) for mask in bad.values())
    if not slots:
        return
    if family.reach == "none":
        yield Effect("ignored", (), "none", {layer}, "why.ignored", {"slots": slots})
        return
    ids = tuple(np.flatnonzero(np.logical_or.reduce(list(bad.values()))).tolist())
    fill = {"experts": "" if scales.shared else id_list(ids), "layer": layer, "slots": slots}
    scope = "layer" if scales.shared else "experts"
    outcomes, ends = set(), {"ignored"}
    for kind, mask in bad.items():
        healthy = scales.healthy[kind == "down"]
        for expert in np.flatnonzero(mask).tolist():
            absent = bool(scales.absent[kind][expert])
            for value in FATES if absent else (scales.values[kind][expert],):
                outcome, possible = outcome_of_scales(value, healthy, (healthy, healthy))
                outcomes.add("undefined" if absent else outcome)
                ends.update((outcome, *possible))
    # One sentence of all the layer's slots, whatever each of them does.
    worst = min(outcomes, key=OUTCOMES.index)
    yield Effect(worst, tuple(sorted(ends)), scope, {layer}, STATIC_INPUT, fill)


class LayerScales:
    """One layer's activation scales, as the loaders' ``(E, S)`` and ``(E,)`` parameters: NaN stands for no value."""

    def __init__(self, facts: Facts, layer: int, *, filled: bool = False) -> None:
        """``filled``: some have the fingerprints of `fills`."""
        kinds = facts.view.projections_in[layer]
        self._facts, self.layer, self.tower, self.block = facts, layer, facts.tower, facts.block(layer)
        tables = self._tables = {kind: facts.tables["input_scale", layer, kind] for kind in kinds}
        self.first = [kind for kind in kinds if kind != "down"]
        self.absent = {kind: facts.never_written(table) for kind, table in tables.items()}
        self.values = {kind: table.values.astype(np.float64) for kind, table in tables.items()}
        good = {kind: (table.state == OK) & (table.classes() == 0) for kind, table in tables.items()}
        # What was filled in, or never set, is no measure for the others; the largest float32 is lost by itself.
        fills = fills_of(facts, layer) if filled else {kind: {} for kind in kinds}
        some = {kind: np.logical_or.reduce([~good[kind] & False, *fills[kind].values()]) for kind in kinds}
        measured = self.measured = {
            kind: good[kind] & ~some[kind] & ~never_set(table) for kind, table in tables.items()
        }
        self.lost = {kind: mask for kind in kinds if (mask := boundless(fills[kind])) is not None}
        far = {
            kind: outliers(table.values, good[kind], measured[kind]) | self.lost.get(kind, False)
            for kind, table in tables.items()
        }
        for kind, table in tables.items():
            # A number that nobody set has no peers to be an outlier of: it is as far off as it is.
            far[kind] = far[kind] | (never_set(table) & _off(table.values, measured[kind]))
        self.filled = {kind: mask & ~far[kind] for kind, mask in some.items() if (mask & ~far[kind]).any()}
        # Those of which nobody knows whether they or the others are wrong count for nothing that is bad.
        self.split = {kind: undecided(facts, tables[kind], mask) for kind, mask in far.items()}
        self.widths = {
            kind: _width(tables[kind].values, measured[kind], mask) for kind, mask in self.split.items() if mask.any()
        }
        stored = {kind: table.state == OK for kind, table in tables.items()}
        dialect = facts.view.dialects.get(layer)
        vector = any(facts.has_vector(layer, kind, "input_scale") for kind in kinds)
        fused = dialect is not None and dialect.arrangement == "fused" and not vector
        # What lies in a file that was not read is neither absent nor a number, and goes into no maximum.
        self.known = {kind: self.absent[kind] | stored[kind] for kind in kinds}
        self.bad = {
            kind: self.absent[kind] | (stored[kind] & ~good[kind]) | (far[kind] & ~self.split[kind]) for kind in kinds
        }
        self.any_bad = any(bool(mask.any()) for mask in self.bad.values())
        self.shared = fused or any(tables[kind].shared and bool(mask.any()) for kind, mask in self.bad.items())
        self.missing = int(sum(mask.sum() for mask in self.absent.values()))
        self.wrong = int(sum(mask.sum() for mask in (*self.bad.values(), *self.split.values())))
        self.healthy = (
            *(
                _typical(
                    [self.values[kind][measured[kind] & ~far[kind]] for kind in group],
                    [self.values[kind][good[kind] & ~far[kind]] for kind in group],
                )
                for group in (self.first, ["down"] if "down" in kinds else [])
            ),
        )

    def first_missing(self) -> str:
        for kind, mask in self.absent.items():
            for expert in np.flatnonzero(mask).tolist():
                return self._facts.view.slot(self.layer, expert, kind, "input_scale").name
        return ""

    def experts(self) -> tuple[int, ...]:
        """Experts with something wrong."""
        return tuple(np.flatnonzero(np.logical_or.reduce(list(self.bad.values()))).tolist())

    def classes_in(self, kinds: Iterable[str]) -> list[str]:
        """Classes of some projections' bad values."""
        return sorted({CLASSES[k] for kind in kinds for k in self._tables[kind].classes().tolist() if k})

    def classes_of(self, expert: int) -> set[str]:
        """Classes of one expert's bad values; none where one is merely far from its peers."""
        return {CLASSES[number] for table in self._tables.values() if (number := int(table.classes()[expert]))}

    def deciding(self, expert: int) -> list[str]:
        """Those of its classes that the maximum of gate and up does not hide."""
        stored = {kind: self.values[kind][expert] for kind in self._tables if not self.absent[kind][expert]}
        first = np.max([value for kind, value in stored.items() if kind != "down"] or [np.nan])
        # A NaN wins, as in ``torch.max``.
        shown = [kind for kind, value in stored.items() if kind == "down" or value == first or value != value]
        return sorted({CLASSES[number] for kind in shown if (number := int(self._tables[kind].classes()[expert]))})

    def unusable(self) -> dict[str, Any]:
        """By projection: slots without a number that could be used, however far from its peers."""
        return {
            kind: self.absent[kind] | (table.classes() > 0) | self.lost.get(kind, False)
            for kind, table in self._tables.items()
        }

    def pair(self, expert: int, fate: float) -> tuple[float, float]:
        """What CUTLASS makes of one expert's slots when the missing ones hold ``fate``."""
        first, second = (
            [fate if self.absent[kind][expert] else self.values[kind][expert] for kind in self._known(expert, kinds)]
            for kinds in (self.first, ["down"])
        )
        # A NaN wins, as in ``torch.max``.
        return float(np.max(first)) if first else self.healthy[0], float(second[0]) if second else self.healthy[1]

    def expected(self, expert: int) -> tuple[float, float]:
        """What the expert's own scales are, or its peers' where they are bad."""
        first, second = (
            [float(self.values[kind][expert]) for kind in self._known(expert, kinds) if not self.bad[kind][expert]]
            for kinds in (self.first, ["down"])
        )
        return max(first, default=self.healthy[0]), second[0] if second else self.healthy[1]

    def _known(self, expert: int, kinds: list[str]) -> list[str]:
        return [kind for kind in kinds if kind in self.known and self.known[kind][expert]]


def _off(values: Any, measured: Any) -> Any:
    """Which of some values (E,) may change what is computed, by what was measured of others.

    Too large they are for the smallest of these, if its expert's activations are as small; too small for half of them.
    """
    if not measured.any():
        return np.zeros_like(measured)
    with np.errstate(all="ignore"):
        middle = 2 ** median_of(np.log2(values[measured].astype(np.float64)))
        return (values > LOSES_ABOVE * values[measured].min()) | (values < CLIPS_BELOW * middle)


def _width(values: Any, measured: Any, some: Any) -> float:
    """How much the maximum of all may be above that of the group that is right, whichever it is."""
    return float(values[measured].max() / min(values[some].max(), values[measured & ~some].max()))


def _typical(values: list[Any], others: list[Any]) -> float:
    """Their median, or of the others where there are none."""
    for each in (values, others):
        found = np.concatenate(each) if each else np.zeros(0)
        if found.size:
            return float(median_of(found))
    return 1e-3


def _per_expert(scales: LayerScales, layer: int) -> Iterable[Effect]:
    """Each expert lives by its own scales, or all by the one that the file has for them."""
    missing, stored, room = [], [], 1.0
    smallest = _smallest(scales, list(scales.bad))
    scope = "layer" if scales.shared else "experts"
    for expert in scales.experts():
        absent = any(mask[expert] for mask in scales.absent.values())
        fates = FATES if absent else (0.0,)
        outcomes: set[str] = set()
        for fate in fates:
            outcome, possible = outcome_of_scales(*scales.pair(expert, fate), scales.expected(expert))
            outcomes |= {outcome, *possible}
        # A NaN or an infinity beside it wins, whatever memory held in an open slot.
        if absent and len(outcomes) > 1:
            missing.append((expert, outcomes))
        elif outcomes != {"safe"}:
            pair = scales.pair(expert, 0.0)
            outcome, possible = outcome_of_scales(*pair, scales.expected(expert))
            classes, shown = scales.classes_of(expert), scales.deciding(expert)
            small = not classes and all(own <= due for own, due in zip(pair, scales.expected(expert), strict=True))
            if small or (outcome == "degraded" and classes <= {"negative"}):
                # What is only far from its peers may be meant, small activations have small scales; and where both
                # signs turn nothing does: with a weight scale's sign, or where hardware keeps a block scale's.
                possible = tuple(sorted({*MILD, *possible, outcome}))
            stored.append((expert, outcome, possible, shown))
        else:
            pair = scales.pair(expert, 0.0)
            ratios = np.divide(pair, scales.expected(expert))
            room = max(room, float(ratios.max()), float(1 / ratios.min()))
            if any(own > LOSES_ABOVE * least for own, least in zip(pair, smallest, strict=True)) and ratios.max() > 1:
                # Its peers' median would have room for it, the smallest of them not.
                stored.append((expert, "degraded", MILD, scales.deciding(expert)))
    if missing:
        possible = tuple(sorted(set().union(*(outcomes for _, outcomes in missing))))
        ids = tuple(expert for expert, _ in missing)
        slots = int(sum(mask[list(ids)].sum() for mask in scales.absent.values()))
        fill = {"experts": id_list(ids), "layer": layer, "slots": slots}
        yield Effect("undefined", possible, scope, {layer}, "why.expert-missing", fill)
    for outcome in ("nan", "zero", "degraded"):
        for far in (False, True):
            # A number of no bad class can only be too far from where it should be.
            some = [one for one in stored if one[1] == outcome and (not one[3]) == far]
            if some:
                ids = tuple(one[0] for one in some)
                # In the order of their experts, as far as one name for several allows.
                names = dict.fromkeys(name for one in some for name in one[3])
                # Of several no better end than the best of any one.
                hurt = any("safe" not in one[2] for one in some)
                possible = tuple(sorted({end for one in some for end in one[2] if end != "safe" or not hurt}))
                possible = () if possible == (outcome,) else possible
                fill = {"experts": id_list(ids), "layer": layer, "slots": len(ids), "classes": ", ".join(names)}
                text = f"why.expert-{outcome}{'.far' if far and outcome == 'zero' else ''}"
                yield Effect(outcome, possible, scope, {layer}, text, fill)
    if not missing and not stored:
        yield _harmless(scales, list(scales.bad), room)


def _one_maximum(scales: LayerScales, layer: int, family: Family) -> Effect:
    """All experts of a layer live by one maximum a GEMM."""
    kinds = [*scales.first, "down"] if family.reads_down and "down" in scales.values else scales.first
    missing = bool(any(scales.absent[kind].any() for kind in kinds))
    outcomes: set[str] = set()
    maxima, smallest = _layer_maxima(scales, kinds), _smallest(scales, kinds)
    outcome, turned, pair = "safe", False, [1.0]
    for fate in FATES if missing else (0.0,):
        pair = []
        for group, good in ((scales.first, scales.healthy[0]), (["down"], scales.healthy[1])):
            if not group or not set(group) <= set(kinds):
                pair.append(good)
                continue
            filled = [np.where(scales.absent[kind], fate, scales.values[kind])[scales.known[kind]] for kind in group]
            values = np.concatenate(filled)
            # A NaN wins, as in ``torch.max``.
            pair.append(float(np.max(values)) if values.size else good)
        turned = family.keeps_sign and min(pair) < 0
        pair = [abs(value) if family.keeps_sign else value for value in pair]
        outcome, possible = outcome_of_scales(pair[0], pair[1], maxima)
        outcomes |= {outcome, *possible}
        if outcome == "degraded" and min(pair) < 0:
            outcomes.add("safe")
        if outcome == "safe" and any(
            own > known and own > LOSES_ABOVE * least for own, known, least in zip(pair, maxima, smallest, strict=True)
        ):
            # The largest of the layer's own has room for it, the smaller ones have not.
            outcome, outcomes = "degraded", outcomes | set(MILD)
    fill = {"layer": layer, "slots": scales.wrong, "classes": ", ".join(scales.classes_in(kinds))}
    # A stored NaN wins every maximum: then it does not matter what the open slots hold.
    if missing and len(outcomes) > 1:
        # Of a maximum over nothing that is stored there is no harmless one.
        bare = [
            kind for group in (scales.first, ["down"])
            if set(group) <= set(kinds) and all(scales.absent[kind].all() for kind in group) for kind in group
        ]  # fmt: skip
        text = "why.layer-missing.whole" if bare else "why.layer-missing"
        return Effect("undefined", tuple(sorted(outcomes)), "layer", {layer}, text, {**fill, "kinds": ", ".join(bare)})
    if outcome == "safe":
        if turned:
            return Effect("safe", (), "none", {layer}, "why.sign-cancels", fill)
        if any(scales.bad[kind].any() for kind in kinds):
            return _harmless(scales, kinds, max(max(a / b, b / a) for a, b in zip(pair, maxima, strict=True)))
        return Effect("ignored", (), "none", {layer}, "why.ignored", fill)
    kind = "negative" if outcome == "degraded" and min(pair) < 0 else outcome
    return Effect(
        outcome, tuple(sorted(outcomes - {outcome} and outcomes)), "layer", {layer}, f"why.layer-{kind}", fill
    )


def _harmless(scales: LayerScales, kinds: list[str], off: float) -> Effect:
    """What is bad and changes nothing: hidden by a maximum, or too little off for the block scales to show it."""
    slots = int(sum(scales.bad[kind].sum() for kind in kinds))
    text, fill = ("why.masked", {}) if off <= 1 else ("why.room", {"ratio": f"{off:,.3g}"})
    return Effect("safe", (), "none", {scales.layer}, text, {"slots": slots, **fill})


def _smallest(scales: LayerScales, kinds: list[str]) -> tuple[float, float]:
    """The smallest that was measured for gate and up, and for down; infinite where none was."""
    out = []
    for group in (scales.first, ["down"]):
        values = [scales.values[kind][scales.measured[kind] & ~scales.bad[kind]] for kind in group if kind in kinds]
        out.append(min((float(each.min()) for each in values if each.size), default=np.inf))
    return out[0], out[1]


def _layer_maxima(scales: LayerScales, kinds: list[str]) -> tuple[float, float]:
    """The maxima that a layer would have without its bad values."""
    out = []
    for group, typical in ((scales.first, scales.healthy[0]), (["down"], scales.healthy[1])):
        values = [scales.values[kind][~scales.bad[kind] & scales.known[kind]] for kind in group if kind in kinds]
        found = np.concatenate(values) if values else np.zeros(0)
        found = found[np.isfinite(found)]
        out.append(float(found.max()) if found.size else typical)
    return out[0], out[1]
