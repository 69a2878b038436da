"""Activation scales that nobody measured: what exporters write for experts that calibration never reached.

An exact value is a fingerprint only as far as it could not have been measured.  Calibration on BF16 activations gives
amax with 8 significant bits, and a scale that is stored in BF16 has no more, so a measured 0.5, 1 or 6, and two experts
with one maximum, occur now and then in a checkpoint with tens of thousands of slots.  Where a projection's values are
that coarse, either all projections of some experts agree, three at least in a layer (`_agreed`) or more in the file
(`_agreed_in_file`), or so many experts of one projection have the number that it is no chance (`_is_no_chance`), or so
many layers hold no other (`_throughout`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import UNREADABLE, Facts, ScaleTable
from nvfp4viz.audit.fineness import are_coarse, is_coarse, is_number, least_by_chance

Mask = npt.NDArray[np.bool_]
_F = np.float32

# Effective multiplier, and its origin.  Sources: ModelOpt `set_expert_quantizer_amax` (0.5) and `export_amax` (6 and
# FLT_MAX), vLLM's per-token base scale (1).
FINGERPRINTS = (
    (_F(0.5) / _F(2688), "default-amax"),
    (_F(6) / _F(2688), "max-bound"),
    (np.finfo(_F).max / _F(2688), "float-max"),
    (_F(1) / _F(2688), "per-token-base"),
)

# The same of a scale that is amax/448, E4M3's largest number: of activations in FP8.  There `export_amax` writes 448
# and not 6, a scale of exactly 1 (`never_set`), and no base scale is known.
FP8_FLOAT_MAX = np.finfo(_F).max / _F(448)
FP8_FINGERPRINTS = ((_F(0.5) / _F(448), "default-amax"), (FP8_FLOAT_MAX, "float-max"))

# One chance a file and not one a projection, but of more numbers that lie close together.
_IN_FILE = 1e-8


def fills_of(facts: Facts, layer: int) -> dict[str, dict[str, Mask]]:
    """Filled-in activation scales by projection and origin, whichever number they divide amax by."""
    if layer not in facts.fills:
        seen = {at: _hits_in(facts, at) for at in {*facts.layers, layer}}
        file = _File.of(list(seen.values()))
        facts.fills.update({at: _fills_of(facts, hits, file) for at, hits in seen.items()})
    return facts.fills[layer]


def _tables(facts: Facts, layer: int) -> dict[str, ScaleTable]:
    return {kind: facts.tables["input_scale", layer, kind] for kind in facts.view.projections_in[layer]}


def divisor_of(facts: Facts, layer: int) -> int:
    """What a layer's activation scales divide amax by: the largest number of NVFP4, or of FP8 activations."""
    label = facts.labels.get(layer) or ""
    return 2688 if facts.block(layer) == "NVFP4" and "W4A8" not in (facts.view.scheme, label[:4]) else 448


def never_set(table: ScaleTable) -> Mask:
    """Usable numbers (E,) that are 1 as stored, among others that are not: nobody has set them."""
    good = table.good()
    one: Mask = good & (table.stored == 1)
    return np.zeros_like(good) if np.array_equal(one, good) else one


def measured_inputs(facts: Facts, table: ScaleTable) -> Mask:
    """Usable activation scales (E,) of a projection that were neither filled in nor left at 1."""
    left: Mask = table.good() & ~never_set(table)
    for mask in fills_of(facts, table.layer).get(table.projection, {}).values():
        left &= ~mask
    return left


def boundless(fills: Mapping[str, Mask]) -> Mask | None:
    """Of one projection's: those that an infinite amax became, at which everything vanishes."""
    return next((mask for origin, mask in fills.items() if origin.startswith("float-max")), None)


