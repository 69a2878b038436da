"""The block lab: bars by keyboard and pointer, steps, presets, own numbers."""

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from nvfp4viz import formats
from nvfp4viz.ui.bit_editor import plain
from nvfp4viz.ui.components import read

from .conftest import settle

PATH = "/two_level_scaling?lang=en"


@pytest.fixture
def page(visit):
    page = visit(PATH)
    page.locator(".lab .bar").first.wait_for()
    return page


def _bar(page, index: int):
    return page.get_by_role("slider", name=f"element {index}", exact=True)


def test_it_opens_where_codes_and_both_scales_are_seen(page):
    expect(page.get_by_text("tensor: global scale G = 224")).to_be_visible()
    expect(page.get_by_text("block scale 0x6B = 88")).to_be_visible()
    expect(page.get_by_role("tab", name="7 round to E2M1")).to_have_attribute("aria-selected", "true")


def test_steps_are_walked_by_keyboard(page):
    page.get_by_role("tab", name="7 round to E2M1").focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="1 largest")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_text("0x401A0000")).to_be_visible()  # the bits of the largest magnitude
    page.wait_for_url(re.compile(r"step=0"))


def test_a_bar_is_moved_by_keyboard_and_the_library_answers(page):
    page.get_by_role("tab", name="1 largest").click()
    bar = _bar(page, 0)
    bar.focus()
    before = page.get_by_text("Element 0: 0.53125").is_visible()
    assert before
    page.keyboard.press("PageUp")
    page.wait_for_url(re.compile(r"x=0\.8"))
    page.get_by_text(re.compile(r"Element 0: 0\.8.*→ code")).wait_for()
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.dataset.bar") == "0"
    page.keyboard.press("Home")
    page.get_by_text(re.compile(r"Element 0: 0 ×")).wait_for()


def test_a_bar_is_dragged(page):
    page.get_by_role("tab", name="1 largest").click()
    page.wait_for_url(re.compile("step=0"))
    settle(page)  # the step's own words push the bars to their place
    box = page.locator(".lab svg.bars").bounding_box()
    column = (box["width"] - 20) / 16
    x = box["x"] + 20 + 5.5 * column
    page.mouse.move(x, box["y"] + box["height"] / 2 - 20)
    page.mouse.down()
    page.mouse.move(x, box["y"] + 30, steps=10)
    page.mouse.up()
    page.get_by_text(re.compile(r"Element 5: 2\.\d+ ×")).wait_for()


def test_a_preset_and_the_slider_change_the_fate_of_the_block(page):
    page.get_by_text("This block survives").wait_for()
    page.get_by_role("radio", name="huge").or_(page.get_by_role("button", name="huge", exact=True)).first.click()
    page.get_by_text("This block saturates").wait_for()
    settle(page)


def test_own_numbers_are_pasted(page):
    page.get_by_text("Your own numbers").click()
    box = page.get_by_role("textbox", name="Sixteen numbers")
    box.fill("1 2 3")
    page.get_by_role("button", name="Use these numbers").click()
    page.get_by_text("You entered 3 numbers, and a block has 16.").wait_for()
    box.fill(" ".join(["nan"] + ["1"] * 15))
    page.get_by_role("button", name="Use these numbers").click()
    page.get_by_text("You entered 3 numbers").wait_for(state="detached")
    page.wait_for_url(re.compile("x=nan"))
    expect(_bar(page, 0)).to_have_attribute("aria-valuetext", re.compile("^" + re.escape("NaN, code 0x7")))


def test_a_copied_link_restores_block_step_and_recipe(visit):
    x = ",".join(["0.5", *["1"] * 15])
    page = visit(f"{PATH}&x={x}&step=3&recipe=modelopt&amax=64")
    page.locator(".lab .bar").first.wait_for()
    expect(page.get_by_role("tab", name="4 clamp")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_text("v = clamp(u, 2^−9, 448)")).to_be_visible()  # as ModelOpt does
    expect(_bar(page, 0)).to_have_attribute("aria-valuetext", re.compile("^" + re.escape("0.5,")))
    page.get_by_role("radio", name="中文").click()
    page.get_by_text("两级缩放").first.wait_for()
    settle(page)
    page.get_by_role("tab", name="4 限幅").wait_for()
    expect(page.get_by_role("slider", name="元素 0", exact=True)).to_have_attribute(
        "aria-valuetext", re.compile("^" + re.escape("0.5，"))
    )


def test_a_dragged_value_becomes_bf16_as_in_the_library(browser):
    page = browser.new_page()
    page.add_script_tag(content=read("block_lab", "arithmetic.js"))
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32)
    halves = (rng.integers(0, 1 << 16, 500, dtype=np.uint64).astype(np.uint32) << 16) | 0x8000  # ties
    numbers = np.concatenate([bits, halves]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    found = page.evaluate(
        """numbers => numbers.map(x => {
             const value = toBf16(typeof x === "number" ? x : x === "-0" ? -0 : x === "inf" ? Infinity : -Infinity);
             return Object.is(value, -0) ? "-0" : Number.isFinite(value) ? value : value > 0 ? "inf" : "-inf";
           })""",
        [plain(float(x)) for x in numbers],
    )
    page.close()
    expected = [plain(float(x)) for x in formats.bf16_to_f32(formats.f32_to_bf16(numbers))]
    # JSON writes large whole numbers without a point, so compare them as the doubles they are
    assert [value if isinstance(value, str) else float(value) for value in found] == expected
