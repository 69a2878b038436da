"""The bit editor and the packer, by keyboard and pointer."""

import re

import pytest
from playwright.sync_api import expect

from .conftest import settle


@pytest.fixture
def page(visit):
    page = visit("/e2m1?lang=en")
    page.locator(".editor .bit").first.wait_for()
    return page


def _code(page) -> str:
    return page.get_by_label("Code", exact=True).input_value()


def _number(page) -> str:
    return page.get_by_label("Your number", exact=True).input_value()


def test_it_opens_on_a_tie(page):
    assert _number(page) == "2.5"
    assert _code(page) == "0x4"
    expect(page.get_by_text("exactly halfway between 2 and 3")).to_be_visible()


def test_bits_are_toggled_by_keyboard_alone(page):
    sign = page.get_by_role("button", name="sign bit 0: 0")
    sign.focus()
    page.keyboard.press("Space")
    assert _code(page) == "0xC"
    expect(page.get_by_role("button", name="sign bit 0: 1")).to_have_attribute("aria-pressed", "true")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")  # the mantissa bit
    assert _code(page) == "0xD"
    assert _number(page) == "−3"
    page.wait_for_url(re.compile("code=13"))


def test_a_number_is_typed(page):
    box = page.get_by_label("Your number", exact=True)
    box.fill("1e9")
    assert _code(page) == "0x7"
    expect(page.get_by_text("it saturates to 6")).to_be_visible()
    box.fill("nan")
    assert _code(page) == "0x7"
    box.fill("abc")
    expect(page.get_by_text("“abc” is not a number yet")).to_be_visible()
    expect(box).to_have_attribute("aria-invalid", "true")


def test_a_code_is_typed(page):
    box = page.get_by_label("Code", exact=True)
    box.fill("b")
    assert _number(page) == "−1.5"
    box.fill("1f")
    expect(page.get_by_text("is not a code of 4 bits")).to_be_visible()


def test_the_number_line_answers_to_keys(page):
    handle = page.get_by_role("slider", name="Your number on the line")
    handle.focus()
    page.keyboard.press("PageUp")
    assert _number(page) == "3.5"
    assert _code(page) == "0x6"
    page.keyboard.press("ArrowRight")
    assert float(_number(page)) > 3.5
    page.keyboard.press("End")
    assert _code(page) == "0x7"
    # redrawing must not lose the keyboard's place
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.getAttribute('role')") == "slider"


def test_the_number_line_can_be_dragged(page):
    line = page.get_by_role("group", name="Number line")
    box = line.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 60, steps=8)
    page.mouse.up()
    assert _code(page) == "0x7"


def test_the_same_number_in_another_format(page):
    page.get_by_role("radio", name=re.compile("BF16")).click()
    assert _code(page) == "0x4020"
    assert _number(page) == "2.5"
    page.wait_for_url(re.compile("format=bf16"))


def test_a_preset_reaches_the_editor(page):
    page.get_by_role("button", name="NaN", exact=True).click()
    page.wait_for_url(re.compile("x=nan"))
    settle(page)  # the address comes first, the editor after it
    assert _number(page) == "NaN"


def test_the_packer_shows_the_low_nibble_first(page):
    page.get_by_role("radio", name="Packing").click()
    page.get_by_text("In memory: 21 43 65 87. As a word: 87654321.").wait_for()
    page.get_by_label("byte 0").fill("f0")
    page.get_by_text("In memory: F0 43 65 87. As a word: 876543F0.").wait_for()
    page.wait_for_url(re.compile("codes=0f345678"))
    page.get_by_label("element 0").select_option("2")
    page.get_by_text("In memory: F2 43").wait_for()
    page.get_by_label("uint32").fill("0")
    page.get_by_text("In memory: 00 00 00 00.").wait_for()


WHAT_TO_WRITE = {
    "en": {
        "": "Type a number, such as -2.5e3",
        "2,5": "Write a point: 2.5",
        "-2,5e3": "Write a point: -2.5e3",
        "abc": "Write digits, such as -2.5e3",
    },
    "zh": {
        "": "请输入一个数",
        "2,5": "请写成英文句点：2.5",
        "-2,5e3": "请写成英文句点：-2.5e3",
        "abc": "请写数字，例如 -2.5e3",
    },
}
FIELDS = {"en": ("Your number", "Code"), "zh": ("你的数", "编码")}


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_cannot_be_read_is_told_what_to_write(visit, lang):
    page = visit(f"/e2m1?lang={lang}&part=packing")
    said = page.locator(".editor .said")
    number, code = (page.get_by_label(name, exact=True) for name in FIELDS[lang])
    for text, words in WHAT_TO_WRITE[lang].items():
        number.fill(text)
        expect(said).to_contain_text(words)
    for text in ("", "zz", "10"):
        code.fill(text)
        assert re.search("0x0.*0xF", said.inner_text()), text
    packed = page.get_by_label("uint32")
    packed.fill("xyz")
    expect(page.locator(".said", has_text="xyz")).to_contain_text("0x1234ABCD")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_number_that_float32_does_not_hold_is_not_called_exact(visit, lang):
    page = visit(f"/e2m1?lang={lang}")
    said = page.locator(".editor .said")
    box = page.get_by_label(FIELDS[lang][0], exact=True)
    lost = {"en": "nothing is lost", "zh": "没有任何损失"}[lang]
    for text in ("1e-400", "-1e-400", "1e-60"):
        box.fill(text)
        expect(said).to_contain_text(text)
        expect(said).to_contain_text("float32")
        expect(said).not_to_contain_text(lost)
    box.fill("2.00000000001")
    expect(said).to_have_text(re.compile("^" + re.escape("2.00000000001")))
    expect(said).to_contain_text("float32")
    for text in ("0", "-0", "2", "0.000"):
        box.fill(text)
        expect(said).not_to_contain_text("float32")
