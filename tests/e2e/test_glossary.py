"""The glossary in a browser: searched while one types, opened at a term, left for a page in the same session."""

import re

from playwright.sync_api import expect

from nvfp4viz.ui import glossary_terms


def test_typing_searches_both_languages_and_goes_into_the_link(visit):
    page = visit("/glossary?lang=en")
    every = len(glossary_terms.terms())
    count = page.get_by_text(f"of {every} terms")
    expect(count).to_have_text(f"{every} of {every} terms, by alphabet")
    page.get_by_label("Find a term").press_sequentially("全局缩放")
    expect(page.get_by_text("global scale", exact=True)).to_be_visible()
    expect(page.get_by_text("swizzle", exact=True)).to_be_hidden()
    expect(count).not_to_have_text(f"{every} of {every} terms, by alphabet")
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


def names_of(page) -> list[str]:
    return page.locator(".entry .side:first-child dt").all_inner_texts()


def test_terms_stand_in_the_order_of_the_reader_s_own_language(visit):
    page = visit("/glossary?lang=en")
    page.get_by_text("terms, by alphabet").wait_for()
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names_of(page)]
    letters = [name[0] for name in plain]
    assert len(plain) == len(glossary_terms.terms())
    assert letters == sorted(letters)
    assert plain.index("block") < plain.index("blockscale") < plain.index("calibration")
    page = visit("/glossary?lang=zh")
    page.get_by_text("再按拼音排列").wait_for()
    names = names_of(page)
    chinese = [not re.match("[A-Za-z]", name) for name in names]
    assert chinese == sorted(chinese)
    # ban, bao, chong (not zhong), dian, jian, jiao (not xiao), juan, liang, zhang, zhuan.
    known = ("半字节", "饱和", "重排", "点积", "检查点", "校准", "卷积", "量化器", "张量", "专家")
    places = [next(at for at, name in enumerate(names) if name.startswith(start)) for start in known]
    assert places == sorted(places)
