"""Activation scales that nobody measured: what exporters write for experts that calibration never reached.

An exact value is a fingerprint only as far as it could not have been measured.  Calibration on BF16 activations gives
amax with 8 significant bits, so a measured 0.5, 1 or 6, and two experts with one maximum, occur now and then in a
checkpoint with tens of thousands of slots.  Where a layer's values are that coarse, all projections of an expert must
agree, in at least three experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import Facts, ScaleTable

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

# The same of a scale that is amax/448, E4M3's largest number: of activations in FP8.
FP8_FLOAT_MAX = np.finfo(_F).max / _F(448)


def fills_of(facts: Facts, layer: int) -> dict[str, dict[str, Mask]]:
    """Filled-in activation scales by projection and origin, whichever number they divide amax by."""
    if layer not in facts.fills:
        facts.fills[layer] = _fills_of(facts, layer)
    return facts.fills[layer]


def _fills_of(facts: Facts, layer: int) -> dict[str, dict[str, Mask]]:
    if facts.block(layer) == "NVFP4" and facts.view.scheme != "W4A8":
        return back_fills(facts, layer)
    tables = {kind: facts.tables["input_scale", layer, kind] for kind in facts.view.projections_in[layer]}
    masks = {kind: np.abs(table.values - FP8_FLOAT_MAX) <= np.spacing(FP8_FLOAT_MAX) for kind, table in tables.items()}
    return {kind: {"float-max.fp8": mask} if mask.any() else {} for kind, mask in masks.items()}


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


def back_fills(facts: Facts, layer: int) -> dict[str, dict[str, Mask]]:
    """Which experts' activation scales of a layer were filled in: (E,) masks by projection and origin."""
    tables = {kind: facts.tables["input_scale", layer, kind] for kind in facts.view.projections_in[layer]}
    if not tables:
        return {}
    coarse = all(is_coarse(table) for table in tables.values())
    out: dict[str, dict[str, Mask]] = {kind: {} for kind in tables}
    for value, origin in FINGERPRINTS:
        # The division may be rounded once more on its way through a file: one unit in the last place either side.
        masks = {
            kind: table.good() & (np.abs(table.values - value) <= np.spacing(value)) for kind, table in tables.items()
        }
        if coarse and origin != "float-max":
            agreed = np.logical_and.reduce(list(masks.values()))
            masks = dict.fromkeys(masks, agreed if agreed.sum() >= 3 else np.zeros_like(agreed))
        for kind, mask in masks.items():
            if mask.any():
                out[kind][origin] = mask
    copied = _copies_of_maximum(list(tables.values()))
    for found in out.values():
        left = copied & ~np.logical_or.reduce([*found.values(), np.zeros_like(copied)])
        if left.any():
            found["copied-maximum"] = left
    return out


def _copies_of_maximum(tables: list[ScaleTable]) -> Mask:
    """Experts filled "with the maximum of the others": equal to it to the last bit, in every projection.

    One projection proves nothing: the input of gate and up is the token itself, so one loud token routed to eight
    experts gives all eight one maximum.  The input of down is the expert's own product, but amax of BF16 activations
    has 8 significant bits, so two experts of 128 share one now and then.  Hence all projections must agree, and
    where values are that coarse three experts.  Where other values repeat as often, repetition means nothing.
    """
    filled = np.logical_and.reduce([_shares_maximum(table) for table in tables])
    return filled if filled.sum() >= least_copies(tables) else np.zeros_like(filled)


def least_copies(tables: Iterable[ScaleTable]) -> int:
    """How many experts must share all maxima of a layer's ``input_scale`` tables before that is no chance."""
    return 3 if all(is_coarse(table) for table in tables) else 2


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


def is_coarse(table: ScaleTable) -> bool:
    """Most values are a BF16 number over 2688, give or take the last bit of the division."""
    return are_coarse(table.values[table.good()])


def are_coarse(values: npt.NDArray[Any]) -> bool:
    """The same of numbers (N,); not of none."""
    mantissa, _ = np.frexp(values.astype(np.float64) * 2688)
    off = np.abs(mantissa * 256 - np.rint(mantissa * 256))
    return bool(off.size) and float(np.mean(off < 1e-4)) > 0.5


def fills_of_modules(
    scales: Mapping[str, np.float32], families: Iterable[tuple[str, ...]], *, coarse: bool
) -> dict[str, list[str]]:
    """Ordinary modules whose activation scale was filled in, by origin.

    Where measured values are coarse, each of the numbers but the largest float32 is measured once in about 128 times,
    so that three and one in 32 more must have it, of modules that do not read one input.

    Parameters
    ----------
    scales
        Usable effective multipliers by module.
    families
        Last parts of the names of modules that read one input.
    coarse
        What to take for granted where every value is one of these numbers: it is that of the routed experts.
    """
    modules, values = list(scales), np.array(list(scales.values()), _F)
    masks = {origin: np.abs(values - value) <= np.spacing(value) for value, origin in FINGERPRINTS}
    others = values[~np.logical_or.reduce(list(masks.values()))]
    coarse = are_coarse(others) if others.size else coarse
    family_of = {last: number for number, family in enumerate(families) for last in family}
    inputs = []
    for module in modules:
        parent, _, last = module.rpartition(".")
        inputs.append((parent, family_of.get(last, last)))
    least = 3 + len(set(inputs)) // 32 if coarse else 1
    out = {}
    for origin, mask in masks.items():
        hit = np.flatnonzero(mask).tolist()
        if len({inputs[at] for at in hit}) >= (1 if origin == "float-max" else least):
            out[origin] = [modules[at] for at in hit]
    return {origin: found for origin, found in out.items() if found}
