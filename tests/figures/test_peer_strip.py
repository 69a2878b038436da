"""The strip of one scale among its peers."""

import math
import re

import numpy as np
import pytest

from nvfp4viz.figures.peers import HEIGHT, RING, Peers, describe_peers, peer_frame, peers_drawing, peers_rows


def strip(picked: int) -> Peers:
    values = np.array([1.0, 2.0, np.nan, 3.0, 0.0], np.float32)
    return Peers("input_scale", 1, "down", values, ("present", "present", "missing", "present", "zero"), picked)


def test_the_median_is_of_the_others_alone():
    # 2 and 3, in log space.
    assert strip(0).median == pytest.approx(math.sqrt(6), rel=1e-15)  # log2 and 2^x round once each
    assert strip(0).ratio == 1 / strip(0).median
    assert strip(2).ratio is None


def test_strip_and_finding_give_one_median():
    """Beside a subnormal, which neither counts as a peer."""
    values = np.float32([2.0, 1e-40, 1e-3, 1.25e-3, 1.5e-3, 2e-3])
    peers = Peers("input_scale", 0, "down", values, ("outlier", "subnormal", *("present",) * 4), 0)
    assert peers.median == pytest.approx(math.sqrt(1.25e-3 * 1.5e-3), rel=1e-6)  # the stored numbers are float32
    assert "4 " in describe_peers(peers, "en")
    far = Peers("input_scale", 0, "down", values, peers.status, 1)
    assert (far.ratio, far.robust_z) == (None, None)
    assert [text for *_, text in drawn(peers, "b")] == ["s"]


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


def drawn(peers, what, lang="en"):
    """(left in per cent, top in pixels) of every mark of a kind, with what it is told by."""
    markup = peers_drawing(peers, alt="one slot", lang=lang)
    field = markup[markup.index('class="field"') :]
    found = re.findall(rf'<{what} style="left:([\d.-]+)%;top:([\d.-]+)px"(?: title="([^"]*)")?>([^<]*)<', field)
    return [(float(left), float(top), said, text) for left, top, said, text in found]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_has_no_logarithm_stands_below_with_its_mark(lang):
    stored, unusable = (drawn(strip(2), what, lang) for what in ('i class="dot"', "b"))
    assert [said for *_, said, _ in stored] == ["0: 1", "1: 2", "3: 3"]
    assert [text for *_, text in unusable] == ["∅", "0"]
    assert min(top for _, top, *_ in unusable) > max(top for _, top, *_ in stored)
    (ring,) = drawn(strip(2), 'i class="ring"', lang)
    assert ring[:2] == unusable[0][:2]


def test_larger_is_higher_and_experts_go_from_left_to_right():
    marks = drawn(strip(0), 'i class="dot"')
    assert [left for left, *_ in marks] == sorted(left for left, *_ in marks)
    assert [top for _, top, *_ in marks] == sorted((top for _, top, *_ in marks), reverse=True)
    frame = peer_frame(strip(0))
    assert marks[1][1] == pytest.approx(frame.down(np.log10(2)), abs=0.05)


def test_the_table_has_a_row_an_expert():
    assert [row["value"] for row in peers_rows(strip(0))][:3] == [1.0, 2.0, None]


def test_the_axis_has_ticks_where_the_numbers_are():
    """Weight scales of one layer differ by a few per cent: no decade lies among them."""
    values = np.float32([1.31e-4, 1.52e-4, 1.77e-4])
    peers = Peers("weight_scale_2", 0, "gate", values, ("present",) * 3, 0)
    frame = peer_frame(peers)
    ticks = np.array([value for value, _ in frame.ticks])
    assert len(ticks) >= 2
    assert (10**frame.bottom < ticks).all()
    assert (ticks < 10**frame.top).all()
    assert "<small" not in peers_drawing(peers, alt="", lang="en")  # no gutter for what is not there


def test_many_decades_get_a_few_of_their_powers():
    peers = Peers("input_scale", 0, "down", np.float32([1e-30, 1.0, 1e30]), ("present",) * 3, 0)
    ticks = peer_frame(peers).ticks
    assert 2 <= len(ticks) <= 8
    assert all(value == float(f"1e{round(np.log10(value))}") for value, _ in ticks)
    assert (1.0, "10⁰") in ticks


def test_without_any_number_the_axis_has_no_ticks():
    values = np.full(3, np.nan, np.float32)
    peers = Peers("input_scale", 0, "gate", values, ("missing",) * 3, 0)
    assert peer_frame(peers).ticks == ()
    assert [text for *_, text in drawn(peers, "b", "zh")] == ["∅"] * 3


@pytest.mark.parametrize("experts", [1, 8, 64, 128, 256, 512, 4096])
def test_a_few_experts_have_their_number_below(experts):
    peers = Peers("input_scale", 0, "down", np.full(experts, 2e-3, np.float32), ("present",) * experts, 0)
    assert 1 <= len(peer_frame(peers).experts) <= 8


@pytest.mark.parametrize("spread", [1.5, 2500.0, 1e12])
@pytest.mark.parametrize("status", ["present", "missing"])
def test_the_picked_value_s_ring_is_never_cut(spread, status):
    """At the top, at the bottom, and in the gutter."""
    values = np.float32([1e-3, 1.1e-3, np.nan if status == "missing" else 1.05e-3, 1e-3 * spread])
    for picked in range(4):
        peers = Peers("input_scale", 0, "down", values, ("present", "present", status, "present"), picked)
        ((_, top, *_),) = drawn(peers, 'i class="ring"')
        assert RING / 2 <= top <= HEIGHT - RING / 2


@pytest.mark.parametrize("experts", [8, 128, 384])
def test_the_ring_of_the_last_expert_is_whole_on_a_phone(experts):
    """Half a ring, in experts, on a plot of 290 pixels; few experts keep their one place at either side."""
    values = np.full(experts, 2e-3, np.float32)
    peers = Peers("input_scale", 0, "down", values, ("present",) * experts, experts - 1)
    frame = peer_frame(peers)
    assert frame.right == experts - 1 - frame.left
    assert frame.left == -1 if experts == 8 else -frame.left >= RING / 2 / 290 * (frame.right - frame.left)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2652.4, "2,652 ×"),
        (1.23456, "1.235 ×"),
        (1e6, "1,000,000 ×"),
        (1 / 40960, "0.00002441 ×"),
        (2.0**100, "1.268 × 10³⁰ ×"),
    ],
)
def test_the_ratio_has_four_digits_and_no_exponent_while_it_can_be_read(lang, factor, said):
    peers = Peers("input_scale", 0, "down", np.float32([factor, 1, 1, 1]), ("present",) * 4, 0)
    assert (said if lang == "en" else said.removesuffix("×") + "倍") in describe_peers(peers, lang)
