"""Records and figures about MXFP4 beside NVFP4."""

import numpy as np
import pytest

from nvfp4viz.figures import mxfp4
from nvfp4viz.figures.blocks import outlier_pair
from nvfp4viz.figures.words import listed
from nvfp4viz.quant.recipes import MXFP4_RECIPES
from nvfp4viz.quant.schemes import compare_rules, compare_schemes, layer_bytes, rule_binade

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


@pytest.fixture(scope="module")
def found():
    return {one.name: one for one in compare_schemes(outlier_pair(10.0)[0])}


@pytest.fixture(scope="module")
def traces():
    return compare_rules(mxfp4.sample_block(6.5))


def test_the_sample_has_the_maximum_that_was_asked_for():
    for factor in (1.0, mxfp4.TINY):
        block = mxfp4.sample_block(6.5, factor)
        assert np.abs(block).max() == np.float32(6.5 * factor)
    assert np.array_equal(mxfp4.sample_block(5.0), mxfp4.sample_block(5.0))


def test_a_tiny_sample_lies_below_deepgemm_s_floor():
    assert np.abs(mxfp4.sample_block(7.875, mxfp4.TINY)).max() < 1e-4


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
class TestFigures:
    def test_scales(self, found, theme, lang):
        bars = [d for d in mxfp4.scales_figure(found, theme=theme, lang=lang).to_dict()["data"] if d["type"] == "bar"]
        grids = [d for d in mxfp4.scales_figure(found, theme=theme, lang=lang).to_dict()["data"] if d["type"] != "bar"]
        for name, bar, grid in zip(("mxfp4", "nvfp4"), bars, grids, strict=True):
            assert sum(bar["y"]) == found[name].scale_bytes.size
            # Every scale in use is one that a byte can say: the mark of it lies under the bar.
            assert all(np.abs(np.array(grid["x"]) - x).min() < 1e-6 for x in bar["x"])  # log2 of a rounded product
        said = mxfp4.describe_scales(found, lang)
        for name in ("mxfp4", "nvfp4"):
            assert f"{found[name].summary.sqnr_db:.2f}" in said
            assert str(len(found[name].used())) in said
        assert sum(row["scheme"] == "nvfp4" for row in mxfp4.scale_rows(found)) == len(found["nvfp4"].used())
        assert [row["scheme"] for row in mxfp4.error_rows(found)] == ["mxfp4", "ue8m0_16", "nvfp4"]

    @pytest.mark.parametrize("exponent", [2, -15])
    def test_rules(self, traces, theme, lang, exponent):
        binade = rule_binade(exponent)
        figure = mxfp4.rules_figure(binade, 6.5, theme=theme, lang=lang).to_dict()
        lanes = figure["data"]
        for name in MXFP4_RECIPES:
            spans = sorted(
                (base, base + width)
                for trace in lanes
                for lane, base, width in zip(trace["y"], trace["base"], trace["x"], strict=False)
                if lane == name
            )
            assert spans[0][0] == binade.tops[0]
            assert spans[-1][1] == pytest.approx(2 * float(binade.tops[0]))
            assert [left for left, _ in spans[1:]] == pytest.approx([right for _, right in spans[:-1]])
        looks = {
            (lane["marker"].get("pattern", {}).get("shape", ""), lane["marker"]["color"] == "rgba(0,0,0,0)")
            for lane in lanes
        }
        assert len(looks) == 3  # hatch and fill: not by colour alone
        said = mxfp4.describe_rules(traces, lang)
        assert listed(lang, ("ocp-floor", "vllm-even")) in said
        assert all(f"{name} {float(trace.decoded[trace.top]):g}" in said for name, trace in traces.items())
        unclipped = mxfp4.describe_rules(compare_rules(mxfp4.sample_block(5.0)), lang)
        assert unclipped != said

    @pytest.mark.parametrize("layer", mxfp4.LAYERS)
    def test_storage(self, theme, lang, layer):
        made = {scheme: layer_bytes(mxfp4.matrices_of(layer), scheme) for scheme in mxfp4.SHIPPED}
        figure = mxfp4.storage_figure(made, theme=theme, lang=lang).to_dict()
        codes, scales = figure["data"]
        assert [note["text"] for note in figure["layout"]["annotations"]] == ["4 + 0.25", "4 + 0.5"]
        assert list(codes["x"]) == [4, 4]
        assert list(scales["x"]) == [0.25, 0.5]
        said = mxfp4.describe_storage(made, lang)
        assert all(f"{one.total:,}" in said for one in made.values())
        assert [row["scheme"] for row in mxfp4.storage_rows(made)] == list(mxfp4.SHIPPED)


def test_rows_are_complete(traces):
    rows = mxfp4.element_rows(traces)
    assert len(rows) == 32 * len(MXFP4_RECIPES)
    assert sum(bool(row["beyond"]) for row in rows) == sum(trace.summary.clipped for trace in traces.values())
    assert {row["rule"] for row in mxfp4.run_rows(rule_binade(2))} == set(MXFP4_RECIPES)


def test_every_use_names_where_it_was_read():
    assert all("#" in row["source"] and row["scheme"] for row in mxfp4.use_rows())
