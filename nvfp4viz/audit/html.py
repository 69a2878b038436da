"""The report as one HTML file: no script, nothing fetched, light and dark, and fit for paper."""

from __future__ import annotations

from functools import cache, partial
from html import escape
from pathlib import Path

from nvfp4viz import __version__
from nvfp4viz.audit.heatmap import MARKS, SlotMap, draw, outline, slot_maps
from nvfp4viz.audit.report import Finding, Report
from nvfp4viz.audit.run import Audit, describe
from nvfp4viz.audit.tables import BACKEND_COLUMNS, COVERAGE_COLUMNS, auto_line, backend_rows, coverage_cells, head_lines
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import printable

_LANGUAGES = {"en": "en", "zh": "zh-Hans"}
# Nothing may be loaded or run, whatever a name in a file says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(done: Audit, language: str = "en") -> str:
    """The whole page.

    Parameters
    ----------
    language
        Of everything but codes, roles and names.
    """
    report = done.report
    title = escape(report_words(language, "page.title", source=report.source))
    body = [*_head(report, language), *_coverage(done, language), *_findings(report, language)]
    body += [*_backends(report, language), *_foot(report, language)]
    return (
        f'<!DOCTYPE html>\n<html lang="{_LANGUAGES[language]}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


@cache
def _style() -> str:
    return (Path(__file__).parent / "data" / "report.css").read_text(encoding="utf-8")


def _head(report: Report, language: str) -> list[str]:
    word = partial(report_words, language)
    verdict = escape(word(f"severity.{report.verdict}"))
    lines = [f"<h1>{escape(report.source)}</h1>"]
    lines.append(f'<p>{escape(word("verdict"))}<span class="verdict s-{report.verdict}">{verdict}</span></p>')
    return [*lines, *(f'<p class="muted">{escape(line)}</p>' for line in head_lines(report, language))]


def _coverage(done: Audit, language: str) -> list[str]:
    word = partial(report_words, language)
    report = done.report
    if not any(row.expected for row in report.coverage.values()):
        return []
    names = "".join(f'<th class="n">{escape(word(f"columns.{name}"))}</th>' for name in COVERAGE_COLUMNS)
    lines = [f"<h2>{escape(word('page.coverage'))}</h2>", '<div class="wide"><table>']
    lines.append(f"<thead><tr><th>{escape(word('columns.slots'))}</th>{names}</tr></thead><tbody>")
    for role, row in report.coverage.items():
        cells = "".join(f'<td class="n">{cell}</td>' for cell in coverage_cells(role, row))
        lines.append(f'<tr><td class="names"><code>{escape(role)}</code></td>{cells}</tr>')
    lines.append("</tbody></table></div>")
    maps = slot_maps(done.rows())
    holed = [found for found in maps if found.statuses]
    if not holed:
        return [*lines, f"<p>{escape(word('page.all_there'))}</p>"]
    return [*lines, *_maps(holed, len(maps) - len(holed), language)]


def _maps(maps: list[SlotMap], whole: int, language: str) -> list[str]:
    """Each map once: the style sheet, not a second drawing, makes it dark."""
    word = partial(report_words, language)
    words = {status: word(f"status.{status}") for status in MARKS}
    words |= {key: word(f"page.{key}") for key in ("layer", "draft", "experts")}
    words["label"] = word("page.map", role="{role}", projection="{projection}")
    hatch = (
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs><pattern id="hatch" width="4" '
        'height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" '
        'x2="0" y2="4"/></pattern></defs></svg>'
    )
    # Nobody points at paper.
    point = f'<span class="screen">{escape(word("page.axes_point"))}</span>'
    drafts = escape(word("page.axes_drafts")) if any(found.drafts for found in maps) else ""
    lines = [hatch, f'<p class="muted">{escape(word("page.axes"))}{point}{drafts}</p>', '<p class="key">']
    seen = set().union(*(found.statuses for found in maps))
    for status, sign in MARKS.items():
        if status in seen:
            swatch = f'<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="{outline(status)}" x=".5" y=".5" '
            swatch += 'width="13" height="13"/>'
            swatch += f'<text class="on" x="7" y="11">{sign}</text></svg>'
            lines.append(f"<span>{swatch}{escape(words[status])}</span>")
    lines.append("</p>")
    for found in maps:
        caption = f"<code>{found.role}</code> · {found.projection}"
        lines.append(f"<figure><figcaption>{caption}</figcaption>{draw(found, words)}</figure>")
    if whole:
        lines.append(f"<p>{escape(word('page.other_maps', count=whole))}</p>")
    return lines


def _findings(report: Report, language: str) -> list[str]:
    word = partial(report_words, language)
    lines = [f"<h2>{escape(word('page.findings', count=len(report.findings)))}</h2>"]
    if not report.findings:
        return [*lines, f"<p>{escape(word('none'))}</p>"]
    given: set[str] = set()
    return [*lines, *(_finding(item, language, given) for item in report.findings)]


def _finding(item: Finding, language: str, given: set[str]) -> str:
    message, advice = describe(item, language)
    severity = escape(report_words(language, f"severity.{item.severity}"))
    out = [
        f'<article><p><strong class="s-{item.severity}">{severity}</strong> <code>{escape(item.code)}</code></p>',
        f"<p>{escape(message)}</p>",
    ]
    # The same advice for forty layers is read once.
    if advice and advice not in given:
        given.add(advice)
        out.append(f"<p>→ {escape(advice)}</p>")
    if item.tensors:
        names = "<br>".join(f"<code>{escape(printable(name, 300))}</code>" for name in item.tensors)
        out.append(f'<p class="muted">{names}{" …" if item.count > len(item.tensors) else ""}</p>')
    return "".join([*out, "</article>"])


def _backends(report: Report, language: str) -> list[str]:
    word = partial(report_words, language)
    auto = [f"<p>{escape(line)}</p>" for line in [auto_line(report, language)] if line]
    if not report.backends:
        return auto
    names = "".join(f"<th>{escape(word(f'columns.{name}'))}</th>" for name in BACKEND_COLUMNS)
    lines = [f"<h2>{escape(word('page.backends'))}</h2>", '<div class="wide"><table class="stacks">']
    lines.append(f"<thead><tr>{names}</tr></thead><tbody>")
    for row in backend_rows(report, language):
        shown = "".join(f"<code>{escape(name)}</code>" for name in row.names)
        cells = f'<td class="outcome">{escape(row.outcome)}</td><td class="scope">{escape(row.scope)}</td>'
        lines.append(f'<tr><td class="names">{shown}</td>{cells}<td class="why">{escape(row.why)}</td></tr>')
    return [*lines, "</tbody></table></div>", *auto]


def _foot(report: Report, language: str) -> list[str]:
    made = escape(report_words(language, "page.made", version=__version__, schema=report.schema))
    return [f'<p class="muted">{made}<br><code>{escape(report.fingerprint)}</code></p>']
