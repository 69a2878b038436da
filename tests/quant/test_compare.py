"""What scales are for: the measurements that the two-level scaling page shows."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.formats import decode_e2m1, encode_e2m1


def spread_matrix() -> np.ndarray:
    """Rows of 16 blocks whose sizes run over 2^0 … 2^-15."""
    x = np.random.default_rng(0).standard_normal((32, 16, 16))
    return np.ldexp(x, -np.arange(16)[None, :, None]).reshape(32, 256).astype(np.float32)


def test_range_facts() -> None:
    facts = quant.range_facts()
    assert facts.product == facts.element_max * facts.scale_max == 2688
    assert facts.scale_span == 448 * 2**9
    # at the limit a block dies, just above it lives: run, not believed
    encode = quant.global_scale(2688.0, "ieee")
    for step, dead in ((0, True), (1, False)):
        top = (np.array([facts.dies_below * 2688], np.float32).view(np.int32) + step).view(np.float32)[0]
        q = quant.quantize(np.full((1, 16), top), recipe="ieee", global_scale=encode)
        assert (q.scales.item() == 0) == dead
    coarse = quant.quantize(
        np.full((1, 16), np.float32(facts.coarse_below * 2688)), recipe="ieee", global_scale=encode
    )  # fmt: skip
    assert coarse.scales.item() == 0x08  # the smallest normal scale


def test_levels_decode_to_what_their_parts_say() -> None:
    x = spread_matrix()
    none, one, two = quant.compare_scaling(x)
    assert [level.level for level in (none, one, two)] == ["none", "one", "two"]
    assert np.array_equal(none.decoded, decode_e2m1(encode_e2m1(x)))
    assert none.block_scales is None
    assert one.global_scale == 1
    assert two.global_scale == quant.global_scale(quant.amax(x), "ieee")
    for level in (none, one, two):
        assert np.array_equal(level.error, level.decoded - x)
        assert level.summary.mse == pytest.approx(float(np.mean(level.error.astype(np.float64) ** 2)), rel=1e-6)
        assert level.summary.zeroed == int(((x != 0) & (level.decoded == 0)).sum())


def test_each_level_loses_less_than_the_one_before() -> None:
    none, one, two = quant.compare_scaling(spread_matrix())
    assert none.summary.mse > one.summary.mse > two.summary.mse
    assert none.summary.zeroed > one.summary.zeroed > two.summary.zeroed
    assert one.subnormal > two.subnormal
    assert one.dead > two.dead


def test_one_level_saturates_where_two_do_not() -> None:
    x = np.full((1, 32), 3000, np.float32)
    none, one, two = quant.compare_scaling(x)
    assert (none.summary.clipped, one.saturated, one.summary.clipped, two.saturated) == (32, 2, 32, 0)
    assert two.summary.mse < 1e-6
    assert np.abs(one.decoded).max() == 2688


@pytest.mark.parametrize("seed", range(40))
def test_the_right_maximum_saturates_nothing(seed: int) -> None:
    """Its own block asks for 448, which a rounding may put an ulp above: that is no saturation."""
    x = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
    exact, half = quant.sweep_headroom(x, [1.0, 0.5])
    assert exact.saturated == 0
    assert half.saturated > 0


def test_zeros_are_no_special_case() -> None:
    for level in quant.compare_scaling(np.zeros((2, 32), np.float32)):
        assert not level.decoded.any()
        assert level.dead == 0
        assert level.summary.sqnr_db == float("inf")


def test_the_ladder_gets_better_as_fewer_elements_share() -> None:
    experts = np.stack([spread_matrix(), spread_matrix() * np.float32(50)])
    rungs = quant.granularity_ladder(experts, group=64)
    assert [r.name for r in rungs] == ["tensor", "expert", "channel", "group", "block", "nvfp4"]
    assert [r.elements_per_scale for r in rungs] == [2 * 32 * 256, 32 * 256, 256, 64, 16, 16]
    errors = [r.summary.mse for r in rungs[:-1]]
    assert errors == sorted(errors, reverse=True)
    # E4M3 scales cost a quarter of float32 ones and lose little against them
    assert rungs[-1].scale_bits == pytest.approx(0.5 + 64 / experts.size)
    assert rungs[-2].scale_bits == 2.0
    assert rungs[-1].summary.sqnr_db > rungs[-3].summary.sqnr_db
    single = quant.granularity_ladder(spread_matrix(), group=64)
    assert [r.name for r in single] == ["tensor", "channel", "group", "block", "nvfp4"]


def test_a_rung_is_its_definition() -> None:
    """Channel scales recomputed row by row."""
    x = spread_matrix()
    rung = next(r for r in quant.granularity_ladder(x, group=64) if r.name == "channel")
    total = 0.0
    for row in x:
        scale = np.abs(row).max() / np.float32(6)
        decoded = decode_e2m1(encode_e2m1(row / scale)) * scale
        total += float(((decoded.astype(np.float64) - row) ** 2).sum())
    assert rung.summary.mse == pytest.approx(total / x.size, rel=1e-9)


def test_headroom_costs_at_both_ends() -> None:
    x = spread_matrix()
    points = {p.factor: p for p in quant.sweep_headroom(x, [0.125, 1.0, 2.0, 4096.0])}
    assert points[0.125].saturated > 0
    assert points[1.0].saturated == points[1.0].dead == 0
    assert points[4096.0].dead > 0
    assert points[1.0].summary.mse < points[0.125].summary.mse
    assert points[1.0].summary.zeroed < points[4096.0].summary.zeroed
    for factor, point in points.items():
        assert point.global_scale == quant.global_scale(np.float32(factor) * quant.amax(x), "ieee")


def test_a_power_of_two_of_headroom_is_free_while_no_scale_leaves_the_normal_range() -> None:
    """The scale of every block moves by whole binades, so codes and decoded values stay."""
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    one, two = quant.sweep_headroom(x, [1.0, 2.0])
    assert one.summary == two.summary