class _Hits(NamedTuple):
    """One layer's numbers that are fingerprints.

    Attributes
    ----------
    over
        What its scales divide amax by.
    masks
        By origin and projection.
    some
        By projection, of any origin.
    alike
        By origin: as ``masks``, of projections that are no `_is_amid`.
    """

    tables: dict[str, ScaleTable]
    over: int
    masks: dict[str, dict[str, Mask]]
    some: dict[str, Mask]
    alike: dict[str, dict[str, Mask]]


class _File(NamedTuple):
    """What all layers together tell of one.

    Attributes
    ----------
    coarse
        Projections, and what their scales divide amax by, whose other numbers are as coarse as `are_coarse` says, in
        most experts of all layers.
    synced
        Most layers that tell have one number for all experts of down, as after a synchronised calibration or with one
        quantiser: what all experts share is one measurement then.
    agreed
        `_agreed_in_file`.
    throughout
        `_throughout`.
    """

    coarse: frozenset[tuple[str, int]]
    synced: bool
    agreed: frozenset[str]
    throughout: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, layers: list[_Hits]) -> _File:
        own: dict[tuple[str, int], list[npt.NDArray[np.float32]]] = {}
        for layer in layers:
            for kind, table in layer.tables.items():
                own.setdefault((kind, layer.over), []).append(_others(table, layer.some[kind]))
        coarse = frozenset(key for key, each in own.items() if are_coarse(np.concatenate(each), key[1]))
        downs = [each for (kind, _), every in own.items() if kind == "down" for each in every if each.size > 1]
        synced = 2 * sum(bool((each == each[0]).all()) for each in downs) > len(downs)
        return cls(coarse, synced, _agreed_in_file(layers, coarse, synced=synced), _throughout(layers))


def _hits_in(facts: Facts, layer: int) -> _Hits:
    tables, over = _tables(facts, layer), divisor_of(facts, layer)
    masks = {
        origin: {kind: table.good() & is_number(table.values, value) for kind, table in tables.items()}
        for value, origin in (FINGERPRINTS if over == 2688 else FP8_FINGERPRINTS)
    }
    some = {kind: np.any([each[kind] for each in masks.values()], axis=0) for kind in tables}
    alike = {
        origin: {kind: mask for kind, mask in each.items() if not _is_amid(tables[kind], mask, some[kind])}
        for origin, each in masks.items()
    }
    return _Hits(tables, over, masks, some, alike)


def _fills_of(facts: Facts, layer: _Hits, file: _File) -> dict[str, dict[str, Mask]]:
    tables, over, some = layer.tables, layer.over, layer.some
    ending = "" if over == 2688 else ".fp8"
    out: dict[str, dict[str, Mask]] = {kind: {} for kind in tables}
    for origin, masks in layer.masks.items():
        one = file.synced and _is_everywhere(layer, masks)
        agreed = _agreed(layer.alike[origin], proven=origin in file.agreed, one=one)
        for kind, mask in masks.items():
            if not mask.any():
                continue
            proven = origin == "float-max" or not _may_be_measured(layer, kind, file.coarse)
            alone = kind in layer.alike[origin] and _is_no_chance(tables, kind, mask, some, facts.view.top_k)
            all_over = (origin, kind) in file.throughout and _has_no_other(tables[kind], mask)
            if not proven and not alone and not all_over:
                mask = agreed
            if mask.any():
                out[kind][origin + ending] = mask
    copied = _copies_of_maximum(tables, over)
    for kind, found in out.items():
        left = copied & ~np.logical_or.reduce([*found.values(), copied & False])
        if left.any():
            out[kind]["copied-maximum"] = left
    own = _copies_in_down(tables, over) & ~copied
    if own.any() and not out["down"]:
        out["down"]["copied-maximum.down"] = own
    return out


