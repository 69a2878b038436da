"""Gate and up of an expert read the same input, so that their activation scales are one maximum measured twice.

One expert that is off among its peers is `scales`' outlier; what is seen here is a whole projection that is off, whose
experts agree with one another and not with their partners.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nvfp4viz.audit.facts import F32, Facts, median_of
from nvfp4viz.audit.fills import back_fills
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import OUTLIER_FLOOR, json_number


class Siblings(NamedTuple):
    """A layer whose gate and up disagree about their input.

    Attributes
    ----------
    experts
        Those whose own two differ by so much.
    gate, up
        Medians of the effective scales, in log space.
    """

    experts: tuple[int, ...]
    gate: float
    up: float


def sibling_findings(facts: Facts) -> Iterator[Finding]:
    """``scale.outlier`` of a layer's gate against its up, in files whose activation scales matter."""
    for layer in facts.layers:
        found = apart(facts, layer)
        if found is not None:
            place = facts.place(layer, ("gate", "up"), "input_scale", found.experts)
            low, high = sorted((found.gate, found.up))
            ratio = f"{high / low:,.0f}" if high < 1e6 * low else f"{high / low:.0e}"
            larger = "gate" if found.gate > found.up else "up"
            medians = {"gate": json_number(found.gate), "up": json_number(found.up)}
            yield make(
                "scale.outlier", "warn", text="scale.outlier.sibling", role="input_scale", layer=layer, **place,
                fill={"ratio": ratio, "larger": larger, "pairs": len(found.experts), **medians},
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
    if facts.block(layer) == "NVFP4" and facts.view.scheme != "W4A8":
        for kind, masks in back_fills(facts, layer).items():
            for mask in masks.values() if kind in ("gate", "up") else ():
                both &= ~mask
    direction = _far(gate.values[both], up.values[both]) if both.sum() >= 3 else None
    if direction is None:
        return None
    own = np.zeros(len(both))
    own[both] = np.log2(gate.values[both].astype(np.float64)) - np.log2(up.values[both].astype(np.float64))
    ids = np.flatnonzero(own * direction > OUTLIER_FLOOR).tolist()
    middle = [float(np.exp2(median_of(np.log2(table.values[both].astype(np.float64))))) for table in (gate, up)]
    return Siblings(tuple(ids), *middle)


def _far(gate: F32, up: F32) -> int | None:
    """1 where gate is far above up in the median of their ratios, −1 where it is far below, else None."""
    middle = float(median_of(np.log2(gate.astype(np.float64)) - np.log2(up.astype(np.float64))))
    return None if abs(middle) <= OUTLIER_FLOOR else 1 if middle > 0 else -1
