"""Records and figures about two-level scaling."""

import math

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.figures import scaling
from nvfp4viz.figures import scaling_plots as plots
from nvfp4viz.quant import NVFP4_RECIPES, trace_block
from nvfp4viz.quant.compare import compare_recipes, compare_scaling, granularity_ladder, sweep_headroom

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


def _bf16(values) -> np.ndarray:
    return np.asarray(np.asarray(values, np.float32), ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def x():
    return scaling.sample_tensor()


@pytest.fixture(scope="module")
def levels(x):
    return compare_scaling(x)


def test_the_sample_is_seeded_and_bf16(x):
    assert np.array_equal(x, scaling.sample_tensor())
    assert np.array_equal(x, _bf16(x).astype(np.float32))


@pytest.mark.parametrize(
    ("largest", "encode", "state"),
    [
        (6.0, 1.0, "survives"),
        (6.0, 448.0, "survives"),
        (6.0, 464.0, "survives"),  # rounded to 448, by no more than half a step
        (6.0, 465.0, "saturates"),
        (6.0, 2.0**-6, "survives"),
        (6.0, 2.0**-7, "subnormal"),
        (6.0, 2.0**-10, "dies"),  # a tie, and zero is the even side
        (6.0, 2.0**-10 * 1.01, "subnormal"),
        (0.0, 1.0, "zero"),
        (0.0, math.inf, "nan"),
        (6.0, math.inf, "saturates"),
        (6.0, math.nan, "nan"),
    ],
)
def test_the_state_of_a_block_follows_its_scale(largest, encode, state):
    trace = trace_block(_bf16([largest] * 16), encode, "ieee")
    assert scaling.block_state(trace) == state


def test_the_gauge_has_the_limits_of_e4m3():
    gauge = scaling.gauge_of(trace_block(_bf16([6.0] * 16), 1.0, "ieee"))
    assert gauge["value"] == 0.0
    assert [zone["from"] for zone in gauge["zones"]] == [-14.0, -10.0, -6.0, math.log2(464)]


@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
@pytest.mark.parametrize("encode", [0.0, math.inf, math.nan, -1.0, 1e-38, 1e38])
def test_the_gauge_draws_any_scale(recipe, encode):
    gauge = scaling.gauge_of(trace_block(_bf16(scaling.BLOCKS["typical"]), encode, recipe))
    assert gauge["value"] is None or math.isfinite(gauge["value"])


def test_the_contested_block_really_divides_the_implementations():
    traces = compare_recipes(_bf16(scaling.BLOCKS["contested"]), scaling.TENSOR_AMAX["contested"])
    rows = scaling.recipe_rows(traces)
    assert rows[0].name == "vllm-cuda"
    assert not any(rows[0].code_differs)
    assert scaling.outcomes(rows) >= 3


def test_the_histogram_counts_every_block_once(levels):
    record = plots.scale_histogram(levels[1], levels[2])
    assert sum(record.one) == sum(record.two) == record.blocks
    assert record.dead_one == levels[1].dead > record.blocks / 2
    assert record.dead_two == 0


def test_block_errors_are_shares(x, levels):
    none, _, two = (plots.block_errors(x, level) for level in levels)
    assert none.shape == (48, 24)
    assert (none >= 1).sum() > (two >= 1).sum() == 0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
class TestFigures:
    def test_histogram(self, levels, theme, lang):
        record = plots.scale_histogram(levels[1], levels[2])
        one, two = plots.scale_histogram_figure(record, theme=theme, lang=lang).to_dict()["data"]
        assert tuple(one["y"]) == record.one
        assert tuple(two["y"]) == record.two
        assert one["marker"]["pattern"]["shape"]  # never told by colour alone
        assert str(record.dead_one) in plots.describe_scale_histogram(record, lang)

    def test_headroom(self, x, theme, lang):
        points = sweep_headroom(x, scaling.HEADROOM_FACTORS)
        figure = plots.headroom_figure(points, 1.0, blocks=x.size // 16, theme=theme, lang=lang).to_dict()
        assert tuple(figure["data"][0]["y"]) == tuple(point.summary.sqnr_db for point in points)
        shapes = {trace["marker"]["pattern"]["shape"] for trace in figure["data"][1:]}
        assert len(shapes) == 3
        assert plots.describe_headroom(points, lang)

    def test_ladder(self, x, theme, lang):
        rungs = granularity_ladder(x)
        figure = plots.ladder_figure(rungs, theme=theme, lang=lang).to_dict()
        assert tuple(figure["data"][0]["x"]) == tuple(rung.summary.sqnr_db for rung in rungs)
        assert plots.describe_ladder(rungs, lang)

    def test_error_map(self, x, levels, theme, lang):
        figure = plots.error_map_figure(x, levels, theme=theme, lang=lang)
        heatmaps = [trace for trace in figure.data if trace.type == "heatmap"]
        assert [(trace.zmin, trace.zmax) for trace in heatmaps] == [(0, 1)] * 3
        for trace, level in zip(heatmaps, levels, strict=True):
            assert np.array_equal(np.asarray(trace.z), plots.block_errors(x, level))
            assert np.asarray(trace.z).dtype == np.float32  # a third of the bytes
        assert str(int((plots.block_errors(x, levels[1]) >= 1).sum())) in plots.describe_error_map(x, levels, lang)


def test_headroom_is_lopsided(x):
    """The sentence on the page: too small hurts at once, too large hardly."""
    points = {point.factor: point.summary.sqnr_db for point in sweep_headroom(x, scaling.HEADROOM_FACTORS)}
    assert points[1.0] - points[0.5] > 6
    assert points[1.0] - points[64.0] < 0.1
