"""Records and figures about the mega-kernel."""

from dataclasses import replace

import numpy as np
import pytest

from nvfp4viz.figures import mega_kernel as figures
from nvfp4viz.figures import mega_stations
from nvfp4viz.figures.tensor_core import bit_chart
from nvfp4viz.moe.mega_kernel_error import EFFECTS, LayerError

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


@pytest.fixture(scope="module", params=figures.DATA)
def layer(request):
    return figures.sample_layer(request.param)


def test_the_sample_meets_the_clamp_and_stays_within_its_bounds(layer):
    assert (layer.run.gate == 10).any()
    assert (np.abs(layer.run.up) == 10).any()
    assert all(stage.worst <= 1 for stage in layer.error.stages)


def test_weights_only_move_and_every_other_place_changes_numbers(layer):
    found = mega_stations.stations(layer)
    assert [each.kind for each in found] == ["moved", "fp8", "bf16", "fp8", "bf16", "bf16"]
    assert found[0].numbers == 2 * layer.w13.size
    assert not np.array_equal(layer.w13, layer.experts.w13)  # they do move
    for each in found:
        assert (each.changed > 0) == (each.kind != "moved")
        assert each.changed <= each.numbers


def test_a_weight_that_changes_on_the_way_is_counted(layer):
    broken = layer.experts.w13.copy()
    broken[1, 2, 3] ^= 0x11  # both nibbles of one byte
    seen = mega_stations.stations(replace(layer, experts=replace(layer.experts, w13=broken)))
    assert seen[0].changed == 2


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_places_are_drawn_in_order_and_fp8_is_hatched(layer, theme, lang):
    found = mega_stations.stations(layer)
    figure = mega_stations.stations_figure(found, theme=theme, lang=lang).to_dict()
    drawn = {place: share for trace in figure["data"] for place, share in zip(trace["y"], trace["x"], strict=True)}
    order = figure["layout"]["yaxis"]["categoryarray"]
    assert [drawn[place] for place in order] == [100 * each.changed / each.numbers for each in found]
    assert [trace["marker"]["pattern"]["shape"] for trace in figure["data"]] == ["", "/", ""]
    assert figure["layout"]["xaxis"]["range"][1] > 100  # a tick at the very end loses its number
    assert f"{found[0].numbers:,}" in mega_stations.describe_stations(found, lang)
    assert [row["changed"] for row in mega_stations.station_rows(found)] == [each.changed for each in found]


def test_fp8_does_most_and_the_accumulator_next_to_nothing(layer):
    assert layer.error.share(*figures.QUANTISING) > 0.99
    assert layer.error.share("first", "second") < 1e-9


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_effects(layer, theme, lang):
    figure = figures.effects_figure(layer.error, theme=theme, lang=lang).to_dict()
    (bars,) = figure["data"]
    values = [layer.error.relative(name) for name in EFFECTS]
    assert [x or 0 for x in bars["x"]] == values
    assert len(figure["layout"].get("annotations", [])) == values.count(0)  # no bar, but words
    hatched = [name for name, shape in zip(EFFECTS, bars["marker"]["pattern"]["shape"], strict=True) if shape]
    assert tuple(hatched) == figures.QUANTISING
    said = figures.describe_effects(layer.error, lang)
    assert figures.percent_of(layer.error.relative("total")) in said
    assert [row["step"] for row in figures.effect_rows(layer.error)] == list(EFFECTS)
    assert len(figures.stage_rows(layer.error)) == 6


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("limit", [2.0, 10.0])
def test_between(layer, theme, lang, limit):
    seen = figures.between_of(layer.run, 3, 1, limit)
    figure = figures.between_figure(seen, theme=theme, lang=lang).to_dict()
    before, clamped, after = figure["data"]
    assert len(before["x"]) + len(clamped["x"]) == 32
    assert list(clamped["x"]) == np.flatnonzero(seen.clamped).tolist()
    assert list(after["y"]) == seen.decoded.tolist()
    rows = figures.between_rows(seen)
    assert len(rows) == 32
    worst = int(np.abs(seen.decoded - seen.weighted).argmax())
    assert str(worst) in figures.describe_between(seen, lang)


def test_between_is_what_the_layer_did(layer):
    for route in (0, 7):
        for group in range(4):
            seen = figures.between_of(layer.run, route, group, 10.0)
            at = slice(32 * group, 32 * group + 32)
            np.testing.assert_array_equal(seen.weighted, layer.run.weighted[route, at])
            np.testing.assert_array_equal(seen.codes, layer.run.y_codes[route, at])
            assert seen.scale == layer.run.y_scales[route, group]


def test_a_clamped_element_is_one_that_the_limit_moved():
    gate, up = np.zeros((2, 32), np.float32)
    gate[:3], up[:4] = (10.4, 9.9, -20), (1, 2, 3, -11)
    assert np.flatnonzero(figures.between(gate, up, 1.0).clamped).tolist() == [0, 3]
    assert not figures.between(gate / 20, up / 20, 1.0).clamped.any()


@pytest.mark.parametrize("name", ["whole", "cut", "huge", "zeros"])
def test_the_chart_keeps_twenty_five_places(name):
    trace = figures.explain_step(figures.STEPS[name])
    chart = bit_chart(trace)
    assert chart.exponent - chart.cut == 25
    for row, term in zip(chart.rows, trace.terms, strict=False):
        kept = int(row.kept or "0", 2) * (row.sign or 1) << max(row.high - len(row.kept) + 1 - chart.cut, 0)
        assert kept == term.aligned


def test_products_of_one_step_never_cut_one_another():
    """The span of E4M3 times E2M1 fits between the largest exponent and the cut."""
    high, low = figures.product_span()
    assert (high, low) == (11, -10)
    assert low >= 8 + 2 - 25  # exponents of 448 and 6


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_shares_are_of_the_steps_squares_added_up_and_not_of_the_whole_error(lang):
    """Two steps that cancel: of 9 + 9 + 1 they make 18, of the error that is left (1) they make nothing."""
    effects = {name: np.zeros((1, 4)) for name in EFFECTS}
    effects["stage"][0, 0], effects["requantise"][0, 0], effects["bf16"][0, 0] = 3.0, -3.0, 1.0
    error = LayerError((), effects, np.full((1, 4), 10.0))
    assert error.share("stage", "requantise") == 18 / 19
    assert error.share("bf16") == 1 / 19
    said = figures.describe_effects(error, lang)
    assert figures.QUANTISING == ("stage", "requantise")
    for value in ("94.7 %", "5.26 %", " 5 %"):  # 18/19, 1/19 and the whole error over the output, 0.5/10
        assert value in said
    assert {"en": "squares of these steps, added up", "zh": "平方相加"}[lang] in said
    shares = {row["step"]: row["share"] for row in figures.effect_rows(error)}
    assert (shares["stage"], shares["requantise"], shares["bf16"]) == (9 / 19, 9 / 19, 1 / 19)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-15)  # roundings of an f64 quotient
