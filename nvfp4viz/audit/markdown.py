"""The report as Markdown for an issue: bounded in length, and names out of files stay names."""

from __future__ import annotations

import re
from functools import partial

from nvfp4viz import __version__
from nvfp4viz.audit.report import Report
from nvfp4viz.audit.run import describe
from nvfp4viz.audit.tables import BACKEND_COLUMNS, COVERAGE_COLUMNS, auto_line, backend_rows, coverage_cells, head_lines
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import printable

# GitHub takes 65,536 characters; a finding is a few hundred of them.
_LIMIT = 40


def to_markdown(report: Report, language: str = "en") -> str:
    """GitHub-flavoured Markdown.

    Parameters
    ----------
    language
        Of everything but codes, roles and names.
    """
    word = partial(report_words, language)
    lines = [f"### {_text(word('page.title', source=report.source))}", ""]
    lines += [f"**{_text(word('verdict') + word(f'severity.{report.verdict}'))}**", ""]
    lines += [f"- {_text(line)}" for line in head_lines(report, language)]
    if any(row.expected for row in report.coverage.values()):
        titles = [word("columns.slots"), *(word(f"columns.{name}") for name in COVERAGE_COLUMNS)]
        lines += ["", _row(titles), "|---|" + "--:|" * len(COVERAGE_COLUMNS)]
        for role, row in report.coverage.items():
            lines.append(_row([f"`{role}`", *coverage_cells(role, row)]))
    lines += ["", f"#### {_text(word('page.findings', count=len(report.findings)))}", ""]
    given: set[str] = set()
    for item in report.findings[:_LIMIT]:
        message, advice = describe(item, language)
        lines.append(f"- **{word(f'severity.{item.severity}')}** `{item.code}`: {_text(message)}")
        if item.tensors:
            more = " …" if item.count > len(item.tensors) else ""
            lines.append(f"  - {', '.join(_code(printable(name, 300)) for name in item.tensors)}{more}")
        # The same advice for forty layers is read once.
        if advice and advice not in given:
            given.add(advice)
            lines.append(f"  - → {_text(advice)}")
    if len(report.findings) > _LIMIT:
        lines.append(f"- {word('page.more_findings', count=len(report.findings) - _LIMIT)}")
    if not report.findings:
        lines.append(word("none"))
    if report.backends:
        lines += ["", f"#### {word('page.backends')}", ""]
        lines += [_row([word(f"columns.{name}") for name in BACKEND_COLUMNS]), "|---|---|---|---|"]
        for row in backend_rows(report, language):
            names = ", ".join(f"`{name}`" for name in row.names)
            outcome = ": ".join(_text(part) for part in row.outcome.split("\n"))
            lines.append(_row([names, outcome, _text(row.scope), _text(row.why)]))
    if auto := auto_line(report, language):
        lines += ["", _text(auto)]
    made = word("page.made", version=__version__, schema=report.schema)
    return "\n".join([*lines, "", f"<sub>{_text(made)} · {report.fingerprint}</sub>", ""])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#!])")


def _text(text: str) -> str:
    """Plain text: nothing in it is markup, a tag, or a mention that calls somebody."""
    flat = " ".join(text.split())
    return _SPECIAL.sub(r"\\\1", flat).replace("&", "&amp;").replace("@", "@\u200b").replace("://", ":\u200b//")


def _code(text: str) -> str:
    """A code span that no backtick of the name ends."""
    marks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{marks}{space}{' '.join(text.split())}{space}{marks}"
