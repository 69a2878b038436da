"""The strip of one scale among its peers."""

import numpy as np
import pytest

from nvfp4viz.figures.peers import Peers, describe_peers, peers_figure, peers_rows


def strip(picked: int) -> Peers:
    values = np.array([1.0, 2.0, np.nan, 3.0, 0.0], np.float32)
    return Peers("input_scale", 1, "down", values, ("present", "present", "missing", "present", "zero"), picked)


def test_the_median_is_of_the_others_alone():
    assert strip(0).median == 2.5
    assert strip(0).ratio == 1 / 2.5
    assert strip(2).ratio is None


def test_the_robust_z_of_a_value_among_the_others():
    """log2 of the peers of expert 0: −1, 0, 1, 2, 3; median 1, MAD 1."""
    peers = Peers("input_scale", 0, "down", np.float32([16, 0.5, 1, 2, 4, 8]), ("present",) * 6, 0)
    assert peers.robust_z == pytest.approx(3 / 1.4826, rel=1e-12)  # one division, rounded once
    assert "**+2.02**" in describe_peers(peers, "en")
    below = Peers("input_scale", 0, "down", np.float32([0.25, 0.5, 1, 2, 4, 8]), ("present",) * 6, 0)
    assert "**−2.02**" in describe_peers(below, "zh")
    # The outlier detector's own rule: beyond 8 of these, and 6 octaves.
    far = Peers("input_scale", 0, "down", np.float32([2**12, 0.5, 1, 2, 4, 8]), ("present",) * 6, 0)
    assert abs(far.robust_z) < 8
    assert strip(2).robust_z is None
    assert strip(4).robust_z is None


@pytest.mark.parametrize(("value", "z"), [(1.0, 0.0), (1.5, None)])
def test_equal_peers_have_no_spread_to_measure_with(value, z):
    peers = Peers("input_scale", 0, "down", np.float32([value, 1, 1, 1]), ("present",) * 4, 0)
    assert peers.robust_z == z
    said = describe_peers(peers, "en")
    assert ("MAD is zero" in said) == (z is None)
    alone = Peers("input_scale", 0, "down", np.float32([1, np.nan]), ("present", "missing"), 0)
    assert alone.robust_z is None
    assert "robust" not in describe_peers(alone, "en")


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("picked", [0, 2, 4])
def test_every_expert_has_a_sentence(lang, picked):
    assert str(picked) in describe_peers(strip(picked), lang)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_has_no_logarithm_stands_below_with_its_mark(theme):
    figure = peers_figure(strip(2), theme=theme, lang="en")
    stored, unusable = figure.data[0], figure.data[1]
    assert list(stored.x) == [0, 1, 3]
    assert list(unusable.text) == ["∅", "0"]
    assert max(unusable.y) < min(stored.y)


def test_the_table_has_a_row_an_expert():
    assert [row["value"] for row in peers_rows(strip(0))][:3] == [1.0, 2.0, None]


def test_the_axis_has_ticks_where_the_numbers_are():
    """Weight scales of one layer differ by a few per cent: no decade lies among them."""
    values = np.float32([1.31e-4, 1.52e-4, 1.77e-4])
    figure = peers_figure(Peers("weight_scale_2", 0, "gate", values, ("present",) * 3, 0), theme="light", lang="en")
    ticks = np.asarray(figure.layout.yaxis.tickvals)
    assert len(ticks) >= 2
    low, high = (10.0**limit for limit in figure.layout.yaxis.range)
    assert (low < ticks).all()
    assert (ticks < high).all()
    assert not figure.layout.annotations  # no gutter for what is not there


def test_without_any_number_the_axis_has_no_ticks():
    values = np.full(3, np.nan, np.float32)
    figure = peers_figure(Peers("input_scale", 0, "gate", values, ("missing",) * 3, 0), theme="dark", lang="zh")
    assert len(figure.layout.yaxis.tickvals) == 0
    assert list(figure.data[1].text) == ["∅"] * 3


@pytest.mark.parametrize("spread", [1.5, 2500.0, 1e12])
@pytest.mark.parametrize("status", ["present", "missing"])
def test_the_picked_value_s_ring_is_never_cut(spread, status):
    """At the top, at the bottom, and in the gutter; a ring of 17 pixels on a plot of some 200."""
    values = np.float32([1e-3, 1.1e-3, np.nan if status == "missing" else 1.05e-3, 1e-3 * spread])
    for picked in range(4):
        peers = Peers("input_scale", 0, "down", values, ("present", "present", status, "present"), picked)
        figure = peers_figure(peers, theme="light", lang="en")
        low, high = figure.layout.yaxis.range
        at = np.log10(figure.data[-1].y[0])
        room = figure.data[-1].marker.size / 2 / 200 * (high - low)
        assert low + room <= at <= high - room


@pytest.mark.parametrize("experts", [8, 128, 384])
def test_the_ring_of_the_last_expert_is_whole_on_a_phone(experts):
    """Half a ring, in experts, on a plot of 290 pixels; few experts keep their one place at either side."""
    values = np.full(experts, 2e-3, np.float32)
    peers = Peers("input_scale", 0, "down", values, ("present",) * experts, experts - 1)
    low, high = peers_figure(peers, theme="light", lang="en").layout.xaxis.range
    assert high == experts - 1 - low
    assert low == -1 if experts == 8 else -low >= 8.5 / 290 * (high - low)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    ("factor", "said"), [(2652.4, "2,652 ×"), (1.23456, "1.235 ×"), (1e6, "1,000,000 ×"), (1 / 40960, "0.00002441 ×")]
)
def test_the_ratio_has_four_digits_and_no_exponent(lang, factor, said):
    peers = Peers("input_scale", 0, "down", np.float32([factor, 1, 1, 1]), ("present",) * 4, 0)
    assert (said if lang == "en" else said.replace("×", "倍")) in describe_peers(peers, lang)
