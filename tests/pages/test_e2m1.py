"""The E2M1 page as a reader in either language meets it."""

import pytest

from nvfp4viz import formats

from .conftest import clean, guessed, shown_code_output, texts

LANGUAGES = ["en", "zh"]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens(open_page, lang):
    at = open_page("e2m1", lang=lang)
    assert at.title[0].value == "E2M1"
    assert len(at.get("bidi_component")) == 2  # the editor and the copy button


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"format": "int4"},
        {"x": "two"},
        {"code": "-1"},
        {"code": "70000"},
        {"codes": "12"},
        {"layer": "minus one"},
        {"format": "e2m1", "code": "255"},
        {"x": "1e999"},
        {"x": "nan", "code": "3"},
        {"lang": "tlh"},
        {"x": "<script>alert(1)</script>"},
    ],
    ids=str,
)
def test_a_bad_link_leaves_the_page_usable(open_page, lang, query):
    at = open_page("e2m1", **{"lang": lang, **query})
    assert at.title[0].value == "E2M1"


def test_a_bad_value_is_named(open_page):
    assert "x=two" in texts(open_page("e2m1", x="two"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", ["edges", "packing", "integers", "cards"])
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page("e2m1", lang=lang, part=part)
    assert at.session_state["e2m1.part"] == part
    # edges and cards are tables, packing is a component, integers asks first
    seen = {"edges": "|---", "cards": "**UE8M0**", "packing": "uint32", "integers": "0x2"}[part]
    assert seen in texts(at) or any(seen in radio.label for radio in at.radio)


def test_the_product_is_asked_before_it_is_shown(open_page):
    at = open_page("e2m1", part="integers")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, "e2m1.predict.product", "integers")
    assert len(at.get("plotly_chart")) == 1
    assert "the product is 1.5" in texts(at)


@pytest.mark.parametrize(("x", "code", "value"), [("2.5", 4, 2.0), ("-100", 15, -6.0), ("nan", 7, 6.0)])
def test_the_code_shown_gives_the_page_s_numbers(open_page, x, code, value):
    output = shown_code_output(open_page("e2m1", x=x), "e2m1")
    assert f"code 0x{code:X}" in output
    assert formats.explain(formats.E2M1, code).value == value


def test_a_preset_sets_the_number(open_page):
    at = open_page("e2m1", code="3")
    at.button(key="e2m1.try.tie").click().run()
    clean(at)
    assert at.session_state["e2m1.x"] == 1.25
    assert at.session_state["e2m1.code"] is None


@pytest.mark.parametrize(("lang", "words"), [("en", "ties to even"), ("zh", "居中取偶")])
def test_terms_sources_and_downloads_are_drawn_when_asked_for(open_page, lang, words):
    at = open_page("e2m1", lang=lang)
    assert words not in texts(at)
    at.session_state["e2m1.terms.e2m1.tie.saturation.subnormal"] = True
    at.session_state["e2m1.sources"] = True
    at.session_state["e2m1.download"] = True
    clean(at.run())
    assert words in texts(at)
    assert "cvt.rn.satfinite.e2m1x2.f32" in texts(at)
    assert {button.proto.label for button in at.get("download_button")} == {
        f"{stem}.{kind}" for stem in ("e2m1_codes", "e2m1_rounding") for kind in ("csv", "json")
    }
