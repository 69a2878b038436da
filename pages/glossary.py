"""Glossary: every term in both languages side by side, with the pages that use it."""

from nvfp4viz.ui import glossary_terms, lesson, state
from nvfp4viz.ui.shell import ensure_shell
from nvfp4viz.ui.term_list import MOST_CHARACTERS, term_list

ensure_shell()
terms = glossary_terms.terms()
page = lesson.open_page(
    "glossary",
    q=state.Param("", lambda text: text[:MOST_CHARACTERS], "a-z …"),
    # A note about a wrong one shows what a term looks like; all of them would fill the screen.
    term=state.Param(None, state.choice(terms).parse, f"{terms[0]}, {terms[1]} …"),
)
term_list(page.view)
page.foot(code={"term": page.view["term"] or terms[0]}, data={"glossary": glossary_terms.rows})
