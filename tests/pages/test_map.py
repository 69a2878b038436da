"""The map as a reader in either language meets it, and that every page and every link on it exists."""

import runpy

import pytest

from nvfp4viz.figures import places
from nvfp4viz.figures.words import words
from nvfp4viz.ui import lesson, lesson_map, map_parts, shell, state
from nvfp4viz.ui.registry import PAGES, ROOT, entry_of

from .conftest import clean, shown_code_output, texts

PAGE = "map"
LANGUAGES = ["en", "zh"]


def test_every_page_is_on_the_map_and_nothing_else():
    assert {entry.id for entry in PAGES} - {PAGE} == set(places.LESSONS)


class _Declared(Exception):
    """The page has told its settings; no need to draw it."""


def settings_of(page_id: str, monkeypatch) -> dict[str, state.Param]:
    """The settings that a page declares, without drawing it."""
    found: dict[str, state.Param] = {}

    def declare(_: str, **params: state.Param) -> None:
        found.update(params)
        raise _Declared

    monkeypatch.setattr(lesson, "open_page", declare)
    monkeypatch.setattr(shell, "ensure_shell", lambda: None)
    with pytest.raises(_Declared):
        runpy.run_path(str(ROOT / entry_of(page_id).script))
    return found


@pytest.mark.parametrize("page", sorted(places.LESSONS))
def test_every_link_opens_a_view_that_its_page_has(monkeypatch, page):
    declared = settings_of(page, monkeypatch)
    for stop in places.LESSONS[page]:
        for name, value in stop.query.items():
            param = declared[name]
            assert param.write(param.parse(value)) == value
            assert param.parse(value) != param.default, "a link need not say what the page does anyway"


def test_no_two_links_of_a_place_are_the_same():
    """A chosen lesson is named by its place among all links; equal ones may stand at several stations."""
    for station in places.STATIONS:
        found = places.lessons_at(station.id)
        assert len({(page, tuple(query.items())) for page, query in found}) == len(found)


def mounted(monkeypatch, language: str, path: str, chosen: int | None = None, **query: str):
    """What the component is given, and where a chosen link leads."""
    given, went = {}, []
    monkeypatch.setattr("nvfp4viz.ui.registry.lang", lambda: language)
    monkeypatch.setattr(lesson_map, "lang", lambda: language)
    monkeypatch.setattr(lesson_map, "t", lambda key, **values: words(language, key, **values))
    monkeypatch.setattr(lesson_map.st, "query_params", query)
    monkeypatch.setattr(lesson_map.st, "switch_page", lambda script, query_params: went.append((script, query_params)))
    monkeypatch.setattr(lesson_map, "_COMPONENT", lambda **kwargs: given.update(kwargs["data"]) or {"go": chosen})
    lesson_map.lesson_map(places.PATHS[path])
    return given, went


@pytest.mark.parametrize("language", LANGUAGES)
def test_links_keep_language_and_mode(monkeypatch, language):
    given, went = mounted(monkeypatch, language, "numerics", mode="workshop")
    links = [link for band in given["bands"] for link in band["whole"]]
    links += [link for band in given["bands"] for station in band["stations"] for link in station["lessons"]]
    links += given["everywhere"]
    assert len(links) == len(places.place_rows())
    assert all(f"?lang={language}&mode=workshop" in link["href"] for link in links)
    assert {link["href"].split("?")[0] for link in links} == {
        "./" if entry.default else entry.id for entry in PAGES if entry.id != PAGE
    }
    numbers = {link["label"]: link["step"] for link in links if link["step"]}
    order = [words(language, f"{page}.title") for page in places.PATHS["numerics"]]
    assert sorted(numbers, key=numbers.__getitem__) == order
    assert not went


def test_a_chosen_lesson_opens_in_this_session_on_its_view(monkeypatch):
    chosen = lesson_map.links().index(("blocks", {"part": "swizzle"}))
    _, went = mounted(monkeypatch, "zh", "first", chosen, mode="workshop")
    assert went == [("pages/blocks.py", {"lang": "zh", "mode": "workshop", "part": "swizzle"})]


@pytest.mark.parametrize("chosen", [-1, 10_000, "blocks", None])
def test_what_is_no_link_leads_nowhere(monkeypatch, chosen):
    assert mounted(monkeypatch, "en", "first", chosen)[1] == []


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("path", places.PATHS)
def test_every_way_opens_by_link(open_page, lang, path):
    at = open_page(PAGE, lang=lang, path=path)
    assert at.title[0].value == words(lang, "map.title")
    for number, page in enumerate(places.PATHS[path], 1):
        assert words(lang, f"{page}.aim") in texts(at), number


def test_it_says_what_the_lines_show(open_page):
    said = texts(open_page(PAGE))
    assert "Of the layer's 10 steps, 2 hand four-bit codes on: 2 stretches" in said


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_bad_way_is_named(open_page, lang):
    assert "`path=nowhere`" in texts(open_page(PAGE, lang=lang, path="nowhere"))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_is_left_out_is_told(open_page, lang):
    said = texts(open_page(PAGE, lang=lang))
    for name in map_parts.LEFT_OUT:
        assert words(lang, f"map.left_out.{name}.relates") in said


def test_the_code_shown_prints_the_map(open_page):
    output = shown_code_output(open_page(PAGE, path="breaking"), PAGE)
    assert "layer: 2 stretch(es) in four bits" in output
    assert output.endswith(" > ".join(places.PATHS["breaking"]))


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
