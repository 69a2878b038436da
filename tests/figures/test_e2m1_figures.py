"""The records and the figure of the E2M1 page."""

import pytest

from nvfp4viz.figures import e2m1
from nvfp4viz.formats import E2M1, e2m1_code_scalar, explain


def test_every_midpoint_is_a_tie_and_goes_to_the_even_code():
    rows = e2m1.rounding_rows()
    ties = [row for row in rows if row["tie"]]
    assert len(ties) == 14
    assert all(row["code"] % 2 == 0 for row in ties)
    assert all(row["stored"] == explain(E2M1, e2m1_code_scalar(row["number"])).value for row in rows)


def test_the_popular_product_is_wrong():
    product = e2m1.nibble_product(0x2, 0x3)
    assert (product.product, product.integers, product.mistaken) == (1.5, 6, 2.25)


def test_edges_show_what_a_float32_can_be():
    rows = dict(zip(map(repr, e2m1.EDGES), e2m1.edge_rows(), strict=True))
    assert rows["nan"].value == 6
    assert rows["-inf"].value == -6
    assert rows["-0.0"].code == 8


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_figure_shows_both_readings(theme, lang):
    readings = e2m1.code_readings()
    figure = e2m1.code_readings_figure(readings, theme=theme, lang=lang).to_dict()
    integers, values = figure["data"]
    assert list(integers["y"]) == list(range(16))
    assert list(values["y"]) == [explain(E2M1, code).value for code in range(16)]
    assert integers["name"] != values["name"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_sentence_counts_what_the_figure_shows(lang):
    readings = e2m1.code_readings()
    same = sum(reading.value == reading.integer for reading in readings)
    assert str(same) in e2m1.describe_code_readings(readings, lang)
    assert same == 1  # zero alone
