"""What a layer's second-level weight scales do on a backend, by expert.

On every backend they are numbers of their own but on one: FlashInfer's B12X gets ``E4M3(block scale * weight_scale_2)``
and a second level of 1 (vLLM 0.33.0, ``prepare_fp4_layer_for_moe``; serving-vllm.md 4.4).  The block scales of a small
second level fall below E4M3's normal numbers there, and in the end to zero, in a file that is sound everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nvfp4viz import formats
from nvfp4viz.audit.backends import Family
from nvfp4viz.audit.facts import OK, Facts, ScaleTable, median_of
from nvfp4viz.audit.fills import never_set
from nvfp4viz.audit.forecast_scales import HARSH, MILD, WILD, Effect
from nvfp4viz.audit.scales import OUTLIER_FLOOR, has_wrong_convention, is_slight, mismatched_pairs, outliers
from nvfp4viz.audit.spread import all_ones
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint.numbers import CLASSES

FOLDING = "vllm-flashinfer-b12x"
# E4M3's largest number, and its smallest with all four significant bits.
_LARGEST, _NORMAL = np.float32(448), np.float32(2.0**-6)


class LayerWeights:
    """One layer's second-level weight scales: their classes, and which pairs differ."""

    def __init__(self, facts: Facts, layer: int) -> None:
        self.layer, self.tower = layer, facts.tower
        tables = {kind: facts.tables["weight_scale_2", layer, kind] for kind in facts.view.projections_in[layer]}
        self.classes = {kind: table.classes() for kind, table in tables.items()}
        # What one number does it does to all of them.
        self.scope = "layer" if all(table.shared for table in tables.values()) and tables else "experts"
        inputs = {kind: facts.tables.get(("input_scale", layer, kind)) for kind in tables}
        self.inputs = {kind: table.values for kind, table in inputs.items() if table is not None}
        self.mismatched, self.ratios = mismatched_pairs(facts, layer)
        # Values far from their peers; where the whole layer is the other way up, that is said already.
        wrong = [table for table in tables.values() if has_wrong_convention(facts, table)]
        upright = not wrong
        self.stored = np.logical_or.reduce([table.state == OK for table in tables.values()])
        self.reversed = {table.projection: table.good() & (table.values > 1) for table in wrong}
        self.far = {
            kind: _far_weights(table) if upright else np.zeros(len(table.values), np.bool_)
            for kind, table in tables.items()
        }
        self.unset = {kind: mask for kind, table in tables.items() if (mask := all_ones(facts, table)).any()}
        # Is there anybody whose numbers say that these should be others?
        self.have_peers = bool(self.unset) and facts.has_set_weights()
        masks = [
            self.mismatched, *self.reversed.values(), *self.far.values(), *self.unset.values(), *self.classes.values(),
        ]  # fmt: skip
        self.wrong = any(bool(mask.any()) for mask in masks)

    def cancels(self, family: Family, kind: str, expert: int) -> bool:
        """Is the activation scale that the kernel multiplies with this one negative too?"""
        if family.reach == "none" or family.keeps_sign:
            return False
        half = [values for own, values in self.inputs.items() if (own == "down") == (kind == "down")]
        largest = np.max(half, axis=0) if half else np.ones(expert + 1)
        return bool((largest[expert] if family.reach == "expert" else largest.max()) < 0)


def _far_weights(table: ScaleTable) -> Any:
    """Which of a projection's second-level weight scales (E,) are far from their peers, whatever 1.0 stands among them.

    Ones are no measure for the others, and as far off as they are, however many have them.
    """
    good, ones = table.good(), never_set(table)
    far = outliers(table.values, good & ~ones)
    if not ones.any():
        return far
    middle = float(median_of(np.log2(table.values[good & ~ones].astype(np.float64))))
    return far | (ones & (abs(middle) > OUTLIER_FLOOR))


