"""What is said when a link has been copied: what it opens, and what it leaves out."""

from urllib.parse import parse_qsl

import pytest

from nvfp4viz.figures.words import words
from nvfp4viz.ui import explorer_open, i18n, lesson
from sample_checkpoints import ensure

from .conftest import clean, skipped, tab, texts

HOLES, FULL = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"
ASKED = "The question that you have answered here comes first again."
LEFT_OUT = words("en", "ui.copy.no_source")
WRITTEN = "What you have written into the editors is not in the link."


@pytest.fixture
def said(monkeypatch):
    """Both sentences of the button under the page that was drawn last: after copying, and where a browser refuses."""
    last = {}
    real = lesson._COPY_LINK

    def heard(*, data, **more):
        last.update({name: data[name] for name in ("copied", "byHand", "leftOut")})
        last["link"] = dict(parse_qsl(data["query"]))
        return real(data=data, **more)

    monkeypatch.setattr(lesson, "_COPY_LINK", heard)
    return last


def test_before_a_question_the_link_opens_what_is_set(open_page, said):
    open_page("fusion", part="scale")
    assert said["copied"] == "Copied. The link opens this page with these settings."
    assert said["byHand"].endswith(said["copied"].removeprefix("Copied. "))


@pytest.mark.parametrize(
    ("page", "query", "question"),
    [
        ("fusion", {"part": "scale"}, "fusion.predict.maximum"),
        ("fusion", {"part": "kinds"}, "fusion.predict.bits"),
        ("blocks", {"part": "error"}, "blocks.predict.best"),
        ("routing", {"part": "routers"}, "routing.predict.nan"),
    ],
    ids=str,
)
def test_an_answer_is_not_in_the_link(open_page, said, page, query, question):
    at = open_page(page, **query)
    assert ASKED not in said["copied"]
    skipped(at, question)
    assert said["copied"].endswith(ASKED)
    assert said["byHand"].endswith(ASKED)
    # Where no question was answered on what is open now, none is promised.
    at.session_state[f"{page}.part"] = {"fusion": "unchanged", "blocks": "shapes", "routing": "run"}[page]
    clean(at.run())
    assert ASKED not in said["copied"]


@pytest.mark.parametrize(("page", "index", "name"), [("explorer", 2, "backends"), ("fault_lab", 1, "audit")])
def test_the_open_tab_is_in_the_link(open_page, said, page, index, name):
    at = open_page(page)
    assert "tab" not in said["link"]
    labels = [item.label for item in at.tabs]
    tab(at, page, index)
    assert said["link"]["tab"] == name
    other = open_page(page, **said["link"])
    assert other.session_state[f"{page}.tabs"] == labels[index]
    tab(other, page, 0)
    assert "tab" not in said["link"]
    # Back: the address of before.
    other.query_params["tab"] = name
    clean(other.run())
    assert other.session_state[f"{page}.tabs"] == labels[index]


def test_it_is_said_in_chinese(open_page, said):
    skipped(open_page("fusion", lang="zh", part="scale"), "fusion.predict.maximum")
    assert said["copied"] == "已复制。打开链接，本页的设置与现在相同。不过这里回答过的问题会先再问一次。"


def give(at, sample: str, place: str = "explorer"):
    """Hand the page a sample's files as the reader's own."""
    clean(at.button_group(key=f"{place}.source").set_value("upload").run())
    for path in sorted(ensure(sample).iterdir()):
        at.file_uploader(key=f"{place}.files").upload(path.name, path.read_bytes())
    return clean(at.run())


def told(lang: str, sample: str, *, waits: bool) -> str:
    """What stands where a sample is shown in place of what the link's maker saw."""
    more = words(lang, "ui.own.slot_waits") if waits else ""
    return words(lang, "ui.own.told", sample=words(lang, f"samples.{sample}"), waits=more)


def slot(at) -> tuple:
    return tuple(at.session_state[name] for name in ("layer", "expert", "projection"))