def _agreed(masks: Mapping[str, Mask], *, proven: bool, one: bool) -> Mask:
    """Experts with one number in all projections, if they are too many for chance; of down and one more at least.

    However many have it in gate and up: one loud token, or one loud channel, may be behind all of these.

    Parameters
    ----------
    proven
        In the file they are too many (`_agreed_in_file`).
    one
        All experts have it, and where they share a number it is one measurement.
    """
    every, most = _every(masks)
    enough = proven or (not one and every.sum() >= least_by_chance(most))
    return every if every.any() and enough else np.zeros_like(every)


def _every(masks: Mapping[str, Mask]) -> tuple[Mask, int]:
    """Experts with one number in all projections, and how many have it in gate or up."""
    every: Mask = np.logical_and.reduce(list(masks.values()))
    most = max((int(mask.sum()) for kind, mask in masks.items() if kind != "down"), default=0)
    return (every if "down" in masks and len(masks) > 1 else np.zeros_like(every)), most


def _agreed_in_file(layers: list[_Hits], coarse: frozenset[tuple[str, int]], *, synced: bool) -> frozenset[str]:
    """Origins of which so many experts have the number in all projections, in whatever layers, that it is no chance.

    One expert that calibration never reached is so in every layer; in one alone it may be one of tens of thousands.
    Layers whose values are fine prove themselves, and nothing of the others.
    """
    found: dict[str, int] = {}
    among: dict[str, int] = {}
    often: dict[str, Counter[int]] = {}
    experts = max((len(mask) for layer in layers for mask in layer.some.values()), default=0)
    for layer in layers:
        for origin, masks in layer.alike.items():
            every, most = _every(masks)
            # What all share is one measurement.
            one = synced and _is_everywhere(layer, masks)
            among[origin] = among.get(origin, 0) + (1 if one else most)
            if every.any() and all(_may_be_measured(layer, kind, coarse) for kind in masks):
                found[origin] = found.get(origin, 0) + (1 if one else int(every.sum()))
                often.setdefault(origin, Counter()).update(np.flatnonzero(every).tolist())
    return frozenset(
        origin for origin, count in found.items()
        if count >= least_by_chance(among[origin], _IN_FILE)
        or _is_never_reached(max(often[origin].values()), len(layers), experts)
    )  # fmt: skip


def _is_never_reached(times: int, layers: int, experts: int) -> bool:
    """Has one of so many experts the number so often that it is no chance?

    In one layer an expert's tokens give it once in 128 times, and the products that down reads as often.

    >>> [_is_never_reached(2, 2, 8), _is_never_reached(3, 3, 8), _is_never_reached(3, 60, 256)]
    [False, True, False]
    """
    return experts * comb(layers, times) * 128.0 ** (-2 * times) <= _IN_FILE


def _throughout(layers: list[_Hits]) -> frozenset[tuple[str, str]]:
    """Origins and projections of which so many layers hold nothing but the number that it is no chance.

    Of one layer it may be one measurement: one loud token or channel, or an exporter that gives all the largest.
    """
    found = Counter(
        (origin, kind) for layer in layers for origin, masks in layer.alike.items() for kind, mask in masks.items()
        if _has_no_other(layer.tables[kind], mask)
    )  # fmt: skip
    among = Counter(kind for layer in layers for kind in layer.tables)
    return frozenset(key for key, count in found.items() if count >= least_by_chance(among[key[1]], _IN_FILE))


def _has_no_other(table: ScaleTable, hits: Mask) -> bool:
    """Has every usable number of a projection this fingerprint?"""
    return bool(hits.any()) and np.array_equal(hits, table.good())


def _is_everywhere(layer: _Hits, masks: Mapping[str, Mask]) -> bool:
    """Have all experts of a layer one fingerprint, in each of these projections?"""
    return all(_has_no_other(layer.tables[kind], mask) for kind, mask in masks.items())


def _is_amid(table: ScaleTable, hits: Mask, some: Mask) -> bool:
    """Do most other numbers of a projection lie within a sixteenth of a fingerprint that experts have?

    There BF16 knows a few numbers only and measurement gives each of them often; a fill would cost nothing there.
    """
    own = _others(table, some)
    return bool(hits.any() and own.size) and float(np.mean(np.abs(own / table.values[hits][0] - 1) < 1 / 16)) > 0.5


