"""Records and figures about blocks in a GEMM."""

from fractions import Fraction

import numpy as np
import pytest

from nvfp4viz.figures import blocks
from nvfp4viz.quant.grouping import GROUPINGS, compare_grouping, compare_tensor, quantize_along

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


@pytest.fixture(scope="module")
def inner():
    return blocks.inner_sum(3, 5)


@pytest.fixture(scope="module")
def found():
    return compare_grouping(*blocks.outlier_pair(40.0))


def test_samples_are_seeded():
    for first, again in (
        (blocks.outlier_pair(10.0), blocks.outlier_pair(10.0)),
        (blocks.inner_pair(), blocks.inner_pair()),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("along", GROUPINGS)
def test_an_inner_sum_is_the_exact_output(inner, along):
    x, w = (quantize_along(operand, along) for operand in blocks.inner_pair())
    assert len(inner.products[along]) == 64
    for run in inner.runs[along]:
        assert run.dot == sum(Fraction(product) for product in inner.products[along][run.start : run.stop])
    exact = sum(
        Fraction(product) * Fraction(float(x.element_scales[3, k])) * Fraction(float(w.element_scales[5, k]))
        for k, product in enumerate(inner.products[along])
    )
    assert inner.total(along) == float(exact)


def test_the_sentence_of_the_page(inner):
    """Along K four scales stand in the sum of 64 products, along the rows sixty-four."""
    assert {name: len(runs) for name, runs in inner.runs.items()} == {"k": 4, "rows": 64, "tile": 16}


def test_outliers_decide_the_best_grouping(found):
    assert blocks.best(found) == "rows"
    assert blocks.best(found) != "k"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
class TestFigures:
    @pytest.mark.parametrize("along", GROUPINGS)
    def test_inner(self, inner, theme, lang, along):
        bars, *lanes, row = blocks.inner_figure(inner, along, theme=theme, lang=lang).to_dict()["data"]
        assert (row["base"], row["width"]) == (inner.m, 64)
        assert tuple(bars["y"]) == inner.products[along]
        for name, lane in zip(GROUPINGS, lanes, strict=True):
            assert sum(lane["width"]) == 64
            assert len(lane["x"]) == len(inner.runs[name])
        said = blocks.describe_inner(inner, lang)
        assert all(str(number) in said for number in (4, 16, 64))
        assert len(blocks.run_rows(inner, along)) == len(inner.runs[along])

    def test_one_grouping_alone_leaves_the_others_out(self, inner, theme, lang):
        figure = blocks.inner_figure(inner, "tile", shown=("tile",), theme=theme, lang=lang).to_dict()
        _, lane, _ = figure["data"]
        assert len(lane["x"]) == len(inner.runs["tile"])
        assert [name.endswith(": 16") for name in figure["layout"]["yaxis2"]["ticktext"]] == [True]

    @pytest.mark.parametrize("m", [0, 3, 15])
    def test_a_block_of_each_direction_stands_on_the_row_that_is_summed(self, theme, lang, m):
        figure = blocks.inner_figure(blocks.inner_sum(m, 5), "k", shown=("k",), theme=theme, lang=lang).to_dict()
        for shape in figure["layout"]["shapes"]:
            assert shape["y0"] <= m < shape["y1"]
            assert (shape["y1"] - shape["y0"]) * (shape["x1"] - shape["x0"]) == 16
        lengths = [shape["x1"] - shape["x0"] for shape in figure["layout"]["shapes"]]
        assert lengths == [16, 1, 4]

    def test_error(self, found, theme, lang):
        bars = blocks.error_figure(found, theme=theme, lang=lang).to_dict()["data"]
        for one, bar in zip(found, bars, strict=True):
            assert list(bar["y"]) == [one.x.sqnr_db, one.w.sqnr_db, one.y.sqnr_db]
        assert len({bar["marker"].get("pattern", {}).get("shape", "") for bar in bars}) == 3  # not by colour alone
        said = blocks.describe_error(found, lang)
        assert all(f"{one.y.sqnr_db:.1f}" in said and f"{one.x.zeroed:,}" in said for one in found)
        assert [row["grouping"] for row in blocks.error_rows(found)] == list(GROUPINGS)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_one_tensor_s_bars_hold_what_the_library_measured(theme):
    x = np.random.default_rng(8).standard_normal((32, 32)).astype(np.float32)
    found = compare_tensor(x)
    figure = blocks.tensor_figure(found, theme=theme, lang="en")
    assert [bar.y[0] for bar in figure.data] == [one.error.sqnr_db for one in found]
    # Never by colour alone: each grouping has a pattern of its own.
    assert len({bar.marker.pattern.shape for bar in figure.data}) == len(found)


def test_an_exact_copy_is_drawn_and_said_as_infinite():
    decoded = quantize_along(np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32), "k").decoded
    found = compare_tensor(decoded)
    assert found[0].error.sqnr_db == np.inf
    figure = blocks.tensor_figure(found, theme="light", lang="zh")
    assert all(np.isfinite(bar.y[0]) for bar in figure.data)
    assert figure.data[0].text[0] == "∞"
    assert "∞ dB" in blocks.describe_tensor(found, "en")
    assert [row["grouping"] for row in blocks.tensor_rows(found)] == list(GROUPINGS)
