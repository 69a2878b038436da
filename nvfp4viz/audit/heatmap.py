"""Coverage of one role and projection as an SVG: a row a layer, a column an expert.

What is in order is one rectangle a layer, and neighbours of one status are one rectangle, so that 92,160 slots stay a
small file.  It looks as the Explorer's map does: a missing slot is a dashed outline, any other that is not in order is
hatched, each with its sign; no colour tells anything.  What the classes look like stands in the page's style sheet, for
light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from nvfp4viz.audit.coverage import SlotRow

WIDTH, LEFT, TOP = 760.0, 52, 16
# The signs, as on the pages (`nvfp4viz.figures.palette.MARKS`).
MARKS = {
    "missing": "∅", "unreadable": "?", "filled": "≈", "zero": "0", "nan": "N", "inf": "∞", "neginf": "−∞",
    "negative": "−", "subnormal": "s", "not-a-scalar": "#", "outlier": "!", "identity": "1",
}  # fmt: skip
# Narrower cells get no sign; their titles name the status.  A sign's size is at most so many times its cell's width.
_ROOM, _SLIM = 5.0, 1.5


@dataclass(slots=True)
class SlotMap:
    """Statuses of one role and projection: by layer, the experts that need a scale in order; which are draft layers."""

    role: str
    projection: str
    layers: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    drafts: set[int] = field(default_factory=set)

    @property
    def statuses(self) -> set[str]:
        """All that occur, other than ``"ok"``."""
        return {status for cells in self.layers.values() for _, status in cells} - {"ok"}


def slot_maps(rows: Iterable[SlotRow]) -> list[SlotMap]:
    """Slots sorted into maps, in order of appearance; slots that nothing needs stay blank."""
    maps: dict[tuple[str, str], SlotMap] = {}
    for row in rows:
        if row.status == "not-needed":
            continue
        at = maps.setdefault((row.role, row.projection), SlotMap(row.role, row.projection))
        # One class of values; minus infinity has a sign of its own (a divisor's zero has one, too).
        below = row.status == "inf" and row.value is not None and math.copysign(1.0, row.value) < 0
        at.layers.setdefault(row.layer, []).append((row.expert, "neginf" if below else row.status))
        if row.draft:
            at.drafts.add(row.layer)
    return list(maps.values())


def draw(found: SlotMap, words: dict[str, str]) -> str:
    """One map as ``<svg>``.

    Parameters
    ----------
    words
        Statuses in the reader's language, and ``layer``, ``draft``, ``experts`` and ``label`` (of the whole, with
        ``{role}`` and ``{projection}``).
    """
    experts = 1 + max(expert for cells in found.layers.values() for expert, _ in cells)
    cell, high = WIDTH / experts, 14 if len(found.layers) <= 40 else 9
    height = TOP + high * len(found.layers) + 4
    label = escape(words["label"].format(role=found.role, projection=found.projection))
    out = [f'<svg viewBox="0 0 {LEFT + WIDTH + 8:.0f} {height}" role="img" aria-label="{label}">']
    for expert in sorted({0, experts // 4, experts // 2, 3 * experts // 4, experts - 1}):
        out.append(f'<text x="{LEFT + cell * (expert + 0.5):.1f}" y="11" text-anchor="middle">{expert}</text>')
    every = max(1, -(-12 // high), len(found.layers) // 40)
    labelled = set(range(0, len(found.layers), every))
    if found.drafts:
        # The first draft layer's number always stands there, and no other where it would touch it.
        first_draft = next(number for number, layer in enumerate(found.layers) if layer in found.drafts)
        labelled = {first_draft, *(number for number in labelled if abs(number - first_draft) >= every)}
    for number, (layer, cells) in enumerate(found.layers.items()):
        y = TOP + number * high
        draft = layer in found.drafts
        if number in labelled:
            mark = "D" * draft
            out.append(f'<text x="{LEFT - 6}" y="{y + high - 3}" text-anchor="end">{mark}{layer}</text>')
        name = f"{words['draft' if draft else 'layer']} {layer}"
        for status, run in groupby(_runs(cells), key=lambda item: item[1]):
            for first, _, count in run:
                out.append(_bar(first, count, status, name, y, cell, high, words))
    return "".join([*out, "</svg>"])


def outline(status: str) -> str:
    """The class of a slot's rectangle."""
    return "missing" if status == "missing" else "odd"


def _runs(cells: list[tuple[int, str]]) -> list[tuple[int, str, int]]:
    """Neighbouring experts of one status: (first, status, how many)."""
    runs: list[tuple[int, str, int]] = []
    for expert, status in cells:
        if runs and runs[-1][1] == status and sum(runs[-1][::2]) == expert:
            runs[-1] = (runs[-1][0], status, runs[-1][2] + 1)
        else:
            runs.append((expert, status, 1))
    return runs


def _bar(
    first: int, count: int, status: str, layer: str, y: float, cell: float, high: float, words: dict[str, str]
) -> str:
    x, wide = LEFT + first * cell, count * cell
    if status == "ok":
        return f'<rect class="ok" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high - 1}"/>'
    sign = MARKS[status]
    last = f"–{first + count - 1}" if count > 1 else ""
    title = escape(f"{layer}, {words['experts']} {first}{last}: {words[status]}")
    # A slot among hundreds must not be too narrow to be seen.
    seen = max(wide, 3.0)
    text = (
        f'<rect class="{outline(status)}" x="{x:.1f}" y="{y}" width="{seen:.1f}" height="{high - 1}">'
        f"<title>{title}</title></rect>"
    )
    if cell >= _ROOM and high >= 12:
        middles = (x + cell * (k + 0.5) for k in range(count))
        small = min(10.0, _SLIM * cell / len(sign))
        size = "" if small == 10.0 else f' style="font-size:{small:.1f}px"'
        text += "".join(f'<text class="on" x="{m:.1f}" y="{y + high - 4}"{size}>{sign}</text>' for m in middles)
    return text