def of_weights(family: Family, weights: LayerWeights) -> Iterable[Effect]:
    """What second-level weight scales do: on every backend, for gate and down; for up where it has its own."""
    layer = weights.layer
    effects: dict[tuple[str, tuple[str, ...], str], list[int]] = {}
    paired = family.gate_rules and {"gate", "up"} <= weights.classes.keys()
    for kind, found in weights.classes.items():
        for expert in np.flatnonzero(found).tolist():
            name = CLASSES[int(found[expert])]
            outcome, possible = weight_outcome(family, kind, name)
            text = f"why.weight-{outcome}"
            if paired and family.engine == "tensorrt-llm" and kind in ("gate", "up"):
                other = int(weights.classes["up" if kind == "gate" else "gate"][expert])
                # It takes the larger of the two, of which a NaN and an infinity are; the other's is not its own.
                if name not in ("nan", "inf") and CLASSES[other] not in ("zero", "negative", "subnormal"):
                    outcome, possible, text = "degraded", MILD, "why.weight-larger"
            elif paired and kind == "up":
                outcome, possible, text = "degraded", MILD, "why.weight-up"
            elif name == "negative" and weights.cancels(family, kind, expert):
                possible = MILD
            effects.setdefault((outcome, possible, text), []).append(expert)
    for (outcome, possible, text), experts in effects.items():
        fill = {"experts": id_list(tuple(sorted(set(experts)))), "layer": layer, "slots": len(experts)}
        yield Effect(outcome, possible, weights.scope, {layer}, text, fill)
    if family.gate_rules and weights.mismatched.any():
        ids = tuple(np.flatnonzero(weights.mismatched).tolist())
        fill = {"experts": id_list(ids), "layer": layer, "slots": len(ids)}
        text = "why.pair.maximum" if family.engine == "tensorrt-llm" else "why.pair"
        if is_slight(weights.ratios[list(ids)]):
            yield Effect("safe", (), "none", {layer}, "why.pair.slight", fill)
            return
        off = np.abs(np.log2(weights.ratios[list(ids)])).max()
        yield Effect("degraded", MILD if off < HARSH else WILD, weights.scope, {layer}, text, fill)
    # Up's own is not read where gate's stands for both; where the larger does, it may be up's.
    unread = "up" if paired and family.engine != "tensorrt-llm" else None
    over = [mask for kind, mask in weights.reversed.items() if kind != unread]
    if over:
        ids = tuple(np.flatnonzero(np.any(over, axis=0)).tolist())
        whole = bool((np.any(over, axis=0) | ~weights.stored).all())
        fill = {"experts": "" if whole else id_list(ids), "layer": layer, "slots": len(ids)}
        yield Effect("degraded", WILD, "layer" if whole else weights.scope, {layer}, "why.convention", fill)
    ones = {kind: mask for kind, mask in weights.unset.items() if kind != unread}
    if ones:
        # Block scales may carry all of it; other numbers in the file make that less likely.
        fill = {"layer": layer, "kinds": ", ".join(ones), "slots": int(sum(mask.sum() for mask in ones.values()))}
        outcome, scope = ("degraded", "layer") if weights.have_peers else ("safe", "none")
        yield Effect(outcome, WILD, scope, {layer}, f"why.weight-unset{'' if weights.have_peers else '.model'}", fill)
    for kind, far in weights.far.items():
        told = weights.mismatched if family.gate_rules and kind in ("gate", "up") and weights.mismatched.size else False
        ids = tuple(np.flatnonzero(far & ~np.asarray(told)).tolist())
        if ids:
            fill = {"experts": id_list(ids), "layer": layer, "projection": kind, "slots": len(ids)}
            yield Effect("degraded", WILD, weights.scope, {layer}, "why.weight-outlier", fill)


def weight_outcome(family: Family, kind: str, name: str) -> tuple[str, tuple[str, ...]]:
    """What a bad second-level weight scale does where it is read."""
    if name in ("zero", "subnormal"):
        return "zero", ()
    if name == "negative":
        return "degraded", ()
    # Infinite products of the first GEMM are quantised again for the second: blocks saturate, codes end at ±6, and
    # finite garbage may come out.
    saturates = name == "inf" and kind != "down" and family.reach != "none"
    return "nan", ("degraded", "nan") if saturates else ()


def of_folded(name: str, facts: Facts) -> Iterator[Effect]:
    """What is left of block scales, for experts of which not even the largest stays a normal number."""
    if name != FOLDING:
        return
    for layer in facts.layers:
        if facts.block(layer) != "NVFP4":
            continue
        zero, coarse = set[int](), set[int]()
        for kind in facts.view.projections_in[layer]:
            table = facts.tables.get(("weight_scale_2", layer, kind))
            # Gate's stands for up as well.
            if table is None or (kind == "up" and "gate" in facts.view.projections_in[layer]):
                continue
            good = table.good() & (table.values < 1)
            left = formats.decode_e4m3(formats.encode_e4m3(np.where(good, table.values, 1) * _LARGEST))
            zero |= set(table.where(good & (left == 0)))
            coarse |= set(table.where(good & (left < _NORMAL)))
        for ids, outcome, possible in ((zero, "zero", ()), (coarse - zero, "degraded", ("degraded", "zero"))):
            if ids:
                whole = len(ids) == facts.view.experts_in[layer]
                fill = {"layer": layer, "experts": id_list(tuple(sorted(ids))), "slots": len(ids)}
                scope = "layer" if whole else "experts"
                yield Effect(outcome, possible, scope, {layer}, f"why.folded.{outcome}", fill)
