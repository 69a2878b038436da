"""Figures about online quantisation show their records."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.figures import online as figures
from nvfp4viz.quant.online import WAYS, compare_ranks, compare_ways, peak_buffers


@pytest.fixture(scope="module")
def weights():
    return (np.random.default_rng(1).standard_normal((4, 32, 64)) / 10).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_bars_are_shares_of_codes_and_of_scales(weights, theme, lang):
    ways = compare_ways(weights)
    codes, scales = figures.changed_figure(figures.way_shares(ways, lang), theme=theme, lang=lang).data
    assert list(codes.x) == [one.codes_differ / one.codes for one in ways]
    assert list(scales.x) == [one.scales_differ / one.blocks for one in ways]
    # A pattern beside the colour tells them apart.
    assert codes.marker.pattern.shape != scales.marker.pattern.shape
    assert f"{ways[2].codes_differ:,}" in figures.describe_ways(ways, lang)
    assert [row["codes_that_differ"] for row in figures.way_rows(ways)] == [one.codes_differ for one in ways]


def test_ranks_are_named_and_counted(weights):
    results = compare_ranks(weights, 2, "gate_up")
    rows = figures.rank_shares(results, "en")
    assert [row[0] for row in rows] == ["shared maximum", "local maxima"]
    assert rows[0][1:] == (0, 0)
    assert f"with local maxima {results[1].codes_differ:,}" in figures.describe_ranks(results, "en")
    assert [row["maximum"] for row in figures.rank_rows(results)] == ["shared", "local"]


@pytest.mark.parametrize("shape", figures.SHAPES.values())
def test_memory_bars_add_up_to_the_peak(shape):
    peaks = {way: peak_buffers(shape, way) for way in WAYS}
    elements = int(np.prod(shape))
    figure = figures.memory_figure(peaks, elements, theme="dark", lang="zh")
    for k, way in enumerate(WAYS):
        assert sum(trace.x[k] for trace in figure.data) * elements == pytest.approx(sum(peaks[way].values()), rel=1e-12)
    assert "0.5625 bytes a weight, folding and casting 6: 10.7 times" in figures.describe_memory(peaks, elements, "en")
    assert sum(row["bytes"] for row in figures.memory_rows(peaks)) == sum(map(sum, map(dict.values, peaks.values())))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_measured_peaks_stand_on_the_bars_as_diamonds(lang):
    shape = figures.SHAPES["tiny_moe"]
    peaks = {way: peak_buffers(shape, way) for way in WAYS}
    elements = int(np.prod(shape))
    measured = {way: sum(found.values()) + 1000 for way, found in peaks.items()}
    figure = figures.memory_figure(peaks, elements, measured, theme="light", lang=lang)
    marks = figure.data[-1]
    assert marks.marker.symbol == "diamond"
    assert list(marks.x) == [one / elements for one in measured.values()]
    assert list(marks.y) == list(figure.data[0].y)
    assert f"{measured['direct'] / elements:.4g}" in figures.describe_memory(peaks, elements, lang, measured)
    rows = figures.memory_rows(peaks, measured)
    assert [row["bytes"] for row in rows if row["how"] == "measured"] == list(measured.values())


def test_nothing_changed_still_draws(weights):
    rows = [("direct", 0.0, 0.0)]
    figure = figures.changed_figure(rows, theme="light", lang="en")
    assert figure.layout.xaxis.range[1] > 0
