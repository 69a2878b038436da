"""The report for a terminal.  Names out of files are text, never markup."""

from __future__ import annotations

import io
from typing import Any

from nvfp4viz.audit.report import Report
from nvfp4viz.audit.run import describe

_COLOURS = {"ok": "green", "info": "cyan", "warn": "yellow", "backend": "magenta", "error": "red"}
_OUTCOME_COLOURS = {"safe": "green", "ignored": "green", "degraded": "yellow", "unsupported": "dim"}


def to_text(report: Report, language: str = "en", *, colour: bool = False, width: int = 100) -> str:
    """The report as text.

    Parameters
    ----------
    language
        Of messages and advice; the codes stay as they are.
    colour
        With the terminal's escape sequences.
    width
        Columns.
    """
    # rich takes 0.1 s to import: only a report for people pays for it.
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=colour, no_color=not colour, width=width, highlight=False, markup=False, emoji=False
    )
    model, kind, files = report.model, report.format, report.container
    head = Text()
    head.append(f"{report.source}\n", "bold")
    head.append(f"{kind.dialect} {kind.scheme}, group {kind.group_size}")
    head.append(
        f" · {len(model.moe_layers)} MoE layers × {model.experts} experts × {', '.join(model.projections) or '–'}\n"
    )
    head.append(f"{files.files} files, {files.tensors:,} tensors, {files.bytes:,} bytes; read {files.bytes_read:,}\n")
    head.append(f"config: {', '.join(kind.config_sources) or '–'}\n")
    head.append("verdict: ")
    head.append(report.verdict, f"bold {_COLOURS[report.verdict]}")
    console.print(head)

    if any(row.expected for row in report.coverage.values()):
        table = Table(box=box.SIMPLE)
        columns = ("expected", "present", "missing", "invalid", "filled", "unreadable")
        table.add_column("slots")
        for column in columns:
            table.add_column(column, justify="right")
        for role, row in report.coverage.items():
            table.add_row(role, *(str(getattr(row, column)) for column in columns))
        console.print(table)

    given: set[str] = set()
    for item in report.findings:
        message, advice = describe(item, language)
        console.print(Text.assemble((f"{item.severity:<8}", _COLOURS[item.severity]), (item.code, "bold")))
        console.print(Padding(Text(message), (0, 0, 0, 8)))
        # The same advice for forty layers is read once.
        if advice and advice not in given:
            given.add(advice)
            console.print(Padding(Text(f"→ {advice}", "dim"), (0, 0, 0, 8)))
    if not report.findings:
        console.print(Text("no findings"))

    if report.backends:
        table = Table(box=box.SIMPLE)
        for column in ("backend", "outcome", "scope", "why"):
            table.add_column(column, overflow="fold")
        # Many backends read a checkpoint alike: one row for all of them.
        alike: dict[tuple[str, tuple[str, ...], str, str], list[str]] = {}
        for forecast in report.backends:
            why, _ = describe(forecast, language)
            alike.setdefault((forecast.outcome, forecast.possible, forecast.scope, why), []).append(forecast.name)
        for (outcome, possible, scope, why), names in alike.items():
            shown = Text(outcome, _OUTCOME_COLOURS.get(outcome, "red"))
            shown.append(f"\nmay be {', '.join(possible)}" if possible else "")
            table.add_row(Text("\n".join(names)), shown, Text(scope), Text(why))
        console.print(table)
    auto: Any = report.auto
    if isinstance(auto, str) or auto is None:
        console.print(Text(f"vLLM picks by itself: {auto or '–'}"))
    return stream.getvalue()
