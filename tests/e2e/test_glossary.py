"""The glossary in a browser: searched while one types, opened at a term, left for a page in the same session."""

import re

from playwright.sync_api import expect

from nvfp4viz.ui import glossary_terms


def test_typing_searches_both_languages_and_goes_into_the_link(visit):
    page = visit("/glossary?lang=en")
    every = len(glossary_terms.terms())
    count = page.get_by_text(f"of {every} terms")
    expect(count).to_have_text(f"{every} of {every} terms")
    page.get_by_label("Find a term").press_sequentially("全局缩放")
    expect(page.get_by_text("global scale", exact=True)).to_be_visible()
    expect(page.get_by_text("swizzle", exact=True)).to_be_hidden()
    expect(count).not_to_have_text(f"{every} of {every} terms")
    page.wait_for_url(re.compile("q="))
    page.get_by_label("Find a term").fill("no such word")
    expect(page.get_by_text("No term has all of these words")).to_be_visible()


def test_a_link_opens_at_its_term_and_another_moves_it(visit):
    page = visit("/glossary?lang=zh&term=eplb", width=390)
    here = page.locator(".entry.here")
    expect(here).to_be_in_viewport()
    expect(here).to_have_attribute("data-term", "eplb")
    page.get_by_role("link", name="副本", exact=True).press("Enter")
    page.wait_for_url(re.compile("term=replica"))
    expect(here).to_have_attribute("data-term", "replica")


def test_a_page_of_a_term_opens_in_the_same_session(visit):
    page = visit("/glossary?lang=zh&q=swizzle")
    page.locator(".entry[data-term=swizzle] .pages a").first.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("GEMM 里的块")
    assert "lang=zh" in page.url
    assert not any("/blocks?" in url for url in page.seen)
