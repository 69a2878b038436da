"""Predictions, snippets, downloads and number texts."""

import ast
import csv
import io
import json
import math
import re

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from nvfp4viz.quant.reference import NVFP4_REFERENCES
from nvfp4viz.quant.reference_mxfp4 import MXFP4_REFERENCES
from nvfp4viz.ui import export, i18n, numbers, snippets, text


def _ask() -> None:
    import streamlit as st

    from nvfp4viz.ui import predict

    st.session_state.setdefault("lang", "en")
    values = {"first": "2.5", "first_stored": "2", "x": "3.5", "down": "3", "up": "4", "stored": "4", "bits": "0110"}
    st.write(f"revealed={predict.ask('e2m1.predict.tie', ('down', 'up'), answer='up', **values)}")


def _texts(at: AppTest) -> str:
    assert not at.exception
    return "\n".join(part.value for part in at.markdown)


def test_nothing_is_revealed_before_a_guess():
    at = AppTest.from_function(_ask).run()
    assert "revealed=False" in _texts(at)
    assert "0110" not in _texts(at)


def test_a_right_guess_is_confirmed():
    at = AppTest.from_function(_ask).run()
    at.radio[0].set_value("up").run()
    assert "As you predicted: **up to 4**" in _texts(at)
    assert "revealed=True" in _texts(at)


def test_another_guess_is_answered_without_scolding():
    at = AppTest.from_function(_ask).run()
    at.radio[0].set_value("down").run()
    text = _texts(at)
    assert "It turns out to be: **up to 4**" in text
    assert "wrong" not in text.lower()


def test_one_may_look_without_guessing():
    at = AppTest.from_function(_ask).run()
    at.button[0].click().run()
    assert "The answer: **up to 4**" in _texts(at)


def test_a_snippet_prints_without_touching_the_real_output(capsys):
    assert snippets.run("print('a', 1)\nprint(2, sep='')") == "a 1\n2"
    assert capsys.readouterr().out == ""


def test_what_the_page_has_already_takes_the_place_of_a_snippet_s_own():
    source = 'source = "FOLDER"\nother = 2\nprint(source, other)'
    assert snippets.run(source) == "FOLDER 2"
    assert snippets.run(source, {"source": 1}) == "1 2"


@pytest.mark.parametrize("value", ["https://example.org/?key=1", 'a"b', "a\\b", "a\nb", "a'b", "{x}", "$x"])
def test_no_text_ends_a_literal(value):
    with pytest.raises(TypeError):
        snippets.literal(value)


def test_an_address_is_a_literal():
    assert snippets.literal("https://example.org:80/a%20b") == '"https://example.org:80/a%20b"'


@pytest.mark.parametrize("value", ["__import__('os')", 'a"b', object(), {"a": 1}, "a\nb"])
def test_only_literals_reach_a_snippet(value):
    with pytest.raises(TypeError):
        snippets.literal(value)


@pytest.mark.parametrize("value", [1, -2.5, math.inf, -math.inf, True, None, "ieee", [1.0, 2.0], (1, 2)])
def test_a_literal_reads_back(value):
    again = eval(snippets.literal(value))
    assert again == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a'b\"c",
        "\"\"\"\n'''\n",
        "\\",
        "\\'\n\\\n",
        "')\nprint('out')\n('",
        "$config ${sidecar} {x}",
        "\r\n\r\u2028\x85\0\ud800中",
        "\n" * 20_000,
    ],
    ids=ascii,
)
def test_what_a_reader_wrote_is_one_constant_of_the_snippet(text):
    written = snippets.literal(snippets.Written(text))
    (line,) = ast.parse(f"config = {written}").body
    assert isinstance(line.value, ast.Constant)
    assert line.value.value == text
    assert snippets.run(f"config = {written}\nprint(config == {text!a})") == "True"


def test_csv_keeps_numbers_and_disarms_formulas():
    rows = [{"name": "=cmd()", "x": -1.5}, {"name": "中文", "x": math.nan}]
    read = list(csv.DictReader(io.StringIO(export.to_csv(rows).decode("utf-8-sig"))))
    assert [row["name"] for row in read] == ["'=cmd()", "中文"]
    assert float(read[0]["x"]) == -1.5
    assert math.isnan(float(read[1]["x"]))


def test_json_is_json_even_with_nan():
    assert json.loads(export.to_json([{"x": math.nan, "y": -math.inf, "z": 1}])) == [{"x": "nan", "y": "-inf", "z": 1}]


@pytest.mark.parametrize("bits", [0x3E2AAAAB, 0x00000001, 0x7F7FFFFF, 0x80000000, 0xC0200000])
def test_an_exact_number_reads_back_to_the_same_float32(bits):
    import numpy as np

    value = np.array(bits, np.uint32).view(np.float32)[()]
    text = numbers.exact(value).translate(str.maketrans("−⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--0123456789")).replace("×10", "e")
    assert np.float32(text).view(np.uint32) == bits


def test_the_steps_of_every_recipe_have_no_english_word_in_chinese(monkeypatch):
    x = [np.float32(value) for value in (6.5, -1, *[0.25] * 30)]
    blocks = [make(x[:16], np.float32(8), False) for make in NVFP4_REFERENCES.values()]
    blocks += [make(x) for make in MXFP4_REFERENCES.values()]
    formulas = {part for block in blocks for step in block.steps for part in (step.formula, step.numbers)}
    # Functions, formats and the digits of a byte.
    names = re.compile(r"\b(max|clamp|rcp|floor|ceil|log2|E4M3|BF16|f32|0x[0-9A-F]{2})\b")

    def words(lang: str) -> set[str]:
        monkeypatch.setattr(i18n, "lang", lambda: lang)
        return {word for one in formulas for word in re.findall("[A-Za-z]{2,}", names.sub("", text.phrases(one)))}

    assert {"largest", "byte", "bump"} <= words("en")
    assert words("zh") == set()
