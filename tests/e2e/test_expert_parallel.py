"""Expert parallel in a browser: every part fits a phone, passes axe, and ranks start, run and can be stopped."""

import pytest
from playwright.sync_api import expect

from nvfp4viz.figures.words import words
from nvfp4viz.ui.expert_parallel_parts import PARTS

from .conftest import LOOKS, overflow, settle, violations, widen

WAIT = 110_000  # four processes import torch on two cores


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/expert_parallel?lang={lang}&part={part}", width=390, theme=theme)
    assert overflow(page) <= 0
    for _ in range({"ranks": 1, "balance": 2, "moves": 1}.get(part, 0)):
        skip = page.get_by_role("button", name=words(lang, "ui.predict.skip"))
        answers = page.get_by_text(words(lang, "ui.predict.answer", answer="").strip("* "))
        shown = answers.count()
        skip.first.click()
        expect(answers).to_have_count(shown + 1)
        settle(page)
    widen(page)
    assert violations(page) == []


def test_ranks_run_and_their_bits_are_equal(visit):
    pytest.importorskip("torch")
    page = visit("/expert_parallel?lang=en&part=run")
    page.get_by_role("button", name="Start the ranks").click()
    expect(page.get_by_text("Bits equal.")).to_be_visible(timeout=WAIT)
    expect(page.get_by_role("button", name="Start the ranks")).to_be_enabled()


def test_ranks_can_be_stopped(visit):
    pytest.importorskip("torch")
    page = visit("/expert_parallel?lang=en&part=run&procs=4")
    page.get_by_role("button", name="Start the ranks").click()
    stop = page.get_by_role("button", name="Stop them")
    stop.wait_for(timeout=WAIT)
    stop.click()
    expect(page.get_by_text("Stopped; every process has ended.")).to_be_visible(timeout=WAIT)


def test_another_language_keeps_every_choice(visit):
    """Labels are longer in one language than in the other, and the widget must not change its kind for that."""
    chosen = """() => [...document.querySelectorAll('[data-testid=stMain] [role=radio][aria-checked=true]')].length"""
    for part in ("ranks", "time", "run"):
        page = visit(f"/expert_parallel?lang=en&part={part}")
        before = page.evaluate(chosen)
        page.get_by_role("radio", name="中文").click()
        page.wait_for_url(lambda url: "lang=zh" in url)
        settle(page)
        assert page.evaluate(chosen) == before > 1, part


def test_other_requests_land_in_the_link(visit):
    page = visit("/expert_parallel?lang=en&part=ranks&now=news")
    page.get_by_role("radio", name="recipes").or_(page.get_by_text("recipes", exact=True)).first.click()
    page.wait_for_url(lambda url: "now=recipes" in url)
