"""The page on the tensor core as a reader in either language meets it."""

import json
from dataclasses import replace

import pytest

from nvfp4viz.figures import tensor_core as facts
from nvfp4viz.quant import mma_step_reference
from nvfp4viz.ui.tensor_core_lab import RULES, picture
from nvfp4viz.ui.tensor_core_parts import PARTS

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "tensor_core"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Inside the tensor core", "zh": "张量核心内部"}
NEGATIVE, DIRECTION = (f"{PAGE}.predict.{name}" for name in ("negative", "direction"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"kind": "fp8"},
        {"a": "123"},
        {"a": "g" * 64},
        {"b": "1" * 65},
        {"sa": "38"},
        {"sb": "zz383838"},
        {"ua": "7f7f7f7f"},
        {"ub": ""},
        {"c": "one"},
        {"rule": "0"},
        {"rule": "8"},
        {"slot": "5"},
        {"slot": "-1"},
        {"part": "nowhere"},
        {"k": "100"},
        {"k": "nan"},
        {"spread": "3"},
        {"signs": "negative"},
        {"against": "bf16"},
        {"b": "9" * 5000},
    ],
    ids=lambda query: " ".join(f"{name}={value[:8]}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


@pytest.mark.parametrize("kind", facts.KINDS)
@pytest.mark.parametrize("c", ["nan", "inf", "-inf", "-0.0", "1e300", "1e-45", "3e38"])
def test_any_accumulator_is_taken(open_page, kind, c):
    open_page(PAGE, kind=kind, c=c)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("kind", facts.KINDS)
@pytest.mark.parametrize("name", facts.PRESETS)
def test_every_preset_is_drawn_and_explained(open_page, lang, kind, name):
    preset = facts.PRESETS[name]
    at = open_page(PAGE, lang=lang, kind=kind, sa=preset.sa, sb=preset.sb, ua=preset.ua, ub=preset.ub, c=str(preset.c))
    seen = facts.explain(replace(preset, kind=kind))
    assert facts.describe_step(seen, lang) in texts(at)


def test_it_opens_where_the_sentence_is_seen(open_page):
    """One term is cut, the sum is cut, and the result is not the one of float32 arithmetic."""
    at = open_page(PAGE)
    assert "The cut at 35 fractional bits takes 1.91×10⁻⁶ from 1 of 5 terms" in texts(at)
    assert "nearer zero" in texts(at)
    assert "0x472995F7" in texts(at)
    assert "0x472995F8" in texts(at)


# ------------------------------------------------------------------ what the browser gets


@pytest.mark.parametrize("kind", facts.KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        *facts.PRESETS.values(),
        replace(facts.DEFAULT, c=float("inf")),
        replace(facts.DEFAULT, c=float("nan")),
        replace(facts.DEFAULT, c=-0.0),
        replace(facts.DEFAULT, a="0" * 64, sa="00000000", ua="0000"),
        replace(facts.DEFAULT, ua="fefe", ub="fefe", c=3e38),
        replace(facts.DEFAULT, ua="0000", ub="fe00", c=1e-45),
    ],
    ids=lambda settings: f"{settings.sa}-{settings.ua}-{settings.c}",
)
def test_any_step_can_be_drawn(settings, kind):
    data = picture(facts.explain(replace(settings, kind=kind)))
    again = json.loads(json.dumps(data, allow_nan=False))
    assert len(again["steps"]) == len(RULES)
    assert all(step["words"] and len(step["formulas"]) == 5 and all(step["formulas"]) for step in again["steps"])
    assert len(again["terms"]) == 5
    assert all(len(term["products"]) == 16 for term in again["terms"][:4])
    if again["chart"]:
        assert all(len(row["digits"]) < 200 for row in again["chart"]["rows"])


def test_rules_carry_the_numbers_of_the_step():
    data = picture(facts.explain(facts.PRESETS["negative"]))
    rules = dict(zip(RULES, data["steps"], strict=True))
    assert "0xCC = −6 → 6" in rules["sign"]["formulas"][1]
    assert rules["align"]["formulas"][3].startswith("E = max(13, 3, −4, −12, 17) = 17;  17 − (−12) = 29;")
    assert rules["dots"]["formulas"][1].endswith("= −11.5")
    assert "0x472995F7" in rules["sum"]["formulas"][0]


# ------------------------------------------------------------------ predictions


