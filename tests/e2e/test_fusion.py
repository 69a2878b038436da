"""Fusion in a browser: every part fits a phone, passes axe, and answers a choice."""

import pytest
from playwright.sync_api import expect

from nvfp4viz.ui.fusion_parts import PARTS

from .conftest import LOOKS, overflow, skip_question, violations, widen

ASKING = ("qkv", "deltanet", "scale", "kinds")


def reveal(page, part, lang="en"):
    """Past the question, if the part has one."""
    if part in ASKING:
        skip_question(page, lang)


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/fusion?lang={lang}&part={part}&tp=16", width=390, theme=theme)
    reveal(page, part, lang)
    assert overflow(page) <= 0
    widen(page)
    assert violations(page) == []


# Cells whose text has fewer than four characters a line on three lines or more: [text, characters, lines].
SQUEEZED = """() => [...document.querySelectorAll('[class*="st-key-table"] :is(td, th)')].map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const tops = [...range.getClientRects()].map(box => Math.round(box.bottom / 8));
  return [cell.textContent, [...cell.textContent].length, new Set(tops).size];
}).filter(([, characters, lines]) => lines > 2 && characters / lines < 4)"""


@pytest.mark.parametrize("path", ["/fusion?part=kinds", "/mxfp4?part=tensor"])
def test_a_phone_leaves_chinese_tables_words_to_read(visit, path):
    """Of all pages: the rule is the shell's."""
    page = visit(f"{path}&lang=zh", width=390)
    if path.startswith("/fusion"):
        reveal(page, "kinds", "zh")
    page.wait_for_selector('[class*="st-key-table"] td')
    assert page.evaluate(SQUEEZED) == []


def test_ranks_and_rows_are_reached_by_keys_and_land_in_the_link(visit):
    page = visit("/fusion?lang=en&attn=qwen3_235b")
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: "tp=8" in url)
    expect(page.get_by_text("Each head of k, v lies on 2 ranks")).to_be_visible()
    rank = page.get_by_role("spinbutton", name="Follow rank")
    rank.fill("5")
    rank.press("Enter")
    page.wait_for_url(lambda url: "rank=5" in url)
    expect(page.get_by_text("Held by rank 4, 5.")).to_be_visible()


def test_an_impossible_split_says_why(visit):
    page = visit("/fusion?lang=en&attn=tiny_moe&tp=8")
    expect(page.get_by_text("Part q (heads or rows: 4) cannot be shared out to 8 ranks.")).to_be_visible()


OUTSIDE = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const frame = plot.querySelector('svg.main-svg').getBoundingClientRect();
  return [...plot.querySelectorAll('text.bartext')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left || box.right > frame.right;
  }).map(text => text.textContent);
})"""


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("query", ["what=mlp&layer=2&stretch=4096", "what=qkv&stretch=262144", "what=expert&stretch=1"])
def test_a_phone_has_room_for_the_numbers_beside_the_bars(visit, lang, query):
    page = visit(f"/fusion?lang={lang}&part=scale&{query}", width=390)
    reveal(page, "scale", lang)
    page.wait_for_selector("text.bartext")
    assert page.evaluate(OUTSIDE) == []
