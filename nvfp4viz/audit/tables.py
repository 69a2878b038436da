"""What the report's written forms share: its head, its table of backends, and the table of slots."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from nvfp4viz.audit.coverage import SlotRow
from nvfp4viz.audit.facts import SCALARS
from nvfp4viz.audit.report import Coverage, Report
from nvfp4viz.audit.run import describe
from nvfp4viz.audit.texts import id_list, report_words
from nvfp4viz.checkpoint import printable

COVERAGE_COLUMNS = ("expected", "present", "missing", "invalid", "filled", "unreadable")
BACKEND_COLUMNS = ("backend", "outcome", "scope", "why")
SLOT_COLUMNS = ("layer", "expert", "projection", "role", "status", "value", "tensor", "draft")


class BackendRow(NamedTuple):
    """Backends that read a checkpoint alike, and what comes of it, in words; ``kind`` is the outcome's id."""

    names: tuple[str, ...]
    outcome: str
    scope: str
    why: str
    kind: str


def head_lines(report: Report, language: str) -> tuple[str, str, str]:
    """Format and shape, files and bytes, and the configuration files."""
    word = partial(report_words, language)
    model, kind, files = report.model, report.format, report.container
    projections = ", ".join(model.projections) or "–"
    shape = word("shape", layers=len(model.moe_layers), experts=model.experts, projections=projections)
    if model.draft_layers:
        shape += word("drafts", layers=id_list(model.draft_layers))
    sizes = {"tensors": f"{files.tensors:,}", "bytes": f"{files.bytes:,}", "read": f"{files.bytes_read:,}"}
    # What is not quantised has no blocks.
    blocks = "" if kind.scheme == "UNQUANTISED" else f", {word('group', size=kind.group_size)}"
    return (
        f"{kind.dialect} {kind.scheme}{blocks} · {shape}",
        word("files", files=files.files, **sizes),
        word("config", sources=", ".join(kind.config_sources) or "–"),
    )


def coverage_cells(role: str, row: Coverage) -> list[str]:
    """One role's counts as text, in the order of `COVERAGE_COLUMNS`; a dash where nobody looked.

    Block scales are counted by name, type and shape: what they hold `--deep` alone reads, and tells of in findings.

    >>> coverage_cells("weight_scale", Coverage(expected=4, present=3, missing=1, invalid=0, filled=0, unreadable=0))
    ['4', '3', '1', '–', '–', '0']
    """
    unread = () if role in SCALARS else ("invalid", "filled")
    return ["–" if name in unread else str(getattr(row, name)) for name in COVERAGE_COLUMNS]


def backend_rows(report: Report, language: str) -> list[BackendRow]:
    """One row for all backends that read a checkpoint alike."""
    word = partial(report_words, language)
    alike: dict[tuple[str, tuple[str, ...], str, str], list[str]] = {}
    for forecast in report.backends:
        why, _ = describe(forecast, language)
        alike.setdefault((forecast.outcome, forecast.possible, forecast.scope, why), []).append(forecast.name)
    rows = []
    for (outcome, possible, scope, why), names in alike.items():
        shown = word(f"outcome.{outcome}")
        others = [name for name in possible if name != outcome]
        if others:
            shown += "\n" + word("may_be", outcomes=word("between").join(word(f"outcome.{name}") for name in others))
        rows.append(BackendRow(tuple(names), shown, word(f"scope.{scope}"), why, outcome))
    return rows


def auto_line(report: Report, language: str) -> str:
    """What vLLM picks by itself on the GPU that was named; empty where none was."""
    if isinstance(report.gpu, msgspec.UnsetType):
        return ""
    if report.format.scheme == "UNQUANTISED" and not report.backends:
        return report_words(language, "auto_of_none", gpu=report.gpu)
    backend = "–" if isinstance(report.auto, msgspec.UnsetType) else report.auto or "–"
    return report_words(language, "auto", gpu=report.gpu, backend=backend)


def to_csv(rows: Iterable[SlotRow]) -> str:
    """One row a slot, with a header; values as the files store them, ``draft`` as True or False."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(SLOT_COLUMNS)
    for row in rows:
        value, name = "" if row.value is None else row.value, _cell(row.tensor)
        writer.writerow((row.layer, row.expert, row.projection, row.role, row.status, value, name, row.draft))
    return stream.getvalue()


def _cell(text: str) -> str:
    """Text for a spreadsheet, which takes a cell that starts with one of these for a formula."""
    shown = printable(text, 500)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
