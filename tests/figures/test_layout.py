"""What every figure has in common, and the form in which the page draws it once."""

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from nvfp4viz.figures.layout import ABOVE_LEGEND, base_layout, drawn_once, room_for


@pytest.fixture
def figure():
    figure = go.Figure(
        go.Heatmap(z=np.array([[1.0, np.nan], [0.5, 4.0]]), customdata=np.array([["a", "b"], ["c", "d"]]))
    )
    figure.add_trace({"type": "bar", "x": np.arange(2), "y": [1, 2], "marker": {"color": np.array([3.5, 4.5])}})
    figure.layout = base_layout("light", height=200)
    return figure


def test_a_figure_of_the_page_is_plain_lists_under_one_number_without_a_template(figure):
    written = json.loads(drawn_once(figure).to_json())
    assert "bdata" not in json.dumps(written)
    assert "template" not in written["layout"]
    assert written["layout"]["datarevision"] == 1


def test_it_holds_the_same_values(figure):
    heatmap, bar = json.loads(drawn_once(figure).to_json())["data"]
    assert heatmap["z"] == [[1.0, None], [0.5, 4.0]]
    assert heatmap["customdata"] == [["a", "b"], ["c", "d"]]
    assert (bar["x"], bar["y"], bar["marker"]["color"]) == ([0, 1], [1, 2], [3.5, 4.5])


def test_its_layout_is_otherwise_untouched(figure):
    before = json.loads(figure.to_json())["layout"]
    after = json.loads(drawn_once(figure).to_json())["layout"]
    del before["template"], after["datarevision"]
    assert after == before


def test_a_figure_may_be_settled_twice(figure):
    once = drawn_once(figure).to_json()
    assert drawn_once(figure).to_json() == once


def bars(names, **layout):
    traces = [go.Bar(x=[1.0] * len(names), y=names, orientation="h", name=name) for name in ("codes", "scales")]
    return go.Figure(traces, base_layout("light", height=200, **layout))


def test_names_at_the_left_and_a_legend_above_get_their_room_before_plotly_looks_for_it():
    margin = drawn_once(bars(["a quite long name", "short"])).layout.margin
    assert margin.l == room_for(["a quite long name"]) > 100
    assert margin.t == ABOVE_LEGEND
    assert drawn_once(bars(["a<br>long name", "b"])).layout.margin.l == room_for(["long name"])


def test_margins_that_a_figure_chose_and_axes_without_names_stay_as_they_are():
    assert drawn_once(bars(["a quite long name"], margin={"l": 60, "t": 30})).layout.margin.to_plotly_json() == {
        "l": 60,
        "t": 30,
        "r": 8,
        "b": 30,
    }
    assert drawn_once(bars(["a quite long name"], yaxis={"showticklabels": False})).layout.margin.l == 8
    assert drawn_once(bars([1, 2], showlegend=False)).layout.margin.to_plotly_json()["t"] == 24
