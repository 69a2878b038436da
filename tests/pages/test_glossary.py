"""The glossary as a reader in either language meets it."""

import pytest

from nvfp4viz.figures.words import words
from nvfp4viz.ui import glossary_terms, state, term_list

from .conftest import clean, shown_code_output, texts

PAGE = "glossary"
LANGUAGES = ["en", "zh"]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("query", [{}, {"q": "scale"}, {"term": "eplb"}, {"q": "重排", "term": "swizzle"}], ids=str)
def test_it_opens_by_link(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == words(lang, "glossary.title")
    for name, value in query.items():
        assert at.session_state[f"{PAGE}.{name}"] == value


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_term_that_there_is_not_is_named(open_page, lang):
    shown = texts(open_page(PAGE, lang=lang, term="nowhere"))
    note = next(line for line in shown.splitlines() if "`term=nowhere`" in line)
    assert len(note) < 160  # an example or two, not every term there is


def test_a_search_from_a_link_is_cut(open_page):
    at = open_page(PAGE, q="x" * 500)
    assert at.session_state[f"{PAGE}.q"] == "x" * term_list.MOST_CHARACTERS


def mounted(monkeypatch, language: str, go=None):
    """What the component is given, and where a chosen page leads."""
    given, went = {}, []
    for module in (term_list, term_list.registry):
        monkeypatch.setattr(module, "lang", lambda: language)
    monkeypatch.setattr(term_list, "t", lambda key, **values: words(language, key, **values))
    monkeypatch.setattr(term_list.st, "query_params", {"mode": "workshop"})
    monkeypatch.setattr(term_list.st, "session_state", {})
    monkeypatch.setattr(term_list.st, "switch_page", lambda script, query_params: went.append((script, query_params)))
    monkeypatch.setattr(term_list, "_COMPONENT", lambda **kwargs: given.update(kwargs["data"]) or {"go": go})
    term_list.term_list(state.View(PAGE, {"q": state.slug(""), "term": state.slug()}))
    return given, went


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_term_stands_there_in_both_languages_with_links(monkeypatch, language):
    given, went = mounted(monkeypatch, language)
    assert [entry["id"] for entry in given["terms"]] == list(glossary_terms.terms())
    for entry in given["terms"]:
        assert [side["lang"] for side in entry["sides"]] == (["en", "zh"] if language == "en" else ["zh", "en"])
        assert all(side["term"] and side["text"] for side in entry["sides"])
        assert f"term={entry['id']}" in entry["href"]
    swizzle = next(entry for entry in given["terms"] if entry["id"] == "swizzle")
    assert swizzle["pages"][0] == {
        "label": words(language, "blocks.title"),
        "href": f"blocks?lang={language}&mode=workshop",
        "explained": True,
    }
    assert not went


def test_a_chosen_page_opens_in_this_session(monkeypatch):
    _, went = mounted(monkeypatch, "zh", go=["swizzle", 0])
    assert went == [("pages/blocks.py", {"lang": "zh", "mode": "workshop"})]


@pytest.mark.parametrize("go", [["nowhere", 0], ["swizzle", 99], ["swizzle"], "swizzle", None, ["swizzle", "0"]])
def test_what_is_no_page_leads_nowhere(monkeypatch, go):
    assert mounted(monkeypatch, "en", go=go)[1] == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_terms_elsewhere_lead_here(open_page, lang):
    at = open_page("e2m1", lang=lang)
    at.session_state["e2m1.terms.e2m1.tie.saturation.subnormal"] = True
    clean(at.run())
    assert any(link.proto.label == words(lang, "ui.all_terms") for link in at.get("page_link"))


@pytest.mark.parametrize("query", [{}, {"term": "swizzle"}], ids=str)
def test_the_code_shown_prints_the_term(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    term = query.get("term", glossary_terms.terms()[0])
    assert words("zh", f"glossary.{term}.text") in output
    assert f"explained on: {', '.join(glossary_terms.uses()[term].explained)}" in output


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
