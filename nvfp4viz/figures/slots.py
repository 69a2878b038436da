"""From the audit's facts to the coverage map and the strip of peers: choosing statuses, no arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvfp4viz.audit.coverage import REMARKS
from nvfp4viz.audit.facts import MISSING, NOT_A_SCALAR, NOT_NEEDED, OK, UNREADABLE, Facts, ScaleTable
from nvfp4viz.audit.report import Report
from nvfp4viz.checkpoint.numbers import CLASSES
from nvfp4viz.figures.coverage import STATUSES, CoverageGrid
from nvfp4viz.figures.peers import Peers

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Roles of scales, in the order in which a page offers them.
SCALE_ROLES = ("input_scale", "weight_scale_2", "weight_scale")


def roles_shown(report: Report) -> tuple[str, ...]:
    """Scales that the scheme needs: MXFP4 has block scales alone, a weight-only checkpoint no activation scales."""
    return tuple(role for role in SCALE_ROLES if is_expected(report, role))


def _statuses(facts: Facts, report: Report, key: tuple[str, int, str]) -> NDArray[np.uint8] | None:
    """(E,) statuses of one role, layer and projection: of its numbers, or of tensors that hold more than one."""
    if key in facts.tables:
        return slot_statuses(facts, report, facts.tables[key])
    states = facts.states.get(key)
    if states is None:
        return None
    none = np.full(len(states), np.nan, np.float32)
    return slot_statuses(facts, report, ScaleTable(*key, none, none, states), numbers=False)


def slot_statuses(facts: Facts, report: Report, table: ScaleTable, *, numbers: bool = True) -> NDArray[np.uint8]:
    """(E,) indices into `STATUSES` for one role, layer and projection; counts agree with the report's coverage.

    ``numbers``: the table's values are to be judged; without them only what is there and what is not.
    """
    out = np.full(len(table.values), STATUSES.index("absent"), np.uint8)
    out[table.state == MISSING] = STATUSES.index("missing")
    if not facts.checkpoint.blind_files:
        # Of an expert of which nothing at all is stored no tensor says that it needs a scale; it does.
        for expert in np.flatnonzero(table.state == NOT_NEEDED).tolist():
            if (table.layer, expert, table.projection) not in facts.view.modules:
                out[expert] = STATUSES.index("missing")
    # In a damaged file, or stored as something that is no single number: nobody can say what it is.
    out[np.isin(table.state, (UNREADABLE, NOT_A_SCALAR))] = STATUSES.index("unreadable")
    held = table.state == OK
    out[held] = STATUSES.index("present")
    if not numbers:
        return out
    for name in CLASSES[1:]:
        here = held & (table.classes() == CLASSES.index(name))
        out[here] = STATUSES.index(name)
    out[held & np.isneginf(table.values)] = STATUSES.index("neginf")
    for finding in report.findings:
        remark = REMARKS.get(finding.code) if finding.tower is None else None
        if remark and (finding.role, finding.layer, finding.projection) == (table.role, table.layer, table.projection):
            # One number for all experts is named without them.
            for expert in range(len(out)) if finding.experts is None else finding.experts:
                out[expert] = STATUSES.index(remark)
    return out


def is_expected(report: Report, role: str) -> bool:
    """Whether the scheme needs scales of this role at all: a weight-only one has no input scales to miss."""
    count = report.coverage.get(role)
    return count is not None and count.expected > 0


def coverage_grid(facts: Facts, report: Report, role: str) -> CoverageGrid | None:
    """Layer × expert statuses of one role, one row family per projection; None where no slot of it is expected."""
    view = facts.view
    if not is_expected(report, role):
        return None
    kept = facts.tables if role in ("input_scale", "weight_scale_2") else facts.states
    projections = [name for name in view.projections if any((role, at, name) in kept for at in facts.layers)]
    layers = tuple(at for at in facts.layers if any((role, at, name) in kept for name in projections))
    if not layers or view.experts == 0:
        return None
    shape = (len(projections), len(layers), view.experts)
    status = np.full(shape, STATUSES.index("absent"), np.uint8)
    values = np.full(shape, np.nan, np.float32)
    for p, name in enumerate(projections):
        for row, at in enumerate(layers):
            found = _statuses(facts, report, (role, at, name))
            if found is not None:
                status[p, row, : len(found)] = found
            table = facts.tables.get((role, at, name))
            if table is not None:
                values[p, row, : len(table.values)] = table.values
    title = f"{facts.checkpoint.name} · {role}"
    shown = values if kept is facts.tables else None
    drafts = frozenset(filter(view.is_draft, layers))
    divisor = _divisor(facts, role, layers) if shown is not None else ""
    return CoverageGrid(title, layers, tuple(projections), status, shown, scale=role, drafts=drafts, divisor=divisor)


def _divisor(facts: Facts, role: str, layers: tuple[int, ...]) -> str:
    """What these layers call a scale that they store as a divisor; empty where one of them does not."""
    dialects = [facts.view.dialects[layer] for layer in layers]
    names = {dialect.suffixes.get(role, role) if dialect and dialect.divisors else "" for dialect in dialects}
    return names.pop() if len(names) == 1 else ""


def peers_of(facts: Facts, report: Report, role: str, layer: int, projection: str, expert: int) -> Peers | None:
    """The strip of one slot's peers; None where no scale of the role is expected there."""
    table = facts.tables.get((role, layer, projection))
    if table is None or expert >= len(table.values) or not is_expected(report, role):
        return None
    names = tuple(STATUSES[code] for code in slot_statuses(facts, report, table))
    shared = facts.is_one_for_all(layer, (projection,), role)
    return Peers(role, layer, projection, table.values, names, expert, _divisor(facts, role, (layer,)), shared)
