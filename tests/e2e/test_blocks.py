"""The swizzle map: its arithmetic against the library, pointing, keys, padding, phones."""

import re

import pytest
from playwright.sync_api import expect

from nvfp4viz.formats import offset_128x4, scale_at, swizzled_size
from nvfp4viz.ui.components import read
from nvfp4viz.ui.swizzle_map import LAYOUTS, tile_order

from .conftest import overflow, skip_question

PATH = "/blocks?lang=en&part=swizzle"


@pytest.fixture
def page(visit):
    page = visit(PATH)
    page.locator(".map .logical rect.cell").first.wait_for()
    return page


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(300, 9), (128, 4), (1, 1)])
def test_places_in_the_browser_are_the_library_s(browser, layout, rows, columns):
    """Both directions for every byte, padding included."""
    script = browser.new_page()
    script.add_script_tag(content=read("swizzle_map", "arithmetic.js"))
    found = script.evaluate(
        """([order, size, columns]) => {
             const tiles = new Tiles(order);
             return Array.from({ length: size }, (_, byte) => {
               const { row, column } = tiles.at(byte, columns);
               return [row, column, tiles.offset(row, column, columns)];
             });
           }""",
        [tile_order(layout), swizzled_size(rows, columns, layout), columns],
    )
    script.close()
    places = [scale_at(byte, rows, columns, layout) for byte in range(len(found))]
    assert found == [[place.row, place.column, byte] for byte, place in enumerate(places)]


def test_keys_walk_through_the_tensor_and_into_the_link(page):
    status = page.locator(".map .status")
    expect(status).to_contain_text("Row 33, column 1")
    page.locator(".map .panels").focus()
    page.keyboard.press("ArrowDown")
    expect(status).to_contain_text(f"byte {offset_128x4(34, 1, 6)} (")
    page.keyboard.press("PageDown")
    expect(status).to_contain_text("Row 66, column 1")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(status).to_contain_text(f"byte {offset_128x4(66, 4, 6)} (")  # the next tile
    page.wait_for_url(re.compile(r"s_row=66&s_col=4|s_col=4&s_row=66"))


def test_pointing_at_memory_shows_the_tensor_s_place(page):
    box = page.locator(".map .physical svg").bounding_box()
    # Line 2, byte 9: band 2 of 32 rows, column 1.
    page.mouse.move(box["x"] + 9.5 * box["width"] / 16, box["y"] + 2.5 * box["height"] / 32)
    status = page.locator(".map .status")
    expect(status).to_contain_text("Row 66, column 1")
    expect(status).to_contain_text(f"byte {offset_128x4(66, 1, 6)} (")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url(re.compile(r"s_row=66"))


def test_padding_is_named_and_cannot_be_chosen(page):
    box = page.locator(".map .physical svg").bounding_box()
    page.mouse.move(box["x"] + 13.5 * box["width"] / 16, box["y"] + 31.5 * box["height"] / 32)  # row 127
    expect(page.locator(".map .status")).to_contain_text("Row 127, column 1 lies outside the tensor")
    expect(page.locator(".map .logical rect.padding")).to_have_count(28 * 4)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(1, 1)
    page.locator(".map .status", has_text="Row 33, column 1").wait_for()


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("part", ["inner", "shapes", "swizzle"])
def test_nothing_overflows_a_phone(visit, lang, part):
    page = visit(f"/blocks?lang={lang}&part={part}", width=390)
    if part == "inner":
        skip_question(page, lang)
    assert overflow(page) <= 0


def test_a_guess_brings_the_other_directions_into_the_figure(visit):
    page = visit("/blocks?lang=en")
    lane = page.locator(".js-plotly-plot").get_by_text("along the rows: ")
    expect(lane).to_have_count(0)
    page.get_by_text("64 times: once for each product").click()
    expect(page.get_by_text("As you predicted")).to_be_visible()
    expect(lane).to_have_count(1)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_each_layout_has_its_own_legend(visit, lang):
    """Shades are bands of 32 rows: a tile of eight rows has none."""
    said = [
        visit(f"/blocks?lang={lang}&part=swizzle&layout={layout}").locator(".map .legend").inner_text()
        for layout in ("128x4", "8x4")
    ]
    assert said[0] != said[1]
    assert {"en": "thirty-two", "zh": "三十二"}[lang] in said[0]
    assert {"en": "eight rows", "zh": "八行"}[lang] in said[1]
