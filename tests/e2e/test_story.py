"""The whole story in a browser: keys, prediction, the map's cells and tokens, the chain's links, the remedies."""

import re

import pytest
from playwright.sync_api import expect

from nvfp4viz.serving.remedies import REMEDIES

from .conftest import settle, violations


def is_current(page, beat: int):
    """The button of a step while that step is drawn."""
    return page.locator(".st-key-story_steps button").nth(beat - 1).and_(page.locator("[kind=primary]"))


def press(page, key: str, beat: int | None = None) -> None:
    """Press a key of the page and wait until the step (the digit, if not told otherwise) has been drawn."""
    page.locator("h1").click()  # keys belong to the page, not to a field
    page.keyboard.press(key)
    is_current(page, int(key) if beat is None else beat).wait_for()
    settle(page)


def test_the_whole_story(visit):
    page = visit("/?lang=en")
    # 1: the contrast is on the first screen.
    silent = page.locator(".reply.silent").first
    silent.wait_for()
    assert silent.bounding_box()["y"] + silent.bounding_box()["height"] < 900
    expect(silent).to_contain_text("<pad>")
    expect(silent).to_contain_text("HTTP 200")
    # 2: predict, then see.
    press(page, "n", 2)
    page.get_by_text("Which of them get an empty answer?").wait_for()
    expect(page.locator(".reply.silent")).to_have_count(0)
    page.get_by_text("Arithmetic and code", exact=True).click()
    page.get_by_text("As you predicted").wait_for()
    settle(page)
    expect(page.locator(".reply.silent")).to_have_count(2)
    page.get_by_text("HTTP/1.1 200 OK").wait_for()
    # 3: the map.
    press(page, "3")
    page.get_by_role("application").wait_for()
    page.get_by_text(re.compile(r"routes lead into a hole")).first.wait_for()
    # 4: the chain; every link opens.
    press(page, "4")
    links = page.locator(".chain button.row")
    links.first.wait_for()
    expect(links).to_have_count(9)
    for index in range(9):
        links.nth(index).click()
        settle(page)
        expect(links.nth(index)).to_have_attribute("aria-expanded", "true")
    # 5: remedies, and the two checks.
    page.set_default_timeout(120_000)
    press(page, "5")
    page.get_by_text("Right:").first.wait_for()
    expect(page.locator(".story table tbody tr")).to_have_count(len(REMEDIES) + 1)
    page.get_by_text("A naive check").wait_for()
    page.get_by_text("scale.missing").first.wait_for()
    # And back.
    press(page, "b", 4)
    page.locator(".chain").wait_for()


def test_back_and_forward_turn_the_steps(visit):
    page = visit("/?lang=en")
    for beat in (2, 3):
        page.locator(".st-key-story_turn button", has_text="Next").click()
        is_current(page, beat).wait_for()
        settle(page)
        assert f"beat={beat}" in page.url
    page.go_back()
    is_current(page, 2).wait_for()
    settle(page)
    assert "beat=2" in page.url
    page.go_back()
    is_current(page, 1).wait_for()
    settle(page)
    assert "beat=" not in page.url
    page.go_forward()
    is_current(page, 2).wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_new_step_begins_at_its_top_and_under_its_address(visit, width):
    page = visit("/?lang=en&beat=4", width=width)
    page.locator(".st-key-story_turn button", has_text="Next").click()
    page.wait_for_url(re.compile("beat=5"), timeout=5_000)  # the remedies take longer than that
    is_current(page, 5).wait_for()
    page.wait_for_function("document.querySelector('.st-key-story_steps').getBoundingClientRect().top >= 0")
    top = page.locator(".st-key-story_steps").bounding_box()["y"]
    assert 0 <= top < 200


