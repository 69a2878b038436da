"""The mega-kernel's page in a browser: it fits a phone, passes axe, and its maps answer pointer and keys at once."""

import pytest
from playwright.sync_api import expect

from nvfp4viz.figures.words import words
from nvfp4viz.ui.mega_kernel_parts import PARTS

from .conftest import LOOKS, overflow, skip_question, violations, widen


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/mega_kernel?lang={lang}&part={part}", width=390, theme=theme)
    assert overflow(page) <= 0
    if page.get_by_role("button", name=words(lang, "ui.predict.skip")).count():
        skip_question(page, lang)
    widen(page)
    assert violations(page) == []


def test_pointing_shows_the_other_place_and_the_gap(visit):
    page = visit("/mega_kernel?lang=en")
    status = page.locator(".map .status")
    expect(status).to_contain_text("Code 19 is")
    packed, padded = page.locator(".from svg"), page.locator(".to svg")
    box = packed.bounding_box()
    packed.hover(position={"x": box["width"] * 0.5 / 16, "y": box["height"] * 7.5 / 8})
    expect(status).to_contain_text("Code 112 is")
    box = padded.bounding_box()
    padded.hover(position={"x": box["width"] * 1.5 / 32, "y": box["height"] * 2.5 / 8})
    expect(status).to_contain_text("Code 33 is")
    padded.hover(position={"x": box["width"] * 20.5 / 32, "y": box["height"] * 2.5 / 8})
    expect(status).to_contain_text("A gap")
    page.mouse.move(0, 0)
    expect(status).to_contain_text("Code 19 is")  # looking chooses nothing


def test_keys_walk_through_the_codes_and_the_link_keeps_the_place(visit):
    page = visit("/mega_kernel?lang=en&k=0")
    panels, status = page.locator(".map .panels"), page.locator(".map .status")
    panels.focus()
    for key, code in (("ArrowRight", 1), ("ArrowDown", 17), ("ArrowLeft", 16), ("ArrowUp", 0), ("ArrowUp", 0)):
        panels.press(key)
        expect(status).to_contain_text(f"Code {code} is")
    panels.press("End")
    expect(status).to_contain_text("Code 127 is")
    page.wait_for_url(lambda url: "k=127" in url)


def test_a_refused_shape_says_why(visit):
    page = visit("/mega_kernel?lang=en")
    field = page.get_by_label("Codes a row (K)")
    field.fill("192")
    field.press("Enter")
    page.get_by_text("by the driver, for: codes a row").wait_for()


def test_the_step_is_walked_by_keys(visit):
    page = visit("/mega_kernel?lang=en&part=step&rule=1&slot=32")
    page.locator('.step[data-step="1"]').press("ArrowRight")
    expect(page.locator(".formula")).to_contain_text("c = 0x40520000")
    page.locator('.term[data-slot="32"]').press("ArrowRight")  # round to the first product
    expect(page.locator(".formula")).to_contain_text("a₀ = 0x38")
    page.wait_for_url(lambda url: "slot=0" in url or "slot" not in url)
