"""Backends in a browser: every part fits a phone, passes axe, and answers a choice."""

import pytest

from nvfp4viz.ui.backends_parts import PARTS

from .conftest import LOOKS, overflow, settle, skip_question, violations, widen


@LOOKS
@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, part):
    page = visit(f"/backends?lang={lang}&part={part}&gpu=sm_90&pick=cutlass&lpick=triton", width=390, theme=theme)
    assert overflow(page) <= 0
    if part != "remedies":  # there the question comes after the runs
        assert violations(page) == []
    skip_question(page, lang)
    assert overflow(page) <= 0
    widen(page)
    assert violations(page) == []


def test_another_gpu_changes_the_winner_and_the_link(visit):
    page = visit("/backends?lang=en&gpu=sm_120")
    assert page.locator(".ladder .asked").count() > page.locator(".ladder .wins").count() == 0
    skip_question(page)
    page.locator(".ladder .wins", has_text="FLASHINFER_CUTLASS").wait_for()
    box = page.get_by_role("combobox", name="GPU")
    box.scroll_into_view_if_needed()
    settle(page)  # a page that still scrolls closes the list
    box.click()
    page.get_by_role("option", name="sm_110").click()
    page.locator(".ladder .wins", has_text="VLLM_CUTLASS").wait_for()
    page.wait_for_url(lambda url: "gpu=sm_110" in url)


# Flags, and replies that begin with a blank, that would fit a line and stand on two.
TORN = """() => [...document.querySelectorAll('[data-testid=stMarkdownContainer] :is(p, li) > code')]
  .filter(code => {
    const size = parseFloat(getComputedStyle(code).fontSize);
    const torn = code.getClientRects().length > 1 || code.offsetHeight > 1.9 * size;
    const fits = code.textContent.length * 0.62 * size < code.parentElement.clientWidth - 16;
    return torn && fits && /^(--| )/.test(code.textContent);
  }).map(code => code.textContent)"""


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    "path", ["backends?part=linear", "backends?part=moe", "online_quantisation?part=token", "loading?b=vllm-cutlass"]
)
def test_a_phone_does_not_tear_a_flag_behind_its_hyphens(visit, lang, path):
    page = visit(f"/{path}&lang={lang}", width=390)
    assert page.evaluate(TORN) == []
    skip_question(page, lang)
    assert page.locator("p > code").count() > 1
    assert page.evaluate(TORN) == []
