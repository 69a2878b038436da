"""The tensor-core lab: rules and terms by keyboard and pointer, presets, and the bits as drawn."""

import re

import pytest
from playwright.sync_api import expect

from nvfp4viz.figures import tensor_core as facts

from .conftest import overflow, settle

PATH = "/tensor_core?lang=en"


@pytest.fixture
def page(visit):
    page = visit(PATH)
    page.locator(".lab .chart rect.kept").first.wait_for()
    return page


def _digits(page, kind: str) -> int:
    return page.locator(f".lab .chart rect.{kind}").count()


def test_it_opens_on_the_last_rule_with_all_bits(page):
    expect(page.get_by_role("tab", name="7 Sum and cut")).to_have_attribute("aria-selected", "true")
    chart = facts.bit_chart(facts.explain(facts.DEFAULT).trace)
    assert _digits(page, "kept") == sum(len(row.kept) for row in chart.rows)
    assert _digits(page, "dropped") == sum(len(row.dropped) for row in chart.rows) > 0


def test_rules_are_walked_by_keyboard_and_linked(page):
    page.get_by_role("tab", name="7 Sum and cut").focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="3 Exact dots")).to_have_attribute("aria-selected", "true")
    page.get_by_text(re.compile(r"^d₃ = .* = −14\.5$")).wait_for()
    page.wait_for_url(re.compile(r"rule=3"))
    settle(page)
    expect(page.get_by_role("tab", name="3 Exact dots")).to_have_attribute("aria-selected", "true")


def test_terms_are_walked_by_keyboard_and_spoken(page):
    page.get_by_role("button", name=re.compile("^Dot 3:")).focus()
    page.keyboard.press("ArrowRight")
    page.locator(".lab .status", has_text="The accumulator: 138611.36").wait_for()
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.dataset.slot") == "4"
    page.wait_for_url(re.compile(r"slot=4"))


def test_a_preset_changes_the_picture(page):
    page.get_by_text("huge accumulator").click()
    page.locator(".lab .status", has_text="nothing is left").wait_for()
    settle(page)
    expect(page.get_by_text("farther from zero").first).to_be_visible()


def test_a_nan_scale_leaves_no_bits(page):
    page.get_by_text("NaN scale", exact=True).click()
    page.locator(".lab .chart figcaption", has_text="0x7FFFFFFF").wait_for()
    assert _digits(page, "kept") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_overflows_a_phone(visit, lang, theme):
    page = visit(f"/tensor_core?lang={lang}", width=390, theme=theme)
    page.locator(".lab .chart rect.kept").first.wait_for()
    assert overflow(page) <= 0
    assert page.locator(".lab").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