def test_a_negative_scale_is_asked_before_it_can_be_chosen(open_page):
    at = open_page(PAGE)
    assert "the sign is ignored" not in texts(at)
    assert "negative scale" not in at.get("button_group")[1].options + at.get("button_group")[0].options
    guessed(at, NEGATIVE, "flips")
    assert "A damaged NVFP4 checkpoint" in texts(at)
    assert "In the sample step, whatever is set here" in texts(at)
    assert "0xCC is 2⁷⁷ there" in texts(at)
    assert "nothing: the sign is ignored" in texts(at)
    assert "give the same bits, 0x472995F7" in texts(at)


def test_a_negative_scale_leaves_the_result_alone(open_page):
    at = open_page(PAGE, sa=facts.PRESETS["negative"].sa)
    assert "Tensor core: 43413.965 (0x472995F7)" in texts(at)


def test_the_direction_is_asked_before_the_histogram(open_page):
    at = open_page(PAGE, part="difference")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, DIRECTION, "always")
    assert len(at.get("plotly_chart")) == 1
    assert "Your guess: all of them" in texts(at)
    assert "most of them" in texts(at)
    assert "1,255 nearer zero, 421 farther from it, 372 equal" in texts(at)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"signs": "positive", "against": "exact"}, "2,048 lie nearer zero than the exact product, 0 are exact, 0 lie"),
        ({"spread": "0", "against": "exact"}, "0 lie nearer zero than the exact product, 2,048 are exact"),
        ({"k": "64"}, "2,048 are equal"),
    ],
    ids=str,
)
def test_settings_of_the_gemm_reach_the_figure(open_page, query, words):
    assert words in texts(skipped(open_page(PAGE, part="difference", **query), DIRECTION))


# ------------------------------------------------------------------ own numbers


@pytest.mark.parametrize(
    ("lang", "field", "typed", "words"),
    [
        ("en", "a", "0123", "You entered 4 elements"),
        ("zh", "b", "1 2 3", "你输入了 3 个元素"),
        ("en", "a", "hello", "“hello” is neither a number nor a row of E2M1 codes"),
        ("en", "sa", "38 38", "You entered 2 bytes, and this side has 4 scales"),
        ("zh", "sb", "xy", "“xy”不是十六进制字节"),
        ("en", "c", "one", "“one” is not a number"),
        ("zh", "c", "1 2", "“1 2”不是一个数"),
    ],
)
def test_own_input_that_cannot_be_used_is_explained(open_page, lang, field, typed, words):
    at = open_page(PAGE, lang=lang)
    box = (at.text_area if field in "ab" else at.text_input)(key=f"{PAGE}.own_{field}")
    box.set_value(typed)
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert words in texts(at).replace("\\", "")
    assert at.session_state[f"{PAGE}.{field}"] == getattr(facts.DEFAULT, field)


@pytest.mark.parametrize("kind", facts.KINDS)
def test_own_input_is_computed(open_page, kind):
    at = open_page(PAGE, kind=kind)
    sides = {"nvfp4": ("sa", "38 38 38 38", [0x38] * 4), "mxfp4": ("ua", "7f 80", [0x7F, 0x80])}
    name, typed, scales = sides[kind]
    at.text_area(key=f"{PAGE}.own_a").set_value("1.4 " * 64)
    at.text_area(key=f"{PAGE}.own_b").set_value("3" * 64)
    at.text_input(key=f"{PAGE}.own_{name}").set_value(typed)
    at.text_input(key=f"{PAGE}.own_c").set_value("-1e3")
    clean(at.button(key=f"{PAGE}.apply").click().run())
    b_scales = list(bytes.fromhex(facts.DEFAULT.sb if kind == "nvfp4" else facts.DEFAULT.ub))
    expected = mma_step_reference([3] * 64, [3] * 64, scales, b_scales, -1e3, kind)
    assert f"0x{int(expected.view('uint32')):08X}" in texts(at)
    assert at.query_params["a"] in ("3" * 64, ["3" * 64])


# ------------------------------------------------------------------ the foot


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"kind": "mxfp4"},
        {"c": "nan"},
        {"k": "256", "signs": "positive", "part": "difference"},
        {"against": "exact", "signs": "positive", "part": "difference"},
    ],
    ids=str,
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    if not query:
        assert "tensor core 43413.96484375 = 0x472995F7" in output
        assert "1255 outputs nearer zero than float32, 372 equal, 421 farther from zero" in output
    if query.get("against") == "exact":
        assert "2048 outputs nearer zero than exact, 0 equal, 0 farther from zero" in output


def test_sources_and_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.sources"] = True
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
    assert "2511.10909" in texts(at)
