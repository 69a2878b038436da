"""Counts of slots per role, and the table behind ``nvfp4viz coverage`` and the coverage map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nvfp4viz.audit.facts import CLASSES, MISSING, NOT_A_SCALAR, NOT_NEEDED, OK, UNREADABLE, Facts
from nvfp4viz.audit.report import Coverage, Finding
from nvfp4viz.checkpoint.dialects.per_expert import ROLES


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot.

    Attributes
    ----------
    status
        ``"ok"``, ``"missing"``, ``"unreadable"``, ``"not-needed"``, ``"not-a-scalar"``, ``"filled"``, or a class of
        `nvfp4viz.audit.facts.CLASSES`.
    value
        The stored scalar, or None.
    """

    layer: int
    expert: int
    projection: str
    role: str
    status: str
    value: float | None
    tensor: str


def coverage(facts: Facts, findings: Iterable[Finding], *, activations: bool) -> dict[str, Coverage]:
    """Counts of ``input_scale``, ``weight_scale`` and ``weight_scale_2`` slots.

    Parameters
    ----------
    activations
        The scheme needs activation scales; else none is expected.
    """
    filled = {"input_scale": 0, "weight_scale_2": 0}
    for item in findings:
        if item.code == "scale.filled" and item.role in filled:
            filled[item.role] += item.count
    out = {}
    for role in ("input_scale", "weight_scale", "weight_scale_2"):
        states = [state for (kind, _, _), state in facts.states.items() if kind == role]
        every = np.concatenate(states) if states and (activations or role != "input_scale") else np.zeros(0, np.uint8)
        bad = sum(int((table.classes() > 0).sum()) for table in facts.scalars(role)) if every.size else 0
        missing, unreadable = int((every == MISSING).sum()), int((every == UNREADABLE).sum())
        expected = int((every != NOT_NEEDED).sum()) + _absent(facts, role, every.size > 0)
        out[role] = Coverage(
            expected=expected,
            present=int(((every == OK) | (every == NOT_A_SCALAR)).sum()),
            missing=missing + _absent(facts, role, every.size > 0),
            invalid=bad + int((every == NOT_A_SCALAR).sum()),
            filled=filled.get(role, 0),
            unreadable=unreadable,
        )
    return out


def _absent(facts: Facts, role: str, counted: bool) -> int:
    """Slots of experts of which nothing is stored: expected, and missing."""
    if not counted or facts.checkpoint.blind_files:
        return 0
    return sum(
        int((states == NOT_NEEDED).sum())
        - sum(
            (layer, expert, projection) in facts.view.modules
            for expert in np.flatnonzero(states == NOT_NEEDED).tolist()
        )
        for (kind, layer, projection), states in facts.states.items()
        if kind == role
    )


def slot_rows(facts: Facts, findings: Iterable[Finding] = ()) -> Iterator[SlotRow]:
    """Every slot of every audited layer, in order of layer, expert, projection and role."""
    filled = {
        (item.role, item.layer, item.projection, expert)
        for item in findings
        if item.code == "scale.filled"
        for expert in item.experts or ()
    }
    names = {MISSING: "missing", UNREADABLE: "unreadable", NOT_A_SCALAR: "not-a-scalar"}
    for layer in facts.layers:
        for expert in range(facts.view.experts_in[layer]):
            for projection in facts.view.projections:
                absent = (layer, expert, projection) not in facts.view.modules
                for role in ROLES:
                    state = int(facts.states[role, layer, projection][expert])
                    table = facts.tables.get((role, layer, projection))
                    value = None
                    status = names.get(state, "missing" if absent else "not-needed")
                    if state == OK:
                        status = "ok" if table is None else CLASSES[int(table.classes()[expert])]
                        # The shortest digits that mean this float32.
                        value = None if table is None else float(str(table.stored[expert]))
                        if status == "ok" and (role, layer, projection, expert) in filled:
                            status = "filled"
                    name = facts.view.slot(layer, expert, projection, role).name
                    yield SlotRow(layer, expert, projection, role, status, value, name)
