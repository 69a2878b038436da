"""MXFP4 and NVFP4 in a browser: every part fits a phone, passes axe, and answers a choice."""

import pytest

from nvfp4viz.ui.mxfp4_parts import PARTS

from .conftest import LOOKS, overflow, skip_question, violations, widen


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/mxfp4?lang={lang}&part={part}", width=390, theme=theme)
    assert overflow(page) <= 0
    if part in ("tensor", "rules"):
        skip_question(page, lang)
    widen(page)
    assert violations(page) == []


def test_another_rule_is_followed_and_lands_in_the_link(visit):
    page = visit("/mxfp4?lang=en&part=rules&top=7")
    page.get_by_role("button", name="Show me without a guess").click()
    page.get_by_text("it is clipped by ocp-floor.").wait_for()
    page.get_by_text("Storage", exact=True).click()
    page.wait_for_url(lambda url: "part=storage" in url)
    page.get_by_text("tiny-moe", exact=True).click()
    page.wait_for_url(lambda url: "stored=tiny_moe" in url)
