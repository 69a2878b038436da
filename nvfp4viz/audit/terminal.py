"""The report for a terminal.  Names out of files are text, never markup."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nvfp4viz.audit.report import Report
from nvfp4viz.audit.run import describe
from nvfp4viz.audit.tables import BACKEND_COLUMNS, COVERAGE_COLUMNS, auto_line, backend_rows, coverage_cells, head_lines
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import printable
from nvfp4viz.checkpoint.problems import as_written

if TYPE_CHECKING:
    from nvfp4viz.audit.diff import ChangedValue, Diff
    from nvfp4viz.audit.repair import Repair

_COLOURS = {"ok": "green", "info": "cyan", "warn": "yellow", "backend": "magenta", "error": "red"}
_OUTCOME_COLOURS = {"safe": "green", "ignored": "green", "degraded": "yellow", "unsupported": "dim"}


def to_text(report: Report, language: str = "en", *, colour: bool = False, width: int = 100) -> str:
    """The report as text.

    Parameters
    ----------
    language
        Of everything but the codes and names.
    colour
        With the terminal's escape sequences.
    width
        Columns.
    """
    # rich takes 0.1 s to import: only a report for people pays for it.
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    label = partial(report_words, language)
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=colour, no_color=not colour, width=width, highlight=False, markup=False, emoji=False
    )
    head = Text()
    head.append(f"{report.source}\n", "bold")
    for line in head_lines(report, language):
        head.append(f"{line}\n")
    head.append(label("verdict"))
    head.append(label(f"severity.{report.verdict}"), f"bold {_COLOURS[report.verdict]}")
    console.print(head)

    if any(row.expected for row in report.coverage.values()):
        table = Table(box=box.SIMPLE)
        table.add_column(label("columns.slots"))
        for column in COVERAGE_COLUMNS:
            table.add_column(label(f"columns.{column}"), justify="right")
        for role, row in report.coverage.items():
            table.add_row(role, *coverage_cells(role, row))
        console.print(table)

    given: set[str] = set()
    for item in report.findings:
        message, advice = describe(item, language)
        severity = label(f"severity.{item.severity}")
        severity += " " * max(8 - cell_len(severity), 1)
        console.print(Text.assemble((severity, _COLOURS[item.severity]), (item.code, "bold")))
        console.print(Padding(Text(message), (0, 0, 0, 8)))
        # The same advice for forty layers is read once.
        if advice and advice not in given:
            given.add(advice)
            console.print(Padding(Text(f"→ {advice}", "dim"), (0, 0, 0, 8)))
    if not report.findings:
        console.print(Text(label("none")))

    if report.backends:
        table = Table(box=box.SIMPLE)
        for column in BACKEND_COLUMNS:
            table.add_column(label(f"columns.{column}"), overflow="fold")
        for row in backend_rows(report, language):
            first, _, rest = row.outcome.partition("\n")
            shown = Text(first, _OUTCOME_COLOURS.get(row.kind, "red"))
            shown.append(f"\n{rest}" if rest else "")
            table.add_row(Text("\n".join(row.names)), shown, Text(row.scope), Text(row.why))
        console.print(table)
    if auto := auto_line(report, language):
        console.print(Text(auto))
    # Tables are filled up with blanks to their width, which a pipe would carry into an issue.
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


# Slots that a plan names one by one.
_SHOWN = 40


def repair_to_text(plan: Repair, language: str = "en") -> str:
    """A plan for repair, for a terminal."""
    word, record = partial(report_words, language), plan.record
    lines = [record.source, word("repair.policy", policy=record.policy)]
    numbers = plan.numbers
    if numbers:
        lines.append(word(f"repair.slots{'_shared' * bool(plan.shared)}", count=len(numbers), slots=len(record.slots)))
    for slot in numbers[:_SHOWN]:
        old = word("repair.missing")
        if slot.old is not None:
            old = word("repair.was", old=slot.old, state=slot.old_state)
        layer = f"{'D' * slot.draft}{slot.layer}"
        place = {"layer": layer, "expert": slot.expert, "projection": slot.projection}
        key = f"repair.slot{'_shared' * (slot.tensor in plan.shared)}"
        lines.append(word(key, **place, old=old, new=slot.new, tensor=printable(slot.tensor)))
    if len(numbers) > _SHOWN:
        lines.append(word("repair.more", count=len(numbers) - _SHOWN))
    if record.dropped:
        lines.append(word("repair.dropped", count=len(record.dropped)))
    if record.config:
        lines.append(word("repair.config", files=", ".join(record.config)))
    if plan.suspected:
        lines.append(word("repair.suspected", count=plan.suspected))
    if plan.is_empty:
        lines.append(word("repair.nothing"))
    else:
        lines.append(shards_words(plan, language))
        lines.append(word("repair.guess" if record.guesses else "repair.no_guess"))
    return "\n".join(lines)


def shards_words(plan: Repair, language: str) -> str:
    """What a copy writes anew, and what becomes of the other shards, where there are any."""
    count, size = plan.rewritten
    key = "shards_none" if not count else "shards" if plan.linked else "shards_all"
    return report_words(language, f"repair.{key}", count=count, bytes=f"{size:,}")


def diff_to_text(found: Diff, language: str = "en") -> str:
    """Two checkpoints' differences, for a terminal: how many of each kind, and the first of them."""
    word = partial(report_words, language)
    lines = [
        f"{side} {one.source}  {one.dialect} {one.scheme}, {word('diff.tensors', count=one.tensors)}"
        for side, one in (("a", found.a), ("b", found.b))
    ]
    seen = []
    if found.by_header:
        seen.append(word("diff.by_header", values=f"{found.by_value:,}", others=f"{found.by_header:,}"))
    if found.same:
        return "\n".join([*lines, word("diff.same"), *seen]) + "\n"
    unread = (("a", found.unread_a), ("b", found.unread_b))
    if not found.differs:
        lines.append(word("diff.same_so_far"))

    def section(title: str, rows: Sequence[str]) -> None:
        if rows:
            lines.append(title)
            lines.extend(f"  {printable(row, 400)}" for row in rows[:_SHOWN])
            if len(rows) > _SHOWN:
                lines.append(word("diff.more", count=len(rows) - _SHOWN))

    for side, files in unread:
        section(word("diff.unread", count=len(files), side=side), files)
    for side, names in (("a", found.only_a), ("b", found.only_b)):
        section(word("diff.only", count=len(names), side=side), names)
    types = [f"{i.tensor}: {i.a[0]} {list(i.a[1])} → {i.b[0]} {list(i.b[1])}" for i in found.types]
    section(word("diff.types", count=len(types)), types)
    section(word("diff.values", count=len(found.values)), [_value_line(item, word) for item in found.values])
    absent = word("diff.absent")
    said = [[absent if value is None else as_written(value) for value in (i.a, i.b)] for i in found.config]
    settings = [f"{i.file} {i.field}: {old} → {new}" for i, (old, new) in zip(found.config, said, strict=True)]
    section(word("diff.config", count=len(settings)), settings)
    return "\n".join([*lines, *seen]) + "\n"


def _value_line(item: ChangedValue, word: Callable[..., str]) -> str:
    place = item.tensor
    if item.layer is not None:
        expert = "" if item.expert is None else word("diff.expert", expert=item.expert)
        at = {"layer": item.layer, "projection": item.projection, "role": item.role}
        place = word("diff.slot_draft" if item.draft else "diff.slot", expert=expert, **at)
    ratio = "" if item.ratio is None else f"  {word('diff.ratio', ratio=f'{item.ratio:.4g}')}"
    return f"{place}: {item.a} → {item.b}{ratio}"
