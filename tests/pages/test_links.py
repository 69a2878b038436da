"""Links that ask for what is not there: each is named with the range that holds for what is open, on every page."""

import pytest

from nvfp4viz.figures.words import listed, words
from nvfp4viz.ui import i18n, state
from nvfp4viz.ui.registry import PAGES
from nvfp4viz.ui.state import CURSOR

from .conftest import clean, guessed, skipped, texts

LANGUAGES = ["en", "zh"]


def in_link(at, name: str) -> list[str]:
    """What the address bar says of a setting: nothing, or one value."""
    value = at.query_params.get(name, [])
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("page", "query", "named", "allowed"),
    [
        ("e2m1", {"code": "99"}, "code=99", "0 … 15"),
        ("e2m1", {"code": "-1"}, "code=-1", "0 … 15"),
        ("e2m1", {"format": "e4m3", "code": "256"}, "code=256", "0 … 255"),
        ("e2m1", {"format": "bf16", "code": "65536"}, "code=65536", "0 … 65535"),
        ("e2m1", {"codes": "12"}, "codes=12", "8 "),
        ("e2m1", {"layer": "x"}, "layer=x", "0, 1, 2 …"),
        ("two_level_scaling", {"x": ""}, "x=", "1.5,-2,0"),
        ("two_level_scaling", {"x": "1,2"}, "x=1,2", "16 "),
        ("two_level_scaling", {"scale": "two"}, "scale=two", "nan"),
        ("explorer", {"layer": "99"}, "layer=99", "0–3"),
        ("explorer", {"expert": "9999"}, "expert=9999", "0 … 63"),
        ("explorer", {"projection": "w2"}, "projection=w2", "gate, up, down"),
        ("explorer", {"checkpoint": "gemma4-skeleton", "layer": "30"}, "layer=30", "0–29"),
        ("explorer", {"checkpoint": "gemma4-skeleton", "expert": "128"}, "expert=128", "0 … 127"),
        ("explorer", {"checkpoint": "tiny-moe-bf16", "layer": "99"}, "layer=99", "0–3"),
        ("empty_answer", {"beat": "3", "layer": "99"}, "layer=99", "0 … 3"),
        ("empty_answer", {"beat": "3", "expert": "64"}, "expert=64", "0 … 63"),
        ("fault_lab", {"layer": "4"}, "layer=4", "0 … 3"),
        *((name, {"mode": "xx"}, "mode=xx", "reader, workshop") for name in ("empty_answer", "e2m1", "explorer")),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named_with_the_real_range(open_page, lang, page, query, named, allowed):
    at = open_page(page, lang=lang, **query)
    said = [caption.value for caption in at.caption if f"`{named}`" in caption.value]
    assert len(said) == 1
    assert listed(lang, allowed.split(", ")) in said[0]
    name, _, value = named.partition("=")
    assert value not in in_link(at, name)


UNKNOWN = "☃ no such value"
FREE = {"ask", "q"}
"""A reader's own words: any are theirs."""
MOST = str(2**31 - 1)
OPEN = {
    # What decides a range is open only here; elsewhere a page keeps such a value for later, in its address.
    "blocks": {"part": "error", "data": "checkpoint", "of": "other", "take": "window"},
    "e2m1": {"format": "e4m3"},
}


@pytest.fixture
def declared(monkeypatch):
    """The settings that a page declares, by page, once it has run."""
    found, open_view = {}, state.open_view

    def watch(page, **params):
        found[page] = dict(params)
        return open_view(page, **params)

    monkeypatch.setattr(state, "open_view", watch)
    return found


def said_of(at, name: str) -> bool:
    """Whether a note names what the link says of a setting."""
    return any(f"`{name}=" in caption.value for caption in at.caption)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("page", [entry.id for entry in PAGES])
def test_no_page_swallows_a_value_that_it_does_not_know(open_page, declared, page, lang):
    """Every setting that a page declares, all at once: each is named, and none stays in the address."""
    open_page(page)
    names = [name for name in declared[page] if name not in FREE]
    query = dict.fromkeys([*names, "mode", "nonsense"], UNKNOWN)
    at = open_page(page, lang=lang, **query)
    # A name of a tensor is known or not where its file is open, which is tried below.
    kept = {"tensor"} & set(names)
    assert [name for name in query if not said_of(at, name)] == sorted(kept)
    assert [name for name in query if in_link(at, name)] == sorted(kept)


def highest(param) -> str | None:
    """The highest number that a setting's own range has; None where it is no range."""
    _, between, high = str(param.allowed).partition(" … ")
    return high if between and high else None


@pytest.mark.parametrize("page", [entry.id for entry in PAGES])
def test_no_page_swallows_a_number_that_it_cannot_use(open_page, declared, page):
    """Named, or kept in the address for what may be opened later; never put aside without a word."""
    open_page(page)
    params = {name: param for name, param in declared[page].items() if name not in FREE}
    at = open_page(page, **dict.fromkeys(params, MOST))
    assert [name for name in params if not said_of(at, name) and in_link(at, name) != [MOST]] == []
    # Within its own range, and perhaps beyond what another setting or an open file leaves of it.
    ends = {name: highest(param) for name, param in params.items()}
    ends = {name: high for name, high in ends.items() if high is not None}
    at = open_page(page, **ends)
    put_aside = [
        name
        for name, high in ends.items()
        if not said_of(at, name) and params[name].parse(high) != at.session_state[key_of(page, name)]
    ]
    assert put_aside == []


def key_of(page: str, name: str) -> str:
    return name if name in CURSOR else f"{page}.{name}"


@pytest.mark.parametrize(("page", "opened"), OPEN.items(), ids=str)
def test_what_an_open_file_decides_is_named_once_it_is_open(open_page, declared, page, opened):
    """Also where a question stands before the widgets: its answer is another run, which knows of no link."""
    open_page(page)
    names = [name for name in declared[page] if name in ("stack", "row", "column", "code", "tensor")]
    at = open_page(page, **dict.fromkeys(names, MOST), **opened)
    assert [name for name in names if not said_of(at, name)] == []
    assert [name for name in names if in_link(at, name) == [MOST]] == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_matrix_beyond_a_stack_is_named_with_how_many_there_are(open_page, lang):
    stack = {"checkpoint": "tiny-moe-bf16", "tensor": "model.layers.0.experts.gate_up_proj"}
    at = open_page("blocks", lang=lang, **OPEN["blocks"], **stack, stack="64")
    said = [caption.value for caption in at.caption if "`stack=64`" in caption.value]
    assert len(said) == 1
    assert "0 … 63" in said[0]
    assert in_link(at, "stack") == []
    at = open_page("blocks", lang=lang, **OPEN["blocks"], **stack, stack="63")
    assert not said_of(at, "stack")
    at = skipped(at, "blocks.predict.best")
    assert at.number_input(key="blocks.stack").value == 63
    assert in_link(at, "stack") == ["63"]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("page", [entry.id for entry in PAGES])
def test_a_language_that_is_none_of_ours_is_named_on_every_page(open_page, monkeypatch, page, lang):
    """In the browser's language, which is used instead; and the note stays while the reader does."""
    monkeypatch.setattr(i18n, "_from_browser", lambda: lang)
    at = open_page(page, lang="xx")
    note = words(lang, "ui.link.unusable", what="`lang=xx`", allowed=listed(lang, ("en", "zh")))
    assert [caption.value for caption in at.caption].count(note) == 1
    assert in_link(at, "lang") == [lang]
    assert [caption.value for caption in clean(at.run()).caption].count(note) == 1


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("page", [entry.id for entry in PAGES])
def test_of_several_values_the_last_counts_and_every_page_says_so(open_page, page, lang):
    """Also of the language and the mode; the address then has one."""
    given = {
        "layer": ["1", "2"],
        "mode": ["workshop", "reader"],
        "lang": ["en", "zh"] if lang == "zh" else ["zh", "en"],
    }
    at = open_page(page, **given)
    said = [caption.value for caption in at.caption]
    for name, (first, last) in given.items():
        text = words(lang, "ui.link.several", name=f"`{name}`", values="{}", what=f"`{name}={last}`")
        note = text.format(listed(lang, (f"`{first}`", f"`{last}`")))
        assert said.count(note) == 1
        assert in_link(at, name) in ([], [last])
    assert at.session_state["layer"] == 2


@pytest.mark.parametrize("lang", LANGUAGES)
def test_of_several_languages_a_last_one_that_is_none_of_ours_is_named_too(open_page, monkeypatch, lang):
    monkeypatch.setattr(i18n, "_from_browser", lambda: lang)
    at = open_page("e2m1", lang=["en", "xx"])
    assert [text for text in (caption.value for caption in at.caption) if "`lang=xx`" in text] == [
        words(lang, "ui.link.several", name="`lang`", values=listed(lang, ("`en`", "`xx`")), what="`lang=xx`"),
        words(lang, "ui.link.unusable", what="`lang=xx`", allowed=listed(lang, ("en", "zh"))),
    ]
    assert in_link(at, "lang") == [lang]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_fits_is_taken_without_a_word(open_page, lang):
    for page, query in (
        ("e2m1", {"format": "e4m3", "code": "255"}),
        ("explorer", {"checkpoint": "gemma4-skeleton", "layer": "29", "expert": "127", "projection": "up"}),
        ("empty_answer", {"beat": "3", "layer": "3", "expert": "63", "mode": "workshop"}),
    ):
        at = open_page(page, lang=lang, **query)
        assert not [caption.value for caption in at.caption if "`code=" in caption.value or "`layer=" in caption.value]
        assert all(in_link(at, name) == [value] for name, value in query.items())


def test_another_checkpoint_moves_the_cursor_without_a_word(open_page):
    """The layer was in range of what was open before; no link is to blame."""
    at = open_page("explorer", checkpoint="gemma4-skeleton", layer="20", expert="100", projection="up")
    clean(at.selectbox(key="checkpoint").set_value("tiny-moe-nvfp4-holes").run())
    assert "layer=20" not in texts(at)
    assert at.session_state["layer"] < 4


def test_a_reader_who_comes_from_a_page_without_a_checkpoint_gets_the_default(open_page):
    at = open_page("e2m1")
    at.switch_page("pages/explorer.py")
    clean(at.run())
    assert at.selectbox(key="checkpoint").value == "tiny-moe-nvfp4-holes"


def test_the_cursor_goes_along_from_page_to_page(open_page):
    at = open_page("explorer", layer="2", expert="37", projection="down")
    at.switch_page("pages/fault_lab.py")
    clean(at.run())
    widgets = at.number_input(key="layer"), at.number_input(key="expert"), at.selectbox(key="projection")
    assert [widget.value for widget in widgets] == [2, 37, "down"]
    at.switch_page("pages/explorer.py")
    clean(at.run())
    widgets = at.selectbox(key="layer"), at.number_input(key="expert"), at.selectbox(key="projection")
    assert [widget.value for widget in widgets] == [2, 37, "down"]
    clean(at.selectbox(key="checkpoint").set_value("gemma4-skeleton").run())
    widgets = at.selectbox(key="layer"), at.number_input(key="expert"), at.selectbox(key="projection")
    assert [widget.value for widget in widgets] == [2, 37, "down"]


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("e2m1", {"x": "100", "format": "e4m3", "part": "cards"}),
        ("two_level_scaling", {"part": "headroom", "factor": "0.5", "scale": "nan"}),
        ("explorer", {"checkpoint": "gemma4-skeleton", "layer": "3", "expert": "7", "projection": "up"}),
        ("fault_lab", {"fault": "zero", "layer": "2", "expert": "7", "projection": "up", "prompt": "code"}),
        ("empty_answer", {"beat": "3", "prompt": "news", "layer": "3", "expert": "7"}),
    ],
    ids=str,
)
def test_a_page_can_be_started_over(open_page, page, query):
    fresh, at = open_page(page), open_page(page, **query)
    clean(at.button(key=f"{page}.reset").click().run())
    for name in query:
        key = name if name in CURSOR else f"{page}.{name}"
        assert at.session_state[key] == fresh.session_state[key], name


