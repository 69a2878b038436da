"""What is said when a link has been copied: what it opens, and what it leaves out."""

import pytest

from nvfp4viz.figures.words import words
from nvfp4viz.ui import explorer_open, lesson
from sample_checkpoints import ensure

from .conftest import clean, skipped

ASKED = "The question that you have answered here comes first again."
LEFT_OUT = words("en", "ui.copy.no_source")
WRITTEN = "What you have written into the editors is not in the link."


@pytest.fixture
def said(monkeypatch):
    """Both sentences of the button under the page that was drawn last: after copying, and where a browser refuses."""
    last = {}
    real = lesson._COPY_LINK

    def heard(*, data, **more):
        last.update({name: data[name] for name in ("copied", "byHand")})
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


def test_it_is_said_in_chinese(open_page, said):
    skipped(open_page("fusion", lang="zh", part="scale"), "fusion.predict.maximum")
    assert said["copied"] == "已复制。打开链接，本页的设置与现在相同。不过这里回答过的问题会先再问一次。"


def test_an_uploaded_checkpoint_is_not_in_the_link(open_page, said):
    at = open_page("explorer")
    assert LEFT_OUT not in said["copied"]
    clean(at.button_group(key="explorer.source").set_value("upload").run())
    for path in sorted(ensure("tiny-moe-nvfp4-holes").iterdir()):
        at.file_uploader(key="explorer.files").upload(path.name, path.read_bytes())
    clean(at.run())
    assert said["copied"].endswith(LEFT_OUT)


def test_blocks_say_so_only_where_it_is_shown(open_page, said):
    at = open_page("blocks", part="error", data="checkpoint")
    assert LEFT_OUT not in said["copied"]
    at.session_state["explorer.now"] = explorer_open.open_folder(ensure("tiny-moe-bf16"), "upload")
    clean(at.run())
    assert LEFT_OUT in said["copied"]
    at.session_state["blocks.part"] = "shapes"
    clean(at.run())
    assert LEFT_OUT not in said["copied"]


def test_what_stands_in_the_editors_is_not_in_the_link(open_page, said):
    at = skipped(open_page("loading", part="promotion"), "loading.predict.promotion")
    assert WRITTEN not in said["copied"]
    clean(at.text_area(key="loading.text.config").set_value("{}").run())
    assert WRITTEN in said["copied"]
