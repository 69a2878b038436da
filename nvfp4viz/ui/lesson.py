"""The page template: a claim, a stage with its side, details, and a foot with code, sources, data and the link.

A lesson page reads::

    ensure_shell()
    page = lesson.open_page("e2m1", x=state.number(...))
    stage, side = page.stage()
    with stage: ...            # the component or the figure
    with side:
        page.finding("seen", x=..., value=...)
    page.prose("ties", ...)
    page.foot(code={"x": 2.5}, data={"e2m1_codes": rows})
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import streamlit as st

from nvfp4viz.figures.layout import drawn_once
from nvfp4viz.figures.words import LANGUAGES
from nvfp4viz.ui import export, i18n, predict, registry, snippets, state
from nvfp4viz.ui.components import load
from nvfp4viz.ui.device_line import device_line
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.kernels import wait_for_kernels
from nvfp4viz.ui.link_notes import forget_notes

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COPY_LINK = load("copy_link")
Rows = Sequence[Mapping[str, Any]]
_ANYWHERE = {"mode": ", ".join(state.MODES), "lang": ", ".join(LANGUAGES)}
"""What a link may say on every page."""


def open_page(page_id: str, **params: state.Param) -> Lesson:
    """Read the link, draw title and claim, name link values that could not be used, and have the kernels ready."""
    page = Lesson(page_id, state.open_view(page_id, **params))
    if page.view.notes or not page.view.arrived:
        page.view.write_link()
    page.head()
    if registry.entry_of(page_id).kernels:
        wait_for_kernels()
    return page


class Lesson:
    """One page being drawn.  ``view`` holds its settings."""

    def __init__(self, page_id: str, view: state.View) -> None:
        self.id = page_id
        self.view = view
        self._count = 0
        self._styled = False
        predict.begin()

    def t(self, key: str, **values: object) -> str:
        """A text of this page: ``page.t("claim")`` is ``t("e2m1.claim")``."""
        return t(f"{self.id}.{key}", **values)

    def _key(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self.id}_{self._count}"

    def head(self) -> None:
        with st.container(key="lesson_head", gap="xsmall"):
            st.title(self.t("title"), anchor=False)
            with st.container(key="lesson_claim"):
                st.markdown(self.t("claim"))
        self._noted = st.empty()
        self._draw_notes()

    def _draw_notes(self) -> None:
        """Link values that could not be used, each with the range that holds for what is open now; and several values
        of one setting."""
        if not self.view.notes:
            return
        with self._noted.container(gap="xsmall"):
            for note in self.view.notes:
                shown = f"`{note.name}={note.value.replace('`', '')}`"
                if note.values:
                    said = i18n.listed(f"`{value.replace('`', '')}`" for value in note.values)
                    st.caption(t("ui.link.several", name=f"`{note.name}`", values=said, what=shown))
                elif note.known:
                    st.caption(t("ui.link.unusable", what=shown, allowed=self._allowed(note.name)))
                else:
                    st.caption(t("ui.link.unknown", what=shown))

    def _allowed(self, name: str) -> str:
        allowed = _ANYWHERE.get(name) or self.view.params[name].allowed
        return i18n.listed(allowed.split(", ")) if isinstance(allowed, str) else t(allowed[0], **allowed[1])

    def refine(self, **params: state.Param) -> None:
        """The real ranges of settings, once what is open tells them: as :meth:`state.View.refine`, with its notes."""
        self._settle(self.view.refine, params)

    def bound(self, **highs: int) -> None:
        """The largest indices that other settings leave: as :meth:`state.View.bound`, with its notes."""
        self._settle(self.view.bound, highs)

    def _settle(self, one: Callable[[str, Any], None], ranges: Mapping[str, Any]) -> None:
        known = len(self.view.notes)
        for name, allowed in ranges.items():
            one(name, allowed)
        if len(self.view.notes) > known:
            self.view.write_link()
        self._draw_notes()

    def stage(self, ratio: tuple[int, int] = (2, 1)) -> tuple[Any, Any]:
        """The stage (about two thirds) and the side; the side follows below on a phone."""
        stage, side = st.columns(ratio, gap="large")
        return stage, side

    def finding(self, key: str, **values: object) -> None:
        """What is to be seen now, in one computed sentence."""
        with st.container(key=self._key("finding")):
            st.markdown(self.t(key, **values))

    def prose(self, key: str, **values: object) -> None:
        """A piece of Markdown from the page's texts."""
        with st.container(key=self._key("prose")):
            st.markdown(self.t(key, **values))

    def heading(self, key: str) -> None:
        st.header(self.t(key), anchor=False)

    def expander(self, key: str) -> Any:
        """An expander whose body is computed only while it is open: test ``box.open`` before computing."""
        return st.expander(self.t(key), key=f"{self.id}.open.{key}", on_change="rerun")

    def tabs(self, *keys: str) -> list[Any]:
        """Tabs whose bodies are computed only while they are open; test ``tab.open`` before computing.

        ``keys`` are ``tabs.<id>``; the page's setting ``tab`` is a choice among these ids: a link opens the same one.
        """
        key, last = f"{self.id}.tabs", f"{self.id}.tabs.last"
        labels, before = [self.t(name) for name in keys], st.session_state.get(last, keys[0])
        wanted = f"tabs.{self.view['tab']}"
        # Streamlit knows the open one by its label, which another language changes; and a link knows it by its id.
        if wanted != before or (st.session_state.get(key) not in labels and last in st.session_state):
            st.session_state[key] = self.t(wanted)
        tabs = list(st.tabs(labels, key=key, on_change="rerun"))
        now = next((name for name, tab in zip(keys, tabs, strict=True) if tab.open), keys[0])
        st.session_state[last] = now
        if now != wanted:
            self.view.put(tab=now.removeprefix("tabs."))
        return tabs

    def parts(self, name: str, ids: Sequence[str]) -> str:
        """One part of a longer page at a time, chosen by id, so that a link and a change of language keep it.

        ``name`` is a setting declared with ``state.choice(ids, default=…)``; the labels are the texts ``<name>.<id>``.
        """
        with st.container(key=self._key("parts")):
            chosen = st.segmented_control(
                self.t(f"{name}.label"),
                ids,
                format_func=lambda part: self.t(f"{name}.{part}"),
                required=True,
                label_visibility="collapsed",
                **self.view.widget(name),
            )
        return str(chosen)

    def figure(self, figure: go.Figure, *, alt: str, finding: str, rows: Callable[[], Rows] | None = None) -> None:
        """A Plotly figure with its short name, the sentence that states its finding, and its data as a table."""
        key = self._key("figure")
        st.plotly_chart(
            drawn_once(figure),
            theme=None,
            key=key,
            alt=alt,
            config={"displaylogo": False, "displayModeBar": "hover", "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
        )
        self._stated(finding, alt, rows, key)

    def _stated(self, finding: str, alt: str, rows: Callable[[], Rows] | None, key: str) -> None:
        """What stands below a figure: its finding, and its data when a reader asks."""
        st.markdown(finding)
        if rows is not None:
            box = st.expander(t("ui.table"), key=f"{key}_table", on_change="rerun")
            if box.open:
                table = list(rows())
                box.dataframe(table, hide_index=True, alt=alt, column_config=_columns(table), placeholder="–")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A small table.  ``columns`` are text keys below ``columns.``, with ``>`` in front where numbers stand right;
        cells are text, already formatted."""
        names = [self.t(f"columns.{column.lstrip('>')}") for column in columns]
        rules = ["---:" if column.startswith(">") else "---" for column in columns]
        lines = ["| " + " | ".join(names) + " |", "|" + "|".join(rules) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        with st.container(key=self._key("table")):
            st.markdown("\n".join(lines))

    def html_table(self, columns: Sequence[str], rows: Iterable[Sequence[str | list[tuple[str, bool]]]]) -> None:
        """A table whose cells may be rows of marks: a list of ``(text, marked)`` is set in the mono face, marked ones
        underlined and bold.  ``columns`` as in :meth:`table`."""
        sides = ["right" if column.startswith(">") else "left" for column in columns]
        names = [html.escape(self.t("columns." + column.lstrip(">"))) for column in columns]
        heads = "".join(f'<th class="{side}">{name}</th>' for side, name in zip(sides, names, strict=True))
        cells = (
            "".join(f'<td class="{side}">{_cell(cell)}</td>' for side, cell in zip(sides, row, strict=True))
            for row in rows
        )
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        with st.container(key=self._key("table")):
            st.html(f'<table class="nv"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>')

    def glossary(self, *terms: str) -> None:
        """The terms of this place, defined where they are used; drawn when a reader asks."""
        key = f"{self.id}.terms.{'.'.join(terms)}"
        box = st.popover(t("ui.terms"), type="tertiary", icon=":material/dictionary:", key=key, on_change="rerun")
        if box.open:
            with box:
                for term in terms:
                    st.markdown(f"**{t(f'glossary.{term}.term')}**  \n{t(f'glossary.{term}.text')}")
                registry.link("glossary", t("ui.all_terms"), term=terms[0])

    def drawing(self, markup: str) -> None:
        """A small drawing in HTML, styled by ``drawings.css``; its texts are escaped, and say what it shows."""
        # The style sheet holds for the whole page: sent once a run.
        st.html(markup if self._styled else _drawing_style() + markup)
        self._styled = True

    def drawn_figure(self, markup: str, *, alt: str, finding: str, rows: Callable[[], Rows]) -> None:
        """A drawing as a figure: for boxes alone no chart need be mounted."""
        self.drawing(markup)
        self._stated(finding, alt, rows, self._key("figure"))

    def foot(
        self,
        *,
        code: Mapping[str, Any],
        data: Mapping[str, Rows | Callable[[], Rows]],
        snippet: str | None = None,
        run: Callable[[str], str] = snippets.run,
        left_out: str = "",
    ) -> None:
        """Show me the code, Sources, Download data, Copy link, what computes; the address bar is brought up to date.

        ``code`` fills the page's snippet ``content/code/<id>.py`` (or ``<snippet>.py``), which ``run`` runs; ``data``
        maps a file's stem to its rows (or a function that computes them when somebody downloads); where there is none
        yet, the place of the files says so.  ``left_out`` is a sentence about what the link cannot carry: it stands
        beside the button before a reader copies, too.
        Rows say themselves which settings they come from: `export.about`.
        """
        # What the page itself has settled on arrival is no step of the reader's: the browser corrects the address
        # without an entry in its history, or Back would lead to the same page again.
        if self.view.arrived:
            self.view.trust_link()
        else:
            self.view.write_link()
        st.divider()
        box = st.expander(t("ui.code.label"), key=f"{self.id}.open.code", on_change="rerun", icon=":material/code:")
        if box.open:
            with box:
                source = snippets.fill(snippet or self.id, code)
                st.code(source, language="python")
                st.caption(t("ui.code.output"))
                st.code(run(source), language=None)
        with st.container(horizontal=True, gap="small", vertical_alignment="center"):
            # Filled when they are opened: closed popovers would otherwise cost every reader a third of the first paint.
            sources = st.popover(
                t("ui.sources"), icon=":material/menu_book:", key=f"{self.id}.sources", on_change="rerun"
            )
            if sources.open:
                sources.markdown("\n".join(self._sources()))
            downloads = st.popover(
                t("ui.download"), icon=":material/download:", key=f"{self.id}.download", on_change="rerun"
            )
            if downloads.open:
                with downloads:
                    self._downloads(data)
            st.button(t("ui.reset"), icon=":material/restart_alt:", key=f"{self.id}.reset", on_click=self._start_over)
            _COPY_LINK(
                key=f"{self.id}.copy",
                data={
                    "label": t("ui.copy.label"),
                    "copied": _what_link_opens(t("ui.copy.copied"), left_out),
                    "byHand": _what_link_opens(t("ui.copy.by_hand"), left_out),
                    "leftOut": left_out,
                    "query": urlencode(self.view.address()),
                },
                width="content",
            )
        st.caption(device_line())

    def _start_over(self) -> None:
        """Every setting at its default, nothing opened, no guess made: as the page was at first."""
        for key in [str(key) for key in st.session_state]:
            if key.startswith(f"{self.id}.") or re.match(rf"predict\.\w+\.{self.id}\.", key):
                del st.session_state[key]
        self.view.defaults()
        forget_notes()
        # A component may have put its own setting into the address; what it says now is no new link to follow.
        st.session_state["_link"] = st.query_params.to_dict()

    def _downloads(self, data: Mapping[str, Rows | Callable[[], Rows]]) -> None:
        if not data:
            st.markdown(t("ui.no_data"))
        for stem, rows in data.items():
            with st.container(horizontal=True, gap="small", key=f"{self.id}.files.{stem}"):
                for kind, convert, mime in export.KINDS:
                    st.download_button(
                        f"{stem}.{kind}",
                        data=export.as_shown(
                            lambda rows=rows, convert=convert: convert(rows() if callable(rows) else rows)
                        ),
                        file_name=f"{stem}.{kind}",
                        mime=mime,
                        key=f"{self.id}.download.{stem}.{kind}",
                        on_click="ignore",
                    )

    def _sources(self) -> Iterable[str]:
        index = 0
        while i18n.has(f"{self.id}.sources.{index}.what"):
            what = self.t(f"sources.{index}.what")
            where = self.t(f"sources.{index}.where")
            # A source is a file, an issue or a table of ours; where it has an address, it is a link.
            place = f"<{where}>" if where.startswith("https://") else f"`{where}`"
            yield f"- {what}  \n  {place}"
            index += 1


@cache
def _drawing_style() -> str:
    return f"<style>{(Path(__file__).parent / 'drawings.css').read_text(encoding='utf-8')}</style>"


def _what_link_opens(said: str, left_out: str) -> str:
    """After ``said``: what a copied link restores, and what it does not."""
    said = t("ui.copy.opens", said=said)
    if predict.revealed():
        said = t("ui.copy.asked", said=said)
    return t("ui.copy.left_out", said=said, left_out=left_out) if left_out else said


def _columns(rows: Rows) -> dict[str, Any]:
    """Names in the reader's language where there is one; six significant digits for what is no integer, because the
    usual four decimals would make scales look alike."""
    names = dict.fromkeys(name for row in rows for name in row)
    decimal = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    said = {name: t(f"ui.column.{name}") for name in names if i18n.has(f"ui.column.{name}")}
    return {
        name: st.column_config.NumberColumn(said.get(name), format="%.6g")
        if name in decimal
        else st.column_config.Column(said.get(name))
        for name in names
        if name in decimal or name in said
    }


def _cell(cell: str | list[tuple[str, bool]]) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    marks = (f"<b>{html.escape(text)}</b>" if marked else f"<span>{html.escape(text)}</span>" for text, marked in cell)
    return f'<span class="marks">{"".join(marks)}</span>'


__all__ = ["Lesson", "escape", "open_page"]