def test_an_uploaded_checkpoint_is_not_in_the_link(open_page, said):
    at = open_page("explorer")
    assert LEFT_OUT not in said["copied"]
    assert "origin" not in said["link"]
    give(at, HOLES)
    assert said["copied"].endswith(LEFT_OUT)
    assert said["leftOut"] == LEFT_OUT  # beside the button before it is pressed
    assert said["link"]["origin"] == "own"
    # And not where a sample is shown again.
    clean(at.button_group(key="explorer.source").set_value("sample").run())
    assert said["leftOut"] == ""
    assert "origin" not in said["link"]
    assert told("en", HOLES, waits=False) not in texts(at)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_who_opens_such_a_link_is_told_that_a_sample_stands_there(open_page, said, lang, monkeypatch):
    """Without a complaint about a slot that is another checkpoint's; the slot waits for that checkpoint."""
    fresh = slot(open_page("explorer"))
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats the choices after the run, without a session
    link = {"origin": "own", "layer": "3", "expert": "63", "projection": "down"}
    at = open_page("explorer", lang=lang, **link | {"layer": "41", "expert": "300"})
    assert told(lang, HOLES, waits=True) in texts(at)
    assert "41" not in texts(at)
    assert slot(at) == fresh
    assert said["leftOut"] == ""
    # Nothing was chosen yet: who opens this page's link in turn is told as well, and no slot waits there.
    again = open_page("explorer", **said["link"])
    assert told(lang, HOLES, waits=False) in texts(again)
    at = open_page("explorer", lang=lang, **link)
    assert said["link"]["origin"] == "gone"
    clean(at.run())
    assert told(lang, HOLES, waits=True) in texts(at)
    give(at, FULL)
    assert slot(at) == (3, 63, "down")
    assert said["link"] == {"lang": lang, **link}


def test_choosing_a_sample_ends_it(open_page, said):
    at = open_page("explorer", origin="own", layer="2", expert="5", projection="up")
    clean(at.selectbox(key="checkpoint").set_value(FULL).run())
    assert told("en", FULL, waits=True) not in texts(at)
    assert "origin" not in said["link"]
    give(at, HOLES)
    assert slot(at) != (2, 5, "up")


def test_the_second_checkpoint_is_marked_too(open_page, said):
    compare = 5
    at = give(tab(open_page("explorer"), "explorer", compare), FULL, "explorer.other")
    assert said["link"]["other_origin"] == "own"
    assert "origin" not in said["link"]
    assert said["leftOut"] == LEFT_OUT
    other = open_page("explorer", other_origin="own")
    assert told("en", FULL, waits=False) not in texts(other)  # of a tab that is closed
    assert said["leftOut"] == ""
    assert told("en", FULL, waits=False) in texts(tab(other, "explorer", compare))
    clean(at.button_group(key="explorer.other.source").set_value("sample").run())
    assert "other_origin" not in said["link"]


def test_blocks_say_so_only_where_it_is_shown(open_page, said):
    at = open_page("blocks", part="error", data="checkpoint")
    assert LEFT_OUT not in said["copied"]
    at.session_state["explorer.now"] = explorer_open.open_folder(ensure("tiny-moe-bf16"), "upload")
    clean(at.run())
    assert LEFT_OUT in said["copied"]
    assert said["link"]["origin"] == "own"
    at.session_state["blocks.part"] = "shapes"
    clean(at.run())
    assert LEFT_OUT not in said["copied"]
    assert "origin" not in said["link"]


def test_blocks_tell_who_opens_it(open_page, said):
    link = {"origin": "own", "part": "error", "data": "checkpoint", "of": "other", "tensor": "a.b", "layer": "41"}
    at = open_page("blocks", **link)
    skipped(at, "blocks.predict.best")
    assert told("en", HOLES, waits=True) in texts(at)
    assert "a.b" not in texts(at)
    assert "cannot be used" not in texts(at)
    clean(at.selectbox(key="checkpoint").set_value(FULL).run())
    assert told("en", FULL, waits=True) not in texts(at)


def test_what_stands_in_the_editors_is_not_in_the_link(open_page, said):
    at = skipped(open_page("loading", part="promotion"), "loading.predict.promotion")
    assert WRITTEN not in said["copied"]
    clean(at.text_area(key="loading.text.config").set_value("{}").run())
    assert WRITTEN in said["copied"]
