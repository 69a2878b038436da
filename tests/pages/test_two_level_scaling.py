"""The page on two-level scaling as a reader in either language meets it."""

import json
import math

import pytest

from nvfp4viz.figures.scaling import BLOCKS
from nvfp4viz.quant import NVFP4_RECIPES, trace_block
from nvfp4viz.ui.block_lab import trace_data
from nvfp4viz.ui.scaling_parts import BLOCKS_TO_COMPARE, PARTS
from nvfp4viz.ui.values import to_bf16

from .conftest import clean, guessed, shown_code_output, texts

PAGE = "two_level_scaling"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Two-level scaling", "zh": "两级缩放"}
ONES = ",".join(["1"] * 16)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) <= 2


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"x": "1,2,3"},
        {"x": ONES + ",1"},
        {"x": "one,two"},
        {"amax": "0"},
        {"amax": "13"},
        {"amax": "nan"},
        {"recipe": "marlin"},
        {"part": "nowhere"},
        {"step": "99"},
        {"step": "-1"},
        {"factor": "3"},
        {"scale": "abc"},
        {"on": "both"},
        {"x": "9" * 5000},
    ],
    ids=lambda query: " ".join(query),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


@pytest.mark.parametrize("scale", ["0", "-0.0", "inf", "-inf", "nan", "-1", "1e-38", "1e38", "1e300"])
def test_any_global_scale_is_taken(open_page, scale):
    """A damaged checkpoint holds such scales: the page shows what they do and never breaks."""
    open_page(PAGE, scale=scale)


@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
@pytest.mark.parametrize("scale", [0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1e-38, 1e38])
@pytest.mark.parametrize("name", BLOCKS)
def test_any_trace_can_be_drawn(recipe, scale, name):
    """What the browser gets: every step has its words, and it is JSON."""
    data = trace_data(trace_block(to_bf16(BLOCKS[name]), scale, recipe))
    again = json.loads(json.dumps(data, allow_nan=False))
    assert len(again["elements"]) == len(again["x"]) == len(again["bits"]) == 16
    assert all(step["words"] and step["formula"] for step in again["steps"])


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_preset_is_explained(open_page, lang, name):
    at = open_page(PAGE, lang=lang)
    at.get("button_group")  # presets are drawn
    at.session_state[f"{PAGE}.x"] = BLOCKS[name]
    clean(at.run())


@pytest.mark.parametrize(
    ("name", "amax", "word"),
    [
        ("typical", "12", "survives"),
        ("huge", "12", "saturates"),
        ("tiny", "1024", "dies"),
        ("zero", "12", "all zero"),
        ("nan", "12", "A NaN is gone"),
        ("tiny", "64", "coarse"),
    ],
)
def test_the_sentence_names_what_became_of_the_block(open_page, name, amax, word):
    at = open_page(PAGE, x=",".join(map(str, BLOCKS[name])), amax=amax)
    assert f"**{word}**" in texts(at)
    assert "error is NaN" not in texts(at)


def test_a_nan_scale_is_named(open_page):
    at = open_page(PAGE, x=",".join(["0"] * 16), scale="inf")
    assert "**NaN**" in texts(at)


@pytest.mark.parametrize(
    ("lang", "typed", "words"),
    [
        ("en", "1 2 three", "“three” is not a number"),
        ("zh", "1 2 three", "“three”不是一个数"),
        ("en", "1,2,3", "You entered 3 numbers"),
        ("zh", " ".join(["1"] * 17), "你输入了 17 个数"),
        ("en", "", "There are no numbers here yet"),
        ("zh", "", "这里还没有数"),
        ("en", "0x10 " * 16, "“0x10” is not a number"),
    ],
)
def test_own_values_that_cannot_be_used_are_explained(open_page, lang, typed, words):
    at = open_page(PAGE, lang=lang)
    before = at.session_state[f"{PAGE}.x"]
    at.text_area(key=f"{PAGE}.own").set_value(typed)
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert words in texts(at).replace("\\", "")
    assert at.session_state[f"{PAGE}.x"] == before


def test_own_values_are_taken_as_bf16(open_page):
    at = open_page(PAGE)
    at.text_area(key=f"{PAGE}.own").set_value("[0.1; nan, inf -inf] " + "0 " * 12)
    clean(at.button(key=f"{PAGE}.apply").click().run())
    x = at.session_state[f"{PAGE}.x"]
    assert x[0] == 0.10009765625
    assert math.isnan(x[1])
    assert x[2:4] == (math.inf, -math.inf)
    assert "scale" not in at.query_params


def test_an_own_scale_reaches_the_link_and_the_slider_takes_it_back(open_page):
    at = open_page(PAGE)
    at.text_input(key=f"{PAGE}.own_scale").set_value("inf")
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert at.session_state[f"{PAGE}.scale"] == math.inf
    at.select_slider(key=f"{PAGE}.amax").set_value(32.0)
    clean(at.run())
    assert at.session_state[f"{PAGE}.scale"] is None


@pytest.mark.parametrize(
    ("lang", "typed", "words"),
    [
        ("en", "1,5", "Write a decimal point: 1.5"),
        ("zh", "1,5", "小数点请写成英文句点：1.5"),
        ("en", "abc", "“abc” is not one number"),
        ("zh", "abc", "“abc”不是单独一个数"),
    ],
)
def test_a_scale_that_cannot_be_used_is_explained_as_a_scale(open_page, lang, typed, words):
    at = open_page(PAGE, lang=lang)
    at.text_input(key=f"{PAGE}.own_scale").set_value(typed)
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert words in texts(at).replace("\\", "")
    assert at.session_state[f"{PAGE}.scale"] is None


def test_the_loss_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="input_scale")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, f"{PAGE}.predict.lost", "nothing")
    assert len(at.get("plotly_chart")) == 1
    assert "Your guess: none" in texts(at)
    assert "882 of 1,152 blocks" in texts(at)  # computed from the seeded tensor


@pytest.mark.parametrize("on", BLOCKS_TO_COMPARE)
def test_implementations_are_compared(open_page, on):
    at = open_page(PAGE, part="recipes", on=on)
    assert "Different answers on this block" in texts(at)


@pytest.mark.parametrize(
    "query", [{}, {"recipe": "modelopt"}, {"scale": "inf"}, {"x": ",".join(["nan"] * 16)}], ids=str
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    assert "scale byte 0x" in output
    assert "882 blocks lost" in output
