"""The routing page in a browser: every part fits a phone, passes axe, and answers a choice."""

import pytest
from playwright.sync_api import expect

from nvfp4viz.ui.routing_parts import PARTS

from .conftest import LOOKS, overflow, skip_question, violations, widen


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/routing?lang={lang}&part={part}", width=390, theme=theme)
    assert overflow(page) <= 0
    if part in ("map", "planner", "routers"):
        skip_question(page, lang)
    widen(page)
    assert violations(page) == []


def test_the_slider_closes_holes_by_keyboard_and_lands_in_the_link(visit):
    page = visit("/routing?lang=en&part=calibration&n=1")
    expect(page.get_by_text("have no token after 1 document")).to_be_visible()
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: "n=2" in url)
    expect(page.get_by_text("have no token after 2 documents")).to_be_visible()


def test_what_came_is_revealed_after_the_prediction(visit):
    page = visit("/routing?lang=en&part=planner")
    page.get_by_role("button", name="Show me without a guess").click()
    expect(page.get_by_text("slots will still be unseen")).to_be_visible()
    page.get_by_text("Show what came").click()
    page.wait_for_url(lambda url: "came=1" in url)
    expect(page.get_by_text("It came to")).to_be_visible()
    expect(page.get_by_text("held-out runs")).to_be_visible()
