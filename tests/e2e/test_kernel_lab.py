"""The Kernel lab in a browser: source beside machine code, the letter of a target, and the CPU's self-test."""

import re

import pytest
from playwright.sync_api import expect

from .conftest import overflow, settle


def test_another_target_changes_line_instruction_and_link(visit):
    page = visit("/kernel_lab?lang=en")
    machine = page.locator(".kernel-lab .machine")
    machine.get_by_text(re.compile("F2FP.SATFINITE.E2M1")).first.wait_for()
    expect(page.locator(".kernel-lab .line.on.hit").first).to_be_attached()
    page.get_by_role("radio", name=re.compile("sm_90$")).click()
    page.wait_for_function("location.search.includes('target=sm_90')")
    settle(page)
    machine.get_by_text(re.compile("^sm_90: ")).wait_for()
    expect(machine.get_by_text(re.compile("F2FP.SATFINITE.E2M1"))).to_have_count(0)
    expect(page.locator(".kernel-lab .line.off.hit").first).to_be_attached()


def test_the_reveal_brings_the_plain_targets(visit):
    page = visit("/kernel_lab?lang=en")
    plain = page.get_by_role("radio", name=re.compile("sm_100$"))
    expect(plain).to_have_count(0)
    page.get_by_text("Show me without a guess").click()
    plain.wait_for()
    plain.click()
    page.wait_for_function("location.search.includes('target=sm_100')")
    page.get_by_text("without its letter").first.wait_for()


def test_long_lines_are_reached_by_keyboard(visit):
    """A source line is wider than its frame: the frame scrolls, has the focus, and a name."""
    page = visit("/kernel_lab?lang=en", width=390)
    source = page.locator(".kernel-lab pre").first
    source.focus()
    assert source.evaluate("e => e === document.activeElement && e.getAttribute('aria-label') !== ''")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.kernel-lab pre').scrollLeft > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_selftest_of_a_cpu_runs_and_leaves_a_report(visit, theme):
    page = visit("/kernel_lab?lang=en&part=selftest", theme=theme)
    page.set_default_timeout(120_000)
    page.get_by_role("button", name="Run the CPU part").click()
    page.get_by_text(re.compile("bits compared in .* checks: 0 differ")).wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the report").click()
    assert download.value.suggested_filename == "selftest-cpu.json"


@pytest.mark.parametrize("part", ["code", "matrix", "run", "speed", "selftest"])
def test_no_part_scrolls_a_phone_sideways(visit, part):
    page = visit(f"/kernel_lab?lang=en&part={part}", width=390)
    assert overflow(page) <= 0
