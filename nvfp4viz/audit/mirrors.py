"""Layers whose activation scales lie above one and about where the others' reciprocals do: perhaps the other way up.

Where a whole layer does, or one lies 2^14 off, `siblings` warns.  One projection of a layer may just be that loud, and
of half of the layers nothing says which are right: so this is a note, as the one about a whole file is (`spread`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nvfp4viz.audit.facts import Facts, median_of
from nvfp4viz.audit.fills import divisor_of
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import has_wrong_convention, json_number
from nvfp4viz.audit.siblings import NEAR_RECIPROCAL, apart, layer_apart_findings, log_of, times, unexplained
from nvfp4viz.audit.texts import id_list

# Powers of two: mirror images lie at least so far from the others' median, and from the nearest of these.  Layers grow
# louder one after the other; the gap tells such from mirror images.
_OFF, _GAP = 8.0, 4.0


def mirror_findings(facts: Facts) -> Iterator[Finding]:
    """``scale.convention`` notes of activation scales that no stronger finding tells of, one for each set of layers."""
    seen = {kind: found for kind in ("gate", "up", "gate_up", "down") if (found := _mirrored(facts, kind)) is not None}
    told = _told(facts) if seen else set()
    groups: dict[tuple[int, ...], list[str]] = {}
    for kind, (mirrors, others) in seen.items():
        left = tuple(at for at in mirrors if (at, kind) not in told)
        # Where these are told as the odd ones, the others need no note that they are.
        if left and not all((at, kind) in told for at in others):
            groups.setdefault(left, []).append(kind)
    for layers, kinds in groups.items():
        yield _note(facts, layers, {kind: seen[kind] for kind in kinds})


def _mirrored(facts: Facts, kind: str) -> tuple[dict[int, float], dict[int, float]] | None:
    """Medians of those layers of a projection that mirror the others, and of these, as powers of two."""
    tables = {
        at: table for at in facts.view.moe_layers
        if "input_scale" in facts.needs[at] and (table := facts.tables.get(("input_scale", at, kind))) is not None
    }  # fmt: skip
    # One number of each is enough to see that there is nothing to see.
    firsts = [log_of(table.values[0]) for table in tables.values() if len(table.values)]
    if not firsts or not min(firsts) < 0 < max(firsts):
        return None
    middles = {
        at: log_of(median_of(table.values[own])) for at, table in tables.items()
        if (own := unexplained(facts, at, kind, "input_scale")).any()
    }  # fmt: skip
    low = [middle for middle in middles.values() if middle <= 0]
    if not low:
        return None
    rest = float(median_of(np.array(low)))
    mirrors = {at: own for at, own in middles.items() if own - rest >= _OFF and abs(own + rest) <= NEAR_RECIPROCAL}
    others = {at: own for at, own in middles.items() if at not in mirrors}
    # A layer whose weight scales are the other way up has an error that says so.
    told = {at for at in mirrors if has_wrong_convention(facts, facts.tables["weight_scale_2", at, kind])}
    if len(told) == len(mirrors) or min(mirrors.values()) - max(others.values()) < _GAP:
        return None
    return {at: own for at, own in mirrors.items() if at not in told}, others


def _told(facts: Facts) -> set[tuple[int, str]]:
    """Layers and projections whose activation scales have a warning that holds them to others."""
    out: set[tuple[int, str]] = set()
    for item in layer_apart_findings(facts, "input_scale"):
        layers = facts.view.moe_layers if item.layer is None else (item.layer,)
        out |= {(at, kind) for at in layers for kind in item.params["kinds"].split(", ")}
    return out | {(at, kind) for at in facts.view.moe_layers if apart(facts, at) is not None for kind in ("gate", "up")}


def _note(
    facts: Facts, layers: tuple[int, ...], seen: Mapping[str, tuple[dict[int, float], dict[int, float]]]
) -> Finding:
    """One note; the numbers in it are medians of the layers' medians."""
    one = layers[0] if len(layers) == 1 else None
    divisors, over = facts.view.divisors_in(layers[0]), divisor_of(facts, layers[0])
    own = float(median_of(np.array([mirrors[at] for mirrors, _ in seen.values() for at in layers])))
    rest = float(median_of(np.array([middle for _, others in seen.values() for middle in others.values()])))
    shown_own, shown_rest = (json_number(2 ** (-power if divisors else power)) for power in (own, rest))
    tables = [facts.tables["input_scale", at, kind] for at in layers for kind in seen]
    fill = {
        "kinds": ", ".join(seen), "among": id_list(layers), "numbers": list(layers), "own": shown_own,
        "others": shown_rest, "ratio": times(2 ** (own - rest)), "over": over, "amax": f"{2**own * over:,.0f}",
    }  # fmt: skip
    return make(
        "scale.convention", "info", text=f"scale.convention.layers{'.divisor' if divisors else ''}",
        role="input_scale", layer=one, projection=next(iter(seen)) if one is not None and len(seen) == 1 else None,
        tensors=[facts.view.slot(table.layer, 0, table.projection, "input_scale").name for table in tables],
        count=sum(table.numbers(table.good()) for table in tables), fill=fill,
    )  # fmt: skip
