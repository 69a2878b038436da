"""What surrounds a page: cold deep links, language, the copied link, contrast, phone width, no word to the network."""

import io
import json
import re
import urllib.request
from collections import Counter
from urllib.parse import parse_qs, urlparse

import pytest
from PIL import Image
from playwright.sync_api import expect

from nvfp4viz.ui import blocks_parts, tensor_core_parts
from nvfp4viz.ui.registry import PAGES
from nvfp4viz.ui.scaling_parts import PARTS

from .conftest import LOOKS, overflow, settle, violations, widen

# Pages whose own file looks at each of their parts.
ELSEWHERE = {
    "loading", "online_quantisation", "expert_parallel", "mega_kernel", "fusion", "routing", "backends", "mxfp4",
}  # fmt: skip
PATHS = [
    *("/" if entry.default else f"/{entry.id}" for entry in PAGES if entry.id not in ELSEWHERE),
    *(f"/e2m1?part={part}" for part in ("packing", "cards")),
    *(f"/two_level_scaling?part={part}" for part in PARTS[1:]),
    *(f"/blocks?part={part}" for part in blocks_parts.PARTS[1:]),
    *(f"/tensor_core?part={part}" for part in tensor_core_parts.PARTS[1:]),
]


def with_language(path: str, language: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}lang={language}"


def query(page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}


def test_a_deep_link_opens_on_a_server_that_has_just_started(visit, new_server):
    page = visit("/e2m1?lang=zh&x=5.5", at=new_server)
    expect(page.get_by_role("heading", level=1)).to_have_text("E2M1")
    expect(page.get_by_role("link", name="两级缩放")).to_be_visible()  # our menu, in the link's language
    expect(page.get_by_label("你的数", exact=True)).to_have_value("5.5")
    assert query(page) == {"lang": "zh", "x": "5.5"}


def test_a_first_visit_by_a_link_with_a_bad_language_says_so(visit, new_server):
    """A server that has just started runs the page's file alone at first; the note outlives that run."""
    page = visit("/mxfp4?lang=xx&layer=99", at=new_server, locale="zh-CN")
    for said in ("lang=xx", "layer=99"):
        expect(page.get_by_text(said)).to_be_visible()
    expect(page.get_by_role("link", name="两级缩放")).to_be_visible()
    assert query(page) == {"lang": "zh"}


def test_the_default_page_lives_at_the_root(visit):
    page = visit("/")
    expect(page.get_by_text("Page not found")).to_have_count(0)
    assert urlparse(page.url).path == "/"


def test_no_page_that_frames_the_app_may_steer_it(server):
    with urllib.request.urlopen(f"{server.url}/_stcore/host-config", timeout=10) as answer:
        assert json.load(answer)["allowedOrigins"] == []


def test_the_browser_s_language_is_the_first_choice(visit):
    page = visit("/e2m1", locale="zh-CN")
    assert query(page)["lang"] == "zh"
    page.get_by_label("你的数", exact=True).wait_for()


def test_switching_the_language_keeps_the_view(visit):
    page = visit("/e2m1?lang=en&x=5.5&format=e4m3")
    page.get_by_role("radio", name="中文").click()
    page.wait_for_url(re.compile("lang=zh"))
    settle(page)
    expect(page.get_by_label("你的数", exact=True)).to_have_value("5.5")
    assert query(page) == {"lang": "zh", "x": "5.5", "format": "e4m3"}


@pytest.mark.parametrize(
    ("path", "english", "chinese"),
    [
        ("/dataflow", "Arithmetic", "算术"),
        ("/fault_lab", "Arithmetic", "算术"),
        ("/routing", "arithmetic", "算术"),
        ("/routing?part=routers", "spread out", "高低不一"),
        ("/explorer", "no particular one", "不指定"),
    ],
)
def test_choices_are_named_in_the_reader_s_language_however_often_it_changes(visit, path, english, chinese):
    """The browser knows a choice by its name; one in another language would be no choice at all."""
    page = visit(with_language(path, "en"))
    boxes = page.locator("[data-testid=stSelectbox] input")

    def shown(name):
        page.wait_for_function("name => [...document.querySelectorAll('[data-testid=stSelectbox] input')]"
                               ".some(box => box.value === name)", arg=name)  # fmt: skip
        settle(page)

    shown(english)
    count = boxes.count()
    for language, name in (("中文", chinese), ("English", english), ("中文", chinese)):
        page.get_by_role("radio", name=language).click()
        shown(name)
        assert boxes.count() == count
    # Also of a page that the reader was not looking at.
    page.get_by_role("link", name="术语表").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("术语表")
    page.get_by_role("radio", name="English").click()
    page.locator(f"[data-testid=stSidebar] a[href$='{path.partition('?')[0]}']").click()
    shown(english)


