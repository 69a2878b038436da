"""Damage by layer and by factor: what has no logarithm stands below with its mark, and every case has its sentence."""

import json

import numpy as np
import pytest

from nvfp4viz.figures.fault_lab import (
    calm_range,
    describe_layers,
    describe_sweep,
    layers_figure,
    layers_rows,
    sweep_figure,
    sweep_rows,
)
from nvfp4viz.figures.palette import role, surface
from nvfp4viz.serving.fault_lab import FaultEffect, SweepPoint

NAN = float("nan")
THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


def effect(error, nan, first=0, visits=3):
    none = np.zeros(0, np.float32)
    return FaultEffect(
        None, None, (1,) * 10, visits, np.float32(error), np.float32(nan), first, none, none
    )  # the answers themselves are not drawn here


CASES = {
    "untouched": effect([0, 0, 0, 0], [0, 0, 0, 0], None),
    "unvisited": effect([0, 0, 0, 0], [0, 0, 0, 0], None, visits=0),
    "drift": effect([0, 1e-5, 0.02, 0.031], [0, 0, 0, 0], 1),
    "some NaN": effect([0, 0, 0.5, 0.7], [0, 0.2, 0.4, 0.4], 1),
    "all NaN": effect([0, NAN, NAN, NAN], [0, 1, 1, 1], 1),
    "all infinite": effect([0, 0.5, NAN, NAN], [0, 0, 0, 0], 1),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def marked(figure):
    return [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "text"]


def marks(figure):
    return {trace.text[0]: list(trace.x) for trace in marked(figure)}


def curve(figure):
    return next(trace for trace in figure.data if trace.type == "scatter" and trace.mode != "text")


def bar(figure):
    return next(trace for trace in figure.data if trace.type == "bar")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@EVERY_CASE
def test_every_layer_stands_once_on_the_curve_or_below_it(case, theme, lang):
    figure = layers_figure(case, theme=theme, lang=lang)
    line = curve(figure)
    drawn = np.isfinite(np.asarray(line.y, float))
    assert (np.asarray(line.y, float)[drawn] > 0).all()
    below = marks(figure)
    assert below.get("=", []) == np.flatnonzero(case.layer_error == 0).tolist()
    assert below.get("N", []) == np.flatnonzero(np.isnan(case.layer_error)).tolist()
    assert sorted([*np.flatnonzero(drawn).tolist(), *below.get("=", []), *below.get("N", [])]) == [0, 1, 2, 3]
    np.testing.assert_array_equal(np.asarray(bar(figure).y, np.float32), case.layer_nan)


@pytest.mark.parametrize("theme", THEMES)
@EVERY_CASE
def test_marks_lie_below_every_number_and_inside_the_axis(case, theme):
    figure = layers_figure(case, theme=theme, lang="en")
    low, high = (10.0**limit for limit in figure.layout.yaxis.range)
    numbers = np.asarray(curve(figure).y, float)
    numbers = numbers[np.isfinite(numbers)]
    for trace in marked(figure):
        assert low < trace.y[0] < min(numbers.min(initial=np.inf), high)
    assert (numbers < high).all()


@pytest.mark.parametrize("theme", THEMES)
@EVERY_CASE
def test_the_figure_goes_to_the_browser_as_json_in_the_theme_s_ink(case, theme):
    figure = layers_figure(case, theme=theme, lang="zh")
    sent = json.loads(figure.to_json())
    assert "NaN" not in json.dumps([trace.get("text") for trace in sent["data"]])
    ink = surface(theme)
    assert figure.layout.font.color == ink.ink
    assert curve(figure).line.color == ink.accent
    # A share is told by its hatch, never by colour alone.
    assert bar(figure).marker.pattern.shape == "/"
    assert bar(figure).marker.line.color == role("sign", theme).text
    assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
    other = layers_figure(case, theme="dark" if theme == "light" else "light", lang="zh")
    assert other.to_json() != figure.to_json()


def plain(text):
    """Without the space that keeps a number and its sign in one line."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


SAYS = {
    "untouched": ("No bit of the residual differs after any layer, although 3 of 10 positions visit", "3"),
    "unvisited": ("none of the 10 positions visits", "10"),
    "drift": ("after layer 1 with a relative error of 0.001 %; after layer 3 it is 3.1 %", "3.1 %"),
    "some NaN": ("after layer 1, where 20 % of the positions hold a NaN; after layer 3 it is 40 %", "40 %"),
    "all NaN": ("after layer 1, where 100 % of the positions hold a NaN; after layer 3 it is 100 %", "100 %"),
    "all infinite": ("after layer 3 no position holds a finite number, and none holds a NaN", "3"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_says_what_is_drawn(name):
    english, number = SAYS[name]
    assert english in plain(describe_layers(CASES[name], "en"))
    chinese = plain(describe_layers(CASES[name], "zh"))
    assert number in chinese
    assert "nan" not in chinese
    assert "nan" not in describe_layers(CASES[name], "en")


def test_the_six_cases_are_told_apart_in_both_languages():
    for lang in LANGUAGES:
        assert len({describe_layers(case, lang) for case in CASES.values()}) == len(CASES)


def test_the_table_has_a_row_a_layer():
    rows = layers_rows(CASES["some NaN"])
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    assert [row["nan_positions"] for row in rows] == [np.float32(x) for x in (0, 0.2, 0.4, 0.4)]
    assert rows[3]["relative_error_where_finite"] == np.float32(0.7)


# ------------------------------------------------------------------------------------------------------------ sweep

FACTORS = [10.0 ** (k / 2) for k in range(-4, 5)]


def points(changed, nan=None, error=None):
    nan = nan or [0.0] * len(changed)
    error = error or [0.0 if c == 0 else 0.1 * c for c in changed]
    return [SweepPoint(*row, 1.0, c) for *row, c in zip(FACTORS, error, nan, changed, strict=True)]


WIDE = points([1, 0.5, 0, 0, 0, 0, 0.25, 0, 1], nan=[0, 0, 0, 0, 0, 0, 0, 0, 0.75])
CALM = points([0] * 9, error=[0, 0, 0, 0, 0, 0.01, 0.02, 0.03, 0.02])
WILD = points([1] * 9, error=[0.1] * 8 + [NAN], nan=[0] * 8 + [1.0])


def test_the_harmless_range_is_the_unbroken_one_around_no_change():
    """The seventh of nine is harmful, so the harmless eighth does not belong to it."""
    assert [point.factor for point in calm_range(WIDE)] == FACTORS[2:6]
    assert calm_range(CALM) == CALM
    assert calm_range(WILD) == []
    assert calm_range([point for point in CALM if point.factor != 1]) == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_sentence_about_a_sweep_carries_its_numbers(lang):
    wide = plain(describe_sweep(WIDE, lang))
    for part in (f"{FACTORS[2]:.4g}", f"{FACTORS[5]:.4g}", "4", "9", "100", "100 %", "75 %"):
        assert part in wide
    calm = plain(describe_sweep(CALM, lang))
    assert "3 %" in calm
    assert f"{FACTORS[7]:.4g}" in calm
    wild = plain(describe_sweep(WILD, lang))
    assert "100 %" in wild
    assert len({wide, calm, wild}) == 3
    assert all("nan" not in said for said in (wide, calm, wild))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("made", [WIDE, CALM, WILD], ids=["wide", "calm", "wild"])
def test_every_factor_stands_once_on_the_curve_or_below_it(made, theme, lang):
    figure = sweep_figure(made, theme=theme, lang=lang)
    x = np.log10(FACTORS)
    error = np.array([point.error for point in made])
    line = curve(figure)
    np.testing.assert_array_equal(np.asarray(line.x, float), x)
    drawn = np.isfinite(error) & (error > 0)
    np.testing.assert_array_equal(np.asarray(line.y, float)[drawn], error[drawn])
    assert np.isnan(np.asarray(line.y, float)[~drawn]).all()
    below = marks(figure)
    np.testing.assert_array_equal(below.get("=", []), x[error == 0])
    np.testing.assert_array_equal(below.get("N", []), x[np.isnan(error)])
    assert list(bar(figure).y) == [point.changed for point in made]
    assert list(figure.layout.xaxis.ticktext) == ["10<sup>−2</sup>", "1", "10<sup>2</sup>"]
    assert json.loads(figure.to_json())


def test_the_table_of_a_sweep_has_a_row_a_factor():
    assert [row["factor"] for row in sweep_rows(WIDE)] == FACTORS
    assert sweep_rows(WIDE)[0]["changed_tokens"] == 1
    assert sweep_rows(WIDE)[8]["nan_positions"] == 0.75


def test_an_axis_without_a_number_says_nothing():
    """Where no bit differs, or nothing is left to compare, ticks would be made up; the marks are explained instead."""
    figure = layers_figure(CASES["all NaN"], theme="light", lang="en")
    assert figure.layout.yaxis.showticklabels is False
    [note] = [note.text for note in figure.layout.annotations]
    assert note.startswith("<b>=</b> no difference")
    assert "<b>N</b> nothing left" in note
    drawn = layers_figure(CASES["drift"], theme="light", lang="en")
    assert drawn.layout.yaxis.showticklabels is True
    assert "N" not in drawn.layout.annotations[0].text
