"""The list of terms on a page: both languages side by side, searched in the browser, with links to the pages."""

from __future__ import annotations

from typing import Any

import streamlit as st

from nvfp4viz.figures.words import LANGUAGES, words
from nvfp4viz.ui import glossary_terms, registry
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import table

_COMPONENT = load("term_list")
_KEY = "term_list"
MOST_CHARACTERS = 60
"""Of a search; a link with more is cut."""


def term_list(view: View) -> None:
    """Draw all terms on ``view``'s settings ``q``, what is sought, and ``term``, the one that a link points at."""
    now = (view["q"], view["term"])
    version = st.session_state.get(f"_{_KEY}_version", 0)
    if now != st.session_state.get(f"_{_KEY}_said") or view.arrived:
        version += 1
        st.session_state[f"_{_KEY}_version"], st.session_state[f"_{_KEY}_said"] = version, now

    def heard() -> None:
        said = st.session_state[_KEY]
        q, term = said.get("q"), said.get("term")
        if isinstance(q, str):
            view.put(q=q[:MOST_CHARACTERS])
        if term in glossary_terms.terms():
            view.put(term=term)
        st.session_state[f"_{_KEY}_said"] = (view["q"], view["term"])

    uses = glossary_terms.uses()
    result = _COMPONENT(
        key=_KEY,
        data={
            "terms": [_entry(term, uses[term]) for term in uses],
            "words": table(lang(), "glossary.list"),
            "q": view["q"],
            "term": view["term"] or "",
            "version": version,
        },
        on_q_change=heard,
        on_term_change=heard,
        on_go_change=_ignore,
    )
    _follow(result.get("go"), uses)


def _ignore() -> None:
    """The run that follows is enough."""


def _follow(chosen: Any, uses: dict[str, glossary_terms.Uses]) -> None:
    """Open the chosen page: ``[term, place among its pages]``."""
    if isinstance(chosen, list) and len(chosen) == 2 and chosen[0] in uses:
        pages = uses[chosen[0]].pages
        if chosen[1] in range(len(pages)):
            st.switch_page(registry.entry_of(pages[chosen[1]]).script, query_params=registry.params({}))


def _entry(term: str, uses: glossary_terms.Uses) -> dict[str, Any]:
    # The reader's own language first; on a phone it stands above the other.
    own = sorted(LANGUAGES, key=lambda language: language != lang())
    return {
        "id": term,
        "href": registry.href("glossary", {"term": term}),
        "sides": [
            {
                "lang": language,
                "term": words(language, f"glossary.{term}.term"),
                "text": words(language, f"glossary.{term}.text"),
            }
            for language in own
        ],
        "pages": [
            {
                "label": t(f"{page}.title"),
                "href": registry.href(page, {}),
                "explained": page in uses.explained,
            }
            for page in uses.pages
        ],
    }
