"""Counts of slots per role, and the table behind ``nvfp4viz coverage`` and the coverage map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nvfp4viz.audit.facts import MISSING, NOT_A_SCALAR, NOT_NEEDED, OK, UNREADABLE, Facts
from nvfp4viz.audit.report import Coverage, Finding
from nvfp4viz.checkpoint.dialects.per_expert import ROLES
from nvfp4viz.checkpoint.numbers import CLASSES

# What a finding says about a slot that holds an ordinary number.
REMARKS = {"scale.outlier": "outlier", "scale.filled": "filled", "scale.identity": "identity"}


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot.

    Attributes
    ----------
    status
        ``"ok"``, ``"missing"``, ``"unreadable"``, ``"not-needed"``, ``"not-a-scalar"``, a class of
        `nvfp4viz.audit.facts.CLASSES`, or of `REMARKS`.
    value
        The stored scalar, or None.
    draft
        Its layer is a draft (MTP) layer, which has a number after the model's own.
    """

    layer: int
    expert: int
    projection: str
    role: str
    status: str
    value: float | None
    tensor: str
    draft: bool = False


def coverage(facts: Facts, findings: Iterable[Finding], *, activations: bool) -> dict[str, Coverage]:
    """Counts of ``input_scale``, ``weight_scale`` and ``weight_scale_2`` slots.

    Parameters
    ----------
    activations
        The scheme needs activation scales; else none is expected.
    """
    filled = {"input_scale": 0, "weight_scale_2": 0}
    for item in findings:
        # Ordinary modules have no slots.
        if item.code == "scale.filled" and item.role in filled and item.projection and item.tower is None:
            whole = item.layer is not None and item.experts is None
            filled[item.role] += facts.view.experts_in[item.layer] if whole and item.layer is not None else item.count
    out = {}
    for role in ("input_scale", "weight_scale", "weight_scale_2"):
        layers = [at for at in facts.layers if role in facts.needs[at] and (activations or role != "input_scale")]
        keys = [(role, at, kind) for at in layers for kind in facts.view.projections_in[at]]
        states = np.concatenate([facts.states[key] for key in keys]) if keys else np.zeros(0, np.uint8)
        absent = sum(_absent(facts, key) for key in keys)
        present = (states == OK) | (states == NOT_A_SCALAR)
        bad = sum(int((facts.tables[key].classes() > 0).sum()) for key in keys if key in facts.tables)
        out[role] = Coverage(
            expected=int((states != NOT_NEEDED).sum()) + absent,
            present=int(present.sum()),
            missing=int((states == MISSING).sum()) + absent,
            invalid=bad + int((states == NOT_A_SCALAR).sum()),
            filled=filled.get(role, 0),
            unreadable=int((states == UNREADABLE).sum()),
        )
    return out


def _absent(facts: Facts, key: tuple[str, int, str]) -> int:
    """Slots of experts of which nothing is stored: expected, and missing."""
    if facts.checkpoint.blind_files:
        return 0
    _, layer, projection = key
    if layer in facts.pruned:
        return 0
    ids = np.flatnonzero(facts.states[key] == NOT_NEEDED).tolist()
    return sum((layer, expert, projection) not in facts.view.modules for expert in ids)


def slot_rows(facts: Facts, findings: Iterable[Finding] = ()) -> Iterator[SlotRow]:
    """Every slot of every audited layer, in order of layer, expert, projection and role."""
    remarks = {
        (item.role, item.layer, item.projection, expert): REMARKS[item.code]
        for item in findings
        if item.code in REMARKS and item.layer in facts.view.experts_in and item.tower is None
        for expert in (range(facts.view.experts_in[item.layer]) if item.experts is None else item.experts)
    }
    names = {MISSING: "missing", UNREADABLE: "unreadable", NOT_A_SCALAR: "not-a-scalar"}
    for layer in facts.layers:
        draft = facts.view.is_draft(layer)
        for expert in range(facts.view.experts_in[layer]):
            for projection in facts.view.projections_in[layer]:
                absent = (layer, expert, projection) not in facts.view.modules
                if absent and layer in facts.pruned:
                    continue
                for role in ROLES:
                    if role not in facts.needs[layer] and facts.block(layer) == "MXFP4":
                        continue
                    state = int(facts.states[role, layer, projection][expert])
                    table = facts.tables.get((role, layer, projection))
                    value = None
                    status = names.get(state, "missing" if absent else "not-needed")
                    if state == OK:
                        status = "ok" if table is None else CLASSES[int(table.classes()[expert])]
                        # The shortest digits that mean this float32.
                        value = None if table is None else float(str(table.stored[expert]))
                        if status == "ok":
                            status = remarks.get((role, layer, projection, expert), status)
                    name = facts.view.slot(layer, expert, projection, role).name
                    yield SlotRow(layer, expert, projection, role, status, value, name, draft)
