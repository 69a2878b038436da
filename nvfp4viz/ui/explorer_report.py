"""The Explorer's report to take away: the texts of ``nvfp4viz audit --format``, made when somebody asks for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.audit import to_json
from nvfp4viz.audit.html import to_html
from nvfp4viz.audit.markdown import to_markdown
from nvfp4viz.audit.tables import to_csv
from nvfp4viz.ui.i18n import lang

if TYPE_CHECKING:
    from nvfp4viz.audit import Audit
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

MIMES = {"html": "text/html", "md": "text/markdown", "json": "application/json", "csv": "text/csv"}


def report_text(done: Audit, kind: str, language: str) -> str:
    """One form of the report (``"html"``, ``"md"``, ``"json"``, or ``"csv"`` with one row a slot).

    The source is called what it calls itself: a folder's own name or an address without its secrets, never a path.
    """
    if kind == "html":
        return to_html(done, language)
    if kind == "md":
        return to_markdown(done.report, language)
    return to_json(done.report) if kind == "json" else to_csv(done.rows())


def file_stem(opened: Opened) -> str:
    """What a downloaded file's name says of its checkpoint."""
    return re.sub(r"[^\w.-]+", "-", opened.audit.checkpoint.name).strip("-") or "checkpoint"


def report_buttons(page: Lesson, opened: Opened) -> None:
    """A button for each form, mounted when somebody asks for it: they would cost every gesture their time."""
    language = lang()
    # Readers collect reports of several checkpoints.
    of = file_stem(opened)

    def later(kind: str) -> Callable[[], str]:
        return lambda: report_text(opened.audit, kind, language)

    box = st.popover(page.t("report.label"), icon=":material/summarize:", key="explorer.report", on_change="rerun")
    if not box.open:
        return
    with box:
        for kind, mime in MIMES.items():
            st.download_button(
                page.t(f"report.{kind}"),
                data=later(kind),
                file_name=f"nvfp4viz-{'slots' if kind == 'csv' else 'audit'}-{of}.{kind}",
                mime=mime,
                key=f"explorer.report.{kind}",
                help=page.t(f"report.{kind}_help"),
                on_click="ignore",
                icon=":material/download:",
                width="stretch",
            )