def test_the_map_by_keyboard(visit):
    page = visit("/?lang=en&beat=3")
    field = page.get_by_role("application")
    said = page.locator("p.readout")
    field.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("expert 2,")
    page.keyboard.press("n")
    expect(said).to_contain_text("no scale stored")
    expect(said).not_to_contain_text("expert 2,")
    layer, expert = re.search(r"Layer (\d+), expert (\d+)", said.inner_text()).groups()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"layer={layer}&expert={expert}|expert={expert}.*layer={layer}"))
    page.get_by_text(re.compile(rf"Layer {layer}, expert {expert}: \d+ tokens of the calibration")).wait_for()


def test_a_cell_is_picked_with_the_pointer(visit):
    page = visit("/?lang=en&beat=3")
    canvas = page.locator(".field canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.locator(".tip").wait_for(state="visible")
    said = page.locator(".tip").inner_text()
    expert = re.search(r"expert (\d+)", said).group(1)
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.wait_for_url(re.compile(f"expert={expert}"))


def test_quick_clicks_are_not_undone_by_their_own_echo(visit):
    page = visit("/?lang=en&beat=4")
    links = page.locator(".chain button.row")
    links.first.wait_for()
    for index in (0, 3, 5, 8):
        links.nth(index).click()
    for _ in range(10):
        expect(links.nth(8)).to_have_attribute("aria-expanded", "true")
        page.wait_for_timeout(200)
    page.wait_for_url(re.compile("link=token"))


def test_a_token_is_chosen(visit):
    page = visit("/?lang=en&beat=3")
    tokens = page.get_by_role("group", name=re.compile("^Tokens of the prompt")).get_by_role("button")
    tokens.first.wait_for()
    tokens.nth(2).click()
    expect(tokens.nth(2)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(3)).to_have_attribute("aria-pressed", "true")


def test_roles_switch(visit):
    page = visit("/?lang=en&beat=3")
    page.get_by_role("radio", name="w2").click()
    page.wait_for_url(re.compile("role=w2"))


def test_leftovers_change_the_outcome_and_the_link(visit):
    page = visit("/?lang=en&beat=4&link=slot")
    page.locator(".chain .panel").wait_for()
    expect(page.locator(".chain")).to_contain_text("0x00000000")
    page.get_by_role("radio", name="ones", exact=True).click()
    page.wait_for_url(re.compile("fate=ones"))
    settle(page)
    expect(page.locator(".chain")).to_contain_text("0x3F800000")
    expect(page.locator(".chain .panel")).to_have_count(1)  # the link stays open
    again = visit("/" + page.url.split("/", 3)[3])
    again.locator(".chain .panel").wait_for()
    expect(again.locator(".chain")).to_contain_text("0x3F800000")


def test_an_own_prompt_with_unknown_characters(visit):
    page = visit("/?lang=en")
    box = page.get_by_role("textbox", name="Try a prompt of your own")
    box.fill("今天天气")
    box.press("Enter")
    page.get_by_text("prompt.unknown-characters").wait_for()
    box.fill("19 + 23 =")
    box.press("Enter")
    page.get_by_text("prompt.unknown-characters").wait_for(state="detached")
    page.locator(".reply .prompt", has_text="19 + 23 =").first.wait_for()


def test_workshop_mode_shows_fewer_panels(visit):
    page = visit("/?lang=en&mode=workshop&beat=4")
    page.locator(".chain.tall").wait_for()
    page.get_by_text("Facilitator notes").wait_for()
    expect(page.get_by_text("other leftovers in memory")).to_have_count(0)


@pytest.mark.parametrize("beat", range(1, 6))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_step_overflows_a_phone(visit, beat, language):
    page = visit(f"/?lang={language}", width=390)
    page.set_default_timeout(120_000)  # eight remedies take a while where other tests run beside this one
    press(page, str(beat))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("beat", [2, 3, 4, 5])
def test_every_step_passes_axe(visit, beat, theme):
    page = visit("/?lang=en", theme=theme)
    page.set_default_timeout(120_000)
    press(page, str(beat))
    if beat == 2:
        page.get_by_role("button", name="Show me without a guess").click()
        page.get_by_text("HTTP/1.1 200 OK").wait_for()
        settle(page)
    assert violations(page) == []
