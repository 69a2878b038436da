"""Explorer and Fault lab in a browser: a cell picked by click and by keys, a corrupt upload, the sweep."""

import re

import pytest
from playwright.sync_api import expect

from .conftest import overflow, settle


def test_a_cell_picked_on_the_map_becomes_the_slot(visit):
    page = visit("/explorer?lang=en")
    field = page.get_by_role("application")
    field.wait_for()
    before = page.get_by_label("Expert", exact=True).input_value()
    field.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    settle(page)
    page.wait_for_function(
        "before => document.querySelector('input[aria-label=\"Expert\"]').value !== before", arg=before, timeout=30_000
    )
    by_keys = page.get_by_label("Expert", exact=True).input_value()
    canvas = page.locator("canvas").first
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.8, "y": box["height"] * 0.5})
    settle(page)
    page.wait_for_function(
        "before => document.querySelector('input[aria-label=\"Expert\"]').value !== before", arg=by_keys, timeout=30_000
    )
    assert re.search(r"expert=\d+", page.url)


def test_findings_alike_open_from_one_card(visit):
    page = visit("/explorer?lang=en")
    card = page.locator("[class*=st-key-card_explorer]")
    expect(card).to_have_count(1)
    expect(card.get_by_role("listitem")).to_have_count(0)
    card.get_by_text("Show each of the").click()
    settle(page)
    card.get_by_role("listitem").first.wait_for()
    assert card.get_by_role("listitem").count() > 3


@pytest.mark.parametrize("path", ["/explorer", "/fault_lab"])
@pytest.mark.parametrize("tab", [0, 1, 2])
def test_no_tab_scrolls_a_phone_sideways(visit, path, tab):
    """Wide tables scroll inside their own frame."""
    page = visit(f"{path}?lang=en", width=390)
    page.get_by_role("tab").nth(tab).click()
    settle(page)
    assert overflow(page) <= 0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        ("model.safetensors", b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        ("model.safetensors", b"", "is empty"),
        ("model.safetensors", (200_000_000).to_bytes(8, "little") + b"{}", "a header of 200,000,000 bytes"),
    ],
    ids=["lfs pointer", "web page", "empty", "header of 200 MB"],
)
def test_a_corrupt_upload_is_named_and_the_page_lives_on(visit, name, content, says):
    page = visit("/explorer?lang=en")
    page.get_by_text("Your own files").click()
    settle(page)
    upload = page.locator("input[type=file]")
    upload.set_input_files({"name": name, "mimeType": "application/octet-stream", "buffer": content})
    settle(page)
    page.get_by_text(re.compile(says, re.IGNORECASE)).first.wait_for()
    page.get_by_text("Shipped samples").click()
    settle(page)
    page.get_by_role("application").wait_for()


def test_the_sweep_runs_when_it_is_asked_for(visit):
    page = visit("/fault_lab?lang=en")
    page.set_default_timeout(120_000)
    page.get_by_role("tab", name="Sweep a factor").click()
    settle(page)
    page.get_by_text("Show me without a guess").click()
    settle(page)
    charts = page.locator(".js-plotly-plot").count()
    page.get_by_role("button", name=re.compile("^Run")).click()
    page.wait_for_function("n => document.querySelectorAll('.js-plotly-plot').length > n", arg=charts, timeout=120_000)


@pytest.mark.parametrize(
    ("lang", "between", "choose", "most", "larger"),
    [
        (
            "en",
            "The number must lie from 0 to 3.",
            "Choose files",
            "up to 64MB a file",
            "The file is larger than 64.0MB",
        ),
        ("zh", "这个数必须在 0 到 3 之间。", "选择文件", "每个文件不超过 64MB", "文件超过 64.0MB"),
    ],
)
def test_streamlit_s_own_words_are_in_the_reader_s_language(visit, tmp_path, lang, between, choose, most, larger):
    page = visit(f"/fault_lab?lang={lang}")
    layer = page.locator("[data-testid=stNumberInput] input").first
    layer.fill("99")
    layer.press("Enter")
    page.locator("[data-testid=stNumberInput] [role=alert]", has_text=between).wait_for(state="attached")
    page.locator(".stTooltipErrorHoverTarget").first.hover()
    page.get_by_role("tooltip").filter(has_text=between).wait_for()
    expect(page.get_by_role("tooltip")).not_to_contain_text("range")

    page = visit(f"/explorer?lang={lang}")
    samples = page.get_by_test_id("stSelectbox").first.locator("input")
    samples.click()
    samples.fill("zzzz")
    page.get_by_role("option", name={"en": "No results", "zh": "没有匹配的选项"}[lang]).wait_for()
    samples.press("Escape")

    page = visit(f"/explorer?lang={lang}")
    page.get_by_text(re.compile("^(Your own files|你自己的文件)$")).first.click()
    uploader = page.locator("[data-testid=stFileUploader]")
    uploader.get_by_text(choose, exact=True).wait_for()
    uploader.get_by_text(most).wait_for()
    big = tmp_path / "big.safetensors"
    with big.open("wb") as file:
        file.truncate(70 << 20)
    uploader.locator("input").set_input_files(big)
    uploader.get_by_text(larger).wait_for(state="attached")
    expect(uploader).not_to_contain_text("smaller")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_on_a_phone_the_settings_come_before_what_they_do(visit, lang):
    page = visit(f"/fault_lab?lang={lang}", width=390)
    fault = page.locator(".st-key-fault_lab_stage [data-testid=stSelectbox]").first.bounding_box()
    reply = page.locator(".st-key-fault_lab_stage .reply").first.bounding_box()
    assert fault["y"] < reply["y"]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_zone_of_the_gauge_is_named_inside_its_box(visit, lang, width):
    page = visit(f"/two_level_scaling?lang={lang}", width=width)
    # Read in one go: a drawing made anew in between would have other places.
    zones, words = page.locator(".gauge svg").evaluate(
        """svg => ['rect.zone', 'text:not(.tick)'].map(kind => [...svg.querySelectorAll(kind)].map(part => {
             const { x, width } = part.getBBox(); return [x, x + width]; }))"""
    )
    assert len(zones) == 4
    for start, end in zones:
        inside = [(left, right) for left, right in words if start <= (left + right) / 2 <= end]
        assert inside
        assert all(start <= left and right <= end for left, right in inside)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_explorer_s_cards_are_of_one_height(visit, lang):
    page = visit(f"/explorer?lang={lang}")
    heights = page.locator(".st-key-explorer_summary [data-testid=stMetric]").evaluate_all(
        "all => all.map(card => Math.round(card.getBoundingClientRect().height))"
    )
    assert len(heights) == 4
    assert len(set(heights)) == 1
