"""The mega-kernel against float64: within the derived bound everywhere, and a broken kernel is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.formats import pack_nibbles
from nvfp4viz.moe.mega_kernel import prepare_mega_experts, run_mega_kernel
from nvfp4viz.moe.mega_kernel_error import (
    EFFECTS,
    SILU_SLOPE,
    compare_float64,
    decoded_e4m3,
    decoded_mxfp4,
    product_bound,
)
from nvfp4viz.quant import mma_k32
from nvfp4viz.quant.tensor_core_k32_step import mma_step_k32_trace
from tests.moe.test_mega_kernel import routes_of, weights_of


def operands(rng, m=24, n=20, k=128, low=118, high=134):
    a = rng.integers(0, 256, (m, k), dtype=np.uint8)
    a[(a & 0x7F) == 0x7F] = 0x38
    scales = [rng.integers(low, high, (rows, k // 32)).astype(np.uint8) for rows in (m, n)]
    return a, scales[0], pack_nibbles(rng.integers(0, 16, (n, k), dtype=np.uint8)), scales[1]


def exact_product(a, sa, b, sb):
    return decoded_e4m3(a, sa) @ decoded_mxfp4(b, sb).T


@pytest.mark.parametrize(("low", "high"), [(126, 129), (118, 134), (100, 150), (0, 100), (0, 20)])
@pytest.mark.parametrize("k", [32, 256])
def test_products_stay_within_their_bound(low, high, k):
    rng = np.random.default_rng(low + k)
    made = operands(rng, k=k, low=low, high=high)
    error = np.abs(mma_k32(*made).astype(np.float64) - exact_product(*made))
    assert (error <= product_bound(*made)).all()


def test_the_bound_counts_what_is_really_cut_off():
    """From the scalar's own account of a step: no term loses a whole unit, and the unit is at most the bound's."""
    rng = np.random.default_rng(1)
    a, sa, b, sb = operands(rng, m=6, n=6, k=32, low=110, high=140)
    bound = product_bound(a, sa, b, sb)
    codes = np.stack([b & 15, b >> 4], axis=-1).reshape(6, 32)
    for m, n in np.ndindex(6, 6):
        trace = mma_step_k32_trace(a[m], codes[n], sa[m, 0], sb[n, 0], 0.0)
        unit = 2.0 ** (trace.max_exponent - 25)
        assert all(abs(term.lost) < unit for term in trace.terms)
        assert 33 * unit <= bound[m, n]


def test_an_accumulator_of_thirteen_places_breaks_the_bound():
    """The bound is narrow enough to tell 25 places from 13, and to see one wrong code."""
    rng = np.random.default_rng(2)
    made = operands(rng, k=256, low=124, high=131)
    exact, bound = exact_product(*made), product_bound(*made)
    top = np.floor(np.log2(np.abs(exact).max()))
    coarse = np.trunc(exact * 2.0 ** (13 - top)) * 2.0 ** (top - 13)
    assert (np.abs(coarse - exact) > bound).any()
    wrong = made[2].copy()
    wrong[3, 7] ^= 0x04
    found = mma_k32(made[0], made[1], wrong, made[3]).astype(np.float64)
    assert (np.abs(found - exact) > bound)[:, 3].any()
    assert (np.abs(found - exact) <= bound)[:, :3].all()


def test_the_slope_of_silu_is_below_what_is_claimed():
    x = np.linspace(-30, 30, 2_000_001)
    s = 1 / (1 + np.exp(-x))
    slope = np.abs(s * (1 + x * (1 - s))).max()
    assert 1.09 < slope < SILU_SLOPE


def layer(seed, *, outliers=False, size=0.25, hidden=256):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, hidden))
    if outliers:
        x[:, ::37] *= 40
    ids, weights = routes_of(rng, tokens=5)
    experts = prepare_mega_experts(*weights_of(rng, hidden=hidden, size=size))
    return x.astype(ml_dtypes.bfloat16), ids, weights, experts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [{}, {"outliers": True}, {"size": 1e-3}, {"size": 4.0}], ids=str)
def test_every_place_of_the_layer_stays_within_its_bound(seed, kind):
    x, ids, weights, experts = layer(seed, **kind)
    found = compare_float64(x, run_mega_kernel(x, ids, weights, experts), experts)
    assert [stage.id for stage in found.stages] == [
        "staged", "first", "activated", "requantised", "second", "out",
    ]  # fmt: skip
    for stage in found.stages:
        assert stage.error.shape == stage.bound.shape
        assert (np.abs(stage.error) <= stage.bound).all(), (stage.id, stage.worst)
        assert np.abs(stage.error).max() > 0


def test_the_bound_sees_a_missing_clamp_and_swapped_halves():
    x, ids, weights, experts = layer(7, size=1.0)
    run = run_mega_kernel(x, ids, weights, experts)
    free = prepare_mega_experts(*weights_of_run(experts), limit=1e6)
    unclamped = run_mega_kernel(x, ids, weights, free)
    stages = {stage.id: stage for stage in compare_float64(x, unclamped, experts).stages}
    assert stages["first"].worst <= 1 < stages["activated"].worst
    stages = {stage.id: stage for stage in compare_float64(x, run, experts).stages}
    assert stages["activated"].worst <= 1


def weights_of_run(experts):
    """Checkpoint order again, from kernel order."""
    from nvfp4viz.formats import deinterleave_gate_up, unpack_ue8m0, utccp_untranspose

    s13 = deinterleave_gate_up(unpack_ue8m0(utccp_untranspose(experts.w13_scales)))
    return deinterleave_gate_up(experts.w13), s13, experts.w2, unpack_ue8m0(utccp_untranspose(experts.w2_scales))


def test_the_effects_add_up_to_the_whole_error():
    x, ids, weights, experts = layer(8)
    run = run_mega_kernel(x, ids, weights, experts)
    found = compare_float64(x, run, experts)
    assert tuple(found.effects) == EFFECTS
    total = sum(found.effects.values())
    np.testing.assert_allclose(total, run.out.astype(np.float64) - found.exact, rtol=0, atol=1e-11)
    assert found.share(*EFFECTS) == pytest.approx(1)
    # two quantisations to E4M3 outweigh every rounding, and the accumulator hardly counts
    assert found.share("stage", "requantise") > 0.98
    assert found.share("first", "second") < 1e-9