def test_starting_over_takes_back_a_guess(open_page):
    at = open_page("empty_answer", beat="2")
    guessed(at, "empty_answer.predict.which", "all")
    assert "predict.guess.empty_answer.predict.which" in at.session_state
    clean(at.button(key="empty_answer.reset").click().run())
    assert "predict.guess.empty_answer.predict.which" not in at.session_state


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_fault_of_a_pair_offers_pairs_alone(open_page, lang):
    at = open_page("fault_lab", lang=lang, fault="pair-mismatch")
    assert at.selectbox(key="projection").options == ["gate", "up"]
    assert "fault.pair" not in texts(at)
    at = open_page("fault_lab", lang=lang, fault="pair-mismatch", projection="down")
    assert any("`projection=down`" in caption.value for caption in at.caption)
    assert "fault.pair" not in texts(at)


def test_choosing_a_fault_of_a_pair_leads_to_no_error(open_page):
    at = open_page("fault_lab")
    assert at.selectbox(key="projection").value == "down"
    clean(at.selectbox(key="fault_lab.fault").set_value("pair-mismatch").run())
    assert at.selectbox(key="projection").value == "up"
    assert "fault.pair" not in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_missing_tensor_says_what_its_slot_reads_as(open_page, lang):
    at = open_page("fault_lab", lang=lang, fault="missing")
    assert f"**{words(lang, 'empty_answer.fates.zeros')}**" in texts(at)
