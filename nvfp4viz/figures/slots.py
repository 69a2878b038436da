"""From the audit's facts to the coverage map and the strip of peers: choosing statuses, no arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvfp4viz.audit.facts import CLASSES, MISSING, OK, Facts, ScaleTable
from nvfp4viz.audit.report import Report
from nvfp4viz.figures.coverage import STATUSES, CoverageGrid
from nvfp4viz.figures.peers import Peers

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What a finding says about a slot that holds an ordinary number.
_REMARKS = {"scale.outlier": "outlier", "scale.filled": "filled", "scale.identity": "identity"}


def slot_statuses(table: ScaleTable, report: Report) -> NDArray[np.uint8]:
    """(E,) indices into `STATUSES` for one role, layer and projection."""
    out = np.full(len(table.values), STATUSES.index("absent"), np.uint8)
    out[table.state == MISSING] = STATUSES.index("missing")
    held = table.state == OK
    out[held] = STATUSES.index("present")
    for name in CLASSES[1:]:
        here = held & (table.classes() == CLASSES.index(name))
        out[here] = STATUSES.index(name)
    out[held & np.isneginf(table.values)] = STATUSES.index("neginf")
    for finding in report.findings:
        remark = _REMARKS.get(finding.code)
        if remark and (finding.role, finding.layer, finding.projection) == (table.role, table.layer, table.projection):
            for expert in finding.experts or ():
                out[expert] = STATUSES.index(remark)
    return out


def coverage_grid(facts: Facts, report: Report, role: str) -> CoverageGrid | None:
    """Layer × expert statuses of one role, one row family per projection; None where the role has no slot."""
    view = facts.view
    projections = [name for name in view.projections if any((role, at, name) in facts.tables for at in facts.layers)]
    layers = tuple(at for at in facts.layers if any((role, at, name) in facts.tables for name in projections))
    if not layers or view.experts == 0:
        return None
    shape = (len(projections), len(layers), view.experts)
    status = np.full(shape, STATUSES.index("absent"), np.uint8)
    values = np.full(shape, np.nan, np.float32)
    for p, name in enumerate(projections):
        for row, at in enumerate(layers):
            table = facts.tables.get((role, at, name))
            if table is not None:
                status[p, row, : len(table.values)] = slot_statuses(table, report)
                values[p, row, : len(table.values)] = table.values
    return CoverageGrid(f"{facts.checkpoint.name} · {role}", layers, tuple(projections), status, values)


def peers_of(facts: Facts, report: Report, role: str, layer: int, projection: str, expert: int) -> Peers | None:
    """The strip of one slot's peers; None where the role has no scales there."""
    table = facts.tables.get((role, layer, projection))
    if table is None or expert >= len(table.values):
        return None
    names = tuple(STATUSES[code] for code in slot_statuses(table, report))
    return Peers(role, layer, projection, table.values, names, expert)
