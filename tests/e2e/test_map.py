"""The map of lessons in a browser: links by keyboard and by address, and the threads between its lines."""

import re

from playwright.sync_api import expect

from nvfp4viz.figures import places


def inside(selector: str) -> str:
    """JavaScript for what matches in the components' shadow roots."""
    roots = "[...document.querySelectorAll('*')].map(element => element.shadowRoot).filter(Boolean)"
    return f"{roots}.flatMap(root => [...root.querySelectorAll('{selector}')])"


def test_every_lesson_is_an_ordinary_link_with_language_and_view(visit):
    page = visit("/map?lang=zh")
    found = page.evaluate(f"{inside('a')}.map(link => link.href)")
    assert len(found) == len(places.place_rows())
    assert all("lang=zh" in address for address in found)
    assert any(re.search(r"/blocks\?lang=zh&part=swizzle$", address) for address in found)
    assert any(re.search(r"//[^/]+/\?lang=zh$", address) for address in found)  # the default page lives at the root


def test_the_keyboard_opens_a_lesson_in_the_same_session(visit):
    page = visit("/map?lang=en&path=serving")
    documents = sum(url.split("?")[0].endswith("/map") for url in page.seen)
    page.get_by_role("link", name="Inside the tensor core").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Inside the tensor core")
    assert "/tensor_core" in page.url
    assert not any("/tensor_core?" in url for url in page.seen)  # no new document: the session goes on
    assert documents == 1
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Map")
    expect(page.get_by_role("radio", name="Serving")).to_be_checked()


def test_the_chosen_way_is_numbered_on_the_map(visit):
    page = visit("/map?lang=en")
    expect(page.get_by_role("link", name="Routing, step 4 of the chosen way").first).to_be_visible()
    page.get_by_role("radio", name="Numerics").click()
    expect(page.get_by_role("link", name="E2M1, step 1 of the chosen way").first).to_be_visible()
    page.wait_for_url(re.compile("path=numerics"))


def test_threads_join_the_two_lines_on_a_wide_screen_alone(visit):
    shown = inside(".thread")
    seen = f"{shown}.filter(path => path.checkVisibility()).length"
    wide, narrow = visit("/map?lang=en"), visit("/map?lang=en", width=390)
    wide.wait_for_function(f"{seen} === 2")
    narrow.wait_for_function(f"{shown}.length === 2 && {seen} === 0")
    expect(narrow.get_by_text("input_scale is made here")).to_be_visible()