def _may_be_measured(layer: _Hits, kind: str, coarse: frozenset[tuple[str, int]]) -> bool:
    """Is a projection's exact number one of those that calibration gives, by what else lies there?

    Where nothing else does, the same projection of the other layers answers, and the layer's other projections; but not
    for numbers that were not read.  ``coarse``: as `_File`.
    """
    own = _others(layer.tables[kind], layer.some[kind])
    if own.size:
        return are_coarse(own, layer.over)
    rest = [_others(table, layer.some[other]) for other, table in layer.tables.items() if other != kind]
    unread = bool((layer.tables[kind].state == UNREADABLE).any())
    answers = (kind, layer.over) in coarse or any(are_coarse(each, layer.over) for each in rest)
    return unread or answers or not any(each.size for each in rest)


def _others(table: ScaleTable, some: Mask) -> npt.NDArray[np.float32]:
    return table.values[table.good() & ~some & (table.stored != 1)]


def _is_no_chance(
    tables: Mapping[str, ScaleTable], kind: str, hits: Mask, some: Mapping[str, Mask], top_k: int | None
) -> bool:
    """Do so many experts have one fingerprint in a projection that BF16 maxima would hardly ever give it?

    Each expert's maximum is this number once in about 128 times, and `least_by_chance` says how many of so many are
    too many.  The inputs of down are the expert's own products, so that each counts.  Those of gate and up are tokens:
    one loud token gives all the ``top_k`` experts that it is routed to one maximum, so that only so many experts are
    one piece of evidence, whether in gate or in both.  Nor does the layer's largest value prove anything there: all
    loud tokens may have it, where a norm's output ends at one channel.  After calibration exporters may give all
    experts one maximum: that is one measurement too.
    """
    table = tables[kind]
    good = table.good()
    own, found = table.values[good & ~some[kind]], int(hits.sum())
    # Where another number repeats about as often, repetition means nothing.
    often = int(np.unique(own, return_counts=True)[1].max()) if own.size else 0
    if table.shared or found <= 2 * often:
        return False
    if kind == "down":
        apart = own.size or any(np.unique(each.values[each.good()]).size > 1 for each in tables.values())
        return bool(apart) and found >= least_by_chance(int(good.sum()))
    if not top_k or not (own > table.values[hits].max()).any():
        return False
    return -(-found // top_k) >= least_by_chance(int(good.sum()))


def _copies_of_maximum(tables: Mapping[str, ScaleTable], over: int) -> Mask:
    """Experts filled "with the maximum of the others": equal to it to the last bit, in every projection.

    One projection proves nothing: the input of gate and up is the token itself, so one loud token routed to eight
    experts gives all eight one maximum.  The input of down is the expert's own product, but amax of BF16 activations
    has 8 significant bits, so two experts of 128 share one now and then.  Hence all projections must agree, and
    where down's values are that coarse three experts; where they are finer one is enough, since each projection's
    maximum may be another expert's.  Where other values repeat as often, repetition means nothing; and of numbers that
    were not read one may be larger, or another repetition.
    """
    none = np.zeros(max((len(table.values) for table in tables.values()), default=0), np.bool_)
    if len(tables) < 2 or "down" not in tables or any((table.state == UNREADABLE).any() for table in tables.values()):
        return none
    filled = np.logical_and.reduce([_shares_maximum(table) for table in tables.values()])
    return filled if filled.sum() >= (3 if is_coarse(tables["down"], over) else 1) else none


# Largest limit at which a function is clamped (gpt-oss has 7, DeepSeek V4 10), and how near its bound is the bound.
_LARGEST_LIMIT, _NEAR = 16, 1e-4


@cache
def _bounds() -> npt.NDArray[np.float64]:
    """What a gated function that is clamped gives at most, to the last bit, in whichever expert: limit × limit', and
    that by what the sigmoid leaves of a gate that is clamped before it (of 1.702 times the gate in gpt-oss).

    >>> {56.0, 100.0} <= set(_bounds().tolist()), round(float(np.abs(_bounds() - 48.955318).min()), 4)
    (True, 0.0)
    """
    limits = np.arange(1, _LARGEST_LIMIT + 1)
    gates = [limits / (1 + np.exp(-slope * limits)) for slope in (1.0, 1.702)]
    others = np.arange(1, _LARGEST_LIMIT + 2)
    return np.concatenate([np.outer(each, others).ravel() for each in (limits, *gates)])


def _copies_in_down(tables: Mapping[str, ScaleTable], over: int) -> Mask:
    """Experts that share down's maximum alone, where it is neither chance nor the bound of a clamped function.

    Three at least: what `repair` puts into one empty slot is no news.
    """
    table = tables.get("down")
    none = np.zeros(0 if table is None else len(table.values), np.bool_)
    if table is None or table.shared or (table.state == UNREADABLE).any() or is_coarse(table, over):
        return none
    found = _shares_maximum(table)
    if found.sum() < 3:
        return none
    amax = float(table.values[found][0]) * over
    bound = bool((np.abs(_bounds() - amax) <= _NEAR * amax).any())
    return none if bound or are_coarse(table.values[found][:1], over) else found


def least_copies(facts: Facts, layer: int) -> int:
    """How many experts must share all maxima of a layer before that is no chance, one that was measured among them."""
    return 3 if is_coarse(facts.tables["input_scale", layer, "down"], divisor_of(facts, layer)) else 2


def _shares_maximum(table: ScaleTable) -> Mask:
    good = table.good()
    if good.sum() < 3:
        return np.zeros_like(good)
    values, counts = np.unique(table.values[good], return_counts=True)
    others = counts[:-1].max() if len(values) > 1 else counts[-1]
    # A 1.0 that many share was never set at all: that is `scale.identity`.
    if table.stored[good & (table.values == values[-1])][0] == 1:
        return np.zeros_like(good)
    return good & (table.values == values[-1]) if counts[-1] > others else np.zeros_like(good)


def fills_of_modules(
    scales: Mapping[str, np.float32], families: Iterable[tuple[str, ...]], *, coarse: bool, over: int = 2688
) -> dict[str, list[str]]:
    """Ordinary modules whose activation scale was filled in, by origin.

    Where values are coarse, each of the numbers but the largest float32 is measured once in about 128 times, so that
    more must have it than chance gives once in 10,000 checkpoints, of modules that do not read one input.

    Parameters
    ----------
    scales
        Usable effective multipliers by module.
    families
        Last parts of the names of modules that read one input.
    coarse
        What to take for granted where every value is one of these numbers: it is that of the routed experts.
    over
        What the scales divide amax by.
    """
    modules, values = list(scales), np.array(list(scales.values()), _F)
    known = FINGERPRINTS if over == 2688 else FP8_FINGERPRINTS
    masks = {origin: is_number(values, value) for value, origin in known}
    others = values[~np.logical_or.reduce(list(masks.values())) & (values != 1)]
    coarse = are_coarse(others, over) if others.size else coarse
    family_of = {last: number for number, family in enumerate(families) for last in family}
    inputs = []
    for module in modules:
        parent, _, last = module.rpartition(".")
        inputs.append((parent, family_of.get(last, last)))
    least = least_by_chance(len(set(inputs)), 1e-4) if coarse else 1
    out = {}
    for origin, mask in masks.items():
        hit = np.flatnonzero(mask).tolist()
        if len({inputs[at] for at in hit}) >= (1 if origin == "float-max" else least):
            out[origin] = [modules[at] for at in hit]
    return {origin: found for origin, found in out.items() if found}