def test_a_copied_link_restores_the_view(visit):
    page = visit("/e2m1?lang=en")
    page.get_by_label("Your number", exact=True).fill("-3.25")
    page.wait_for_url(re.compile(r"x=-3\.25"))
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Copied.").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    page.get_by_label("Your number", exact=True).fill("2")
    expect(page.get_by_text("Copied.")).to_have_count(0)  # what was copied is no longer what is shown
    again = visit(link.removeprefix(page.url.split("/e2m1")[0]))
    expect(again.get_by_label("Your number", exact=True)).to_have_value("−3.25")
    expect(again.get_by_label("Code", exact=True)).to_have_value("0xD")


def test_a_bad_link_is_named_and_mended(visit):
    page = visit("/e2m1?lang=en&format=int4&layer=-1&nonsense=1")
    expect(page.get_by_text("format=int4")).to_be_visible()
    expect(page.get_by_text("layer=-1")).to_be_visible()
    expect(page.get_by_text("nonsense=1")).to_be_visible()
    assert query(page) == {"lang": "en"}


def test_back_undoes_one_step_at_a_time(visit):
    """A reader's step is one entry in the browser's history, on a page and from page to page."""
    page = visit("/e2m1")
    said = page.get_by_label("Your number", exact=True)
    page.get_by_role("button", name="too large").click()
    page.wait_for_url(re.compile("x=100"))
    settle(page)
    page.get_by_role("link", name="Explorer").click()
    page.wait_for_url(re.compile("/explorer.*layer="))
    settle(page)
    page.get_by_role("link", name="Fault lab").click()
    page.wait_for_url(re.compile("/fault_lab.*role="))
    settle(page)
    page.go_back()
    page.get_by_role("heading", level=1, name="Explorer").wait_for()
    settle(page)
    page.go_back()
    page.get_by_role("heading", level=1, name="E2M1").wait_for()
    settle(page)
    assert query(page)["x"] == "100"
    expect(said).to_have_value("100")
    page.go_back()
    page.wait_for_url(lambda url: "x=" not in url)
    settle(page)
    expect(said).to_have_value("2.5")
    assert query(page) == {"lang": "en"}
    page.go_forward()
    page.wait_for_url(re.compile("x=100"))
    settle(page)
    expect(said).to_have_value("100")


@LOOKS
@pytest.mark.parametrize("path", PATHS)
def test_a_page_fits_a_phone_and_passes_axe(visit, path, lang, theme):
    page = visit(with_language(path, lang), width=390, theme=theme)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    # Streamlit scrolls inside a container, so the document alone would not tell.
    assert overflow(page) == 0
    widen(page)
    assert violations(page) == []


def test_a_table_wider_than_a_phone_says_so(visit):
    """A shade on the side where more is to be had, gone where there is none."""
    page = visit("/expert_parallel?lang=zh&part=moves", width=390)
    page.wait_for_function(f"() => {{ const box = {WIDE}; return box && box.scrollWidth > box.clientWidth + 16 }}")
    left, right = edges(page)
    assert left == PAGE_COLOUR
    assert right != PAGE_COLOUR
    page.evaluate(f"() => {{ const box = {WIDE}; box.scrollLeft = box.scrollWidth }}")
    left, right = edges(page)
    assert left != PAGE_COLOUR
    assert right == PAGE_COLOUR


PAGE_COLOUR = (255, 255, 255)
WIDE = "document.querySelector('[class*=st-key-table]')"


def edges(page):
    """The colour two pixels inside the table's frame at the left and the right, where no line of the table runs."""
    page.wait_for_timeout(100)  # the scroll is painted with the next frame
    box = page.locator("[class*=st-key-table]").first.bounding_box()
    picture = Image.open(io.BytesIO(page.screenshot(clip=box))).convert("RGB")
    # The most frequent colour of the column: words and lines cross it here and there.
    columns = ([picture.getpixel((x, y)) for y in range(picture.height)] for x in (3, picture.width - 4))
    return tuple(Counter(column).most_common(1)[0][0] for column in columns)
