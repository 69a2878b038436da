"""The mega-kernel's layer: each step by its own rule, and the whole as plain as it can be written."""

from __future__ import annotations

import doctest
import math
from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e4m3, e4m3_byte_scalar, interleave_gate_up
from nvfp4viz.moe import mega_kernel
from nvfp4viz.moe import mega_kernel_reference as reference
from nvfp4viz.moe.mega_kernel import (
    MegaRun,
    clamp_halves,
    prepare_mega_experts,
    requantize,
    run_mega_kernel,
    stage_tokens,
    swiglu,
)
from nvfp4viz.quant import mma_step_k32_reference, quantize
from tests.equal_bits import same_bits, same_fields

F = np.float32


def weights_of(rng, experts=3, hidden=128, inner=128, size=0.25):
    """MXFP4 in checkpoint order: ``(w13, w13_scales, w2, w2_scales)``."""
    made = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        q = quantize((rng.standard_normal((experts * rows, columns)) * size).astype(F), recipe="deepgemm-ceil")
        made += [array.reshape(experts, rows, -1).copy() for array in (q.packed, q.scales)]
    return made


def routes_of(rng, tokens=4, experts=3, top_k=2):
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    return ids, rng.dirichlet(np.ones(top_k), tokens).astype(F)


def test_examples():
    assert doctest.testmod(mega_kernel).failed == 0


def exponent_up(x: np.float32) -> int:
    """Smallest e with 2^e >= x."""
    significand, exponent = math.frexp(float(x))
    return exponent - 1 if significand == 0.5 else exponent


@pytest.mark.parametrize("spread", [0, 6, 30])
def test_staging_follows_its_rule(spread):
    rng = np.random.default_rng(spread)
    x = (rng.standard_normal((5, 96)) * 2.0 ** rng.integers(-spread, spread + 1, (5, 96))).astype(ml_dtypes.bfloat16)
    x[0, :32] = 0
    x[1, :32] = F(1e-6)  # below the floor
    x[2, 0] = 448
    codes, scales = stage_tokens(x)
    for t in range(5):
        for g in range(3):
            group = x[t, 32 * g : 32 * g + 32].astype(F)
            e = exponent_up(max(np.abs(group).max(), F(1e-4)) / F(448))
            assert scales[t, g] == min(max(e + 127, 1), 254)
            want = [e4m3_byte_scalar(float(v) * 2.0**-e) for v in group]
            assert codes[t, 32 * g : 32 * g + 32].tolist() == want


def test_requantising_follows_its_rule_and_has_no_floor():
    rng = np.random.default_rng(1)
    y = (rng.standard_normal((6, 64)) * 2.0 ** rng.integers(-40, 10, (6, 1))).astype(F)
    y[0, :32] = 0
    codes, scales = requantize(y)
    for r in range(6):
        for g in range(2):
            group = y[r, 32 * g : 32 * g + 32]
            top = np.abs(group).max() * F(1 / 448)
            e = exponent_up(top) if top else -127
            assert scales[r, g] == e + 127
            assert codes[r, 32 * g : 32 * g + 32].tolist() == [e4m3_byte_scalar(float(v) * 2.0**-e) for v in group]
    tiny = np.full((1, 32), 2.0**-30, F)
    assert requantize(tiny)[1] < stage_tokens(tiny)[1]


def test_division_and_multiplication_decide_at_powers_of_two():
    """Staging divides, requantising multiplies: both next to powers of two, where a last place decides."""
    tops = np.concatenate([np.nextafter(F(448 * 2.0**k), F([0, np.inf])) for k in range(-8, 9)] + [F([448])])
    groups = np.zeros((len(tops), 32), F)
    groups[:, 0] = tops
    staged, again = stage_tokens(groups)[1].ravel(), requantize(groups)[1].ravel()
    want = (
        [exponent_up(F(top) / F(448)) + 127 for top in tops],
        [exponent_up(F(top) * F(1 / 448)) + 127 for top in tops],
    )
    assert staged.tolist() == want[0]
    assert again.tolist() == want[1]


def test_a_nan_keeps_out_of_the_scale_and_becomes_e4m3_s_nan():
    y = np.full((1, 32), 1, F)
    y[0, 3] = np.nan
    for codes, scales in (stage_tokens(y), requantize(y)):
        assert codes[0, 3] == 0x7F
        assert exponent_up(F(1) / F(448)) + 127 == scales[0, 0]
        assert np.isfinite(decode_e4m3(codes[0, [2, 4]])).all()
    assert requantize(np.full((1, 32), np.nan, F))[1] == 0


def test_halves_are_rounded_then_clamped():
    gate, up = F([10.01, 9.99, -50, 3.001, np.nan]), F([-10.5, 10.5, 2.001, -3, np.nan])
    clamped_gate, clamped_up = clamp_halves(gate, up, 10.0)
    assert clamped_gate.tolist() == [10, 10, -50, 3, 10]  # 9.99 is 10 in BF16, and a gate may be as low as it likes
    assert clamped_up.tolist() == [-10, 10, 2, -3, -10]
    assert swiglu(clamped_gate, clamped_up)[3] == F(F(3 / (1 + math.exp(-3))) * F(-3))


SPECIAL = F([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-38, 2.0**-126, 2.0**127, 3.4e38, 448, 464, 1e-4, 2.0**-9])


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 40), st.floats(0, 1), st.integers(0, 2**32))
def test_quantisers_give_the_same_bytes_on_both_paths(rows, groups, spread, share, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 32 * groups)) * 2.0 ** rng.integers(-spread, spread + 1, (rows, 32 * groups))
    x = np.where(rng.random(x.shape) < share / 4, rng.choice(SPECIAL, x.shape), x).astype(F)
    for quantise, values in ((stage_tokens, x.astype(ml_dtypes.bfloat16)), (requantize, x)):
        for fast, slow in zip(quantise(values), quantise(values, "reference"), strict=True):
            same_bits(fast, slow)


def test_every_bf16_is_staged_alike_on_both_paths():
    x = np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(ml_dtypes.bfloat16)
    whole, alone = x.reshape(-1, 128), np.zeros((2048, 32), ml_dtypes.bfloat16)
    alone[:, 7] = x[::32]  # without neighbours, so that small ones decide a scale too
    for rows in (whole, alone):
        for fast, slow in zip(stage_tokens(rows), stage_tokens(rows, "reference"), strict=True):
            same_bits(fast, slow)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([10.0, 7.0, 0.01, 6.99]), st.integers(0, 2**32))
def test_the_activation_of_one_output_is_that_of_all(limit, seed):
    rng = np.random.default_rng(seed)
    gate, up = (np.concatenate([SPECIAL, rng.normal(0, 8, 50)]).astype(F) for _ in range(2))
    up = rng.permutation(up)
    halves = clamp_halves(gate, up, limit)
    with np.errstate(all="ignore"):
        pairs = [reference.clamp_pair(*pair, limit) for pair in zip(gate, up, strict=True)]
        products = [reference.swiglu(*pair) for pair in pairs]
    for half, one in zip(halves, zip(*pairs, strict=True), strict=True):
        same_bits(half, np.array(one, F))
    same_bits(swiglu(*halves), np.array(products, F))


def _layer(kind):
    """Two tokens, three experts of the smallest size; healthy, or with bytes that are not."""
    rng = np.random.default_rng(12)
    w13, s13, w2, s2 = weights_of(rng)
    x = rng.standard_normal((2, 128)).astype(ml_dtypes.bfloat16)
    ids, weights = np.array([[2, 0], [0, 1]]), F([[0.75, 0.25], [0.3, 0.0]])
    if kind == "large":  # the clamp works, infinities come out of the second product
        s13, s2 = s13 + 5, np.full_like(s2, 254)
    if kind == "broken":
        s13[0, 5, 0] = s13[0, 128 + 9, 1] = s2[1, 0, 0] = 0xFF
        x[1, 3] = np.nan
        weights[0, 1] = np.inf
    return x, ids, weights, prepare_mega_experts(w13, s13, w2, s2)


@pytest.mark.parametrize("kind", ["healthy", "large", "broken"])
def test_the_layer_is_the_same_bits_on_both_paths(kind):
    layer = _layer(kind)
    fast, slow = run_mega_kernel(*layer), run_mega_kernel(*layer, path="reference")
    same_fields(fast, slow, [field.name for field in fields(MegaRun)])
    out = fast.out.astype(F)
    if kind == "large":
        assert (fast.gate == 10).any()
        assert np.isinf(fast.sums).any()
    assert np.isfinite(out).all() == (kind == "healthy")
    assert not np.isnan(out).all()


def test_the_layer_needs_no_layouts():
    """From the checkpoint's own order, outputs picked here and there: the kernel's order of rows changes nothing."""
    rng = np.random.default_rng(2)
    w13, s13, w2, s2 = weights_of(rng, experts=2)
    x = rng.standard_normal((2, 128)).astype(ml_dtypes.bfloat16)
    ids, weights = np.array([[1], [0]]), F([[0.75], [0.3]])
    run = run_mega_kernel(x, ids, weights, prepare_mega_experts(w13, s13, w2, s2))

    def nibbles(packed):
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)

    def dot(a, sa, packed, sb):
        acc, b = F(0), nibbles(packed)
        for step in range(len(sa)):
            k = slice(32 * step, 32 * step + 32)
            acc = mma_step_k32_reference(a[k], b[k], sa[step], sb[step], acc)
        return acc

    for token, expert in enumerate(ids[:, 0]):
        codes, scales = stage_tokens(x[token : token + 1])
        rows = range(0, 256, 5)
        sums = {row: dot(codes[0], scales[0], w13[expert, row], s13[expert, row]) for row in rows}
        for row, value in sums.items():
            assert (run.gate_sum if row < 128 else run.up_sum)[token, row % 128] == value
        gate, up = clamp_halves(run.gate_sum[token], run.up_sum[token], 10.0)
        y, sy = requantize((swiglu(gate, up) * weights[token])[None])
        np.testing.assert_array_equal(run.y_codes[token], y[0])
        for row in range(0, 128, 7):
            value = dot(y[0], sy[0], w2[expert, row], s2[expert, row])
            assert run.sums[token, row] == value
            assert run.out[token, row] == F(value).astype(ml_dtypes.bfloat16)


def test_no_tokens_are_no_work_on_both_paths():
    _, _, _, experts = _layer("healthy")
    nothing = np.zeros((0, 128), ml_dtypes.bfloat16), np.zeros((0, 2), int), np.zeros((0, 2), F), experts
    fast, slow = run_mega_kernel(*nothing), run_mega_kernel(*nothing, path="reference")
    same_fields(fast, slow, [field.name for field in fields(MegaRun)])


def test_the_weight_comes_before_quantising():
    """Applied afterwards it would give other bytes: the scale of a group takes the weight in."""
    rng = np.random.default_rng(3)
    ids, weights = routes_of(rng)
    run = run_mega_kernel(
        rng.standard_normal((4, 128)).astype(ml_dtypes.bfloat16), ids, weights, prepare_mega_experts(*weights_of(rng))
    )
    unweighted = swiglu(run.gate, run.up)
    np.testing.assert_array_equal(run.weighted, unweighted * weights.reshape(-1, 1))
    assert (requantize(unweighted)[1] != run.y_scales).any()
    # the outputs are then only added, in f32
    total = run.routes.astype(F).reshape(4, 2, -1)
    np.testing.assert_array_equal(run.out, (total[:, 0] + total[:, 1]).astype(ml_dtypes.bfloat16))


def test_a_nan_scale_of_the_first_weight_comes_out_finite():
    rng = np.random.default_rng(4)
    w13, s13, w2, s2 = weights_of(rng)
    s13[:, 5, 0] = 0xFF  # gate row 5
    s13[:, 128 + 9, 1] = 0xFF  # up row 9
    ids, weights = routes_of(rng)
    x = rng.standard_normal((4, 128)).astype(ml_dtypes.bfloat16)
    run = run_mega_kernel(x, ids, weights, prepare_mega_experts(w13, s13, w2, s2))
    assert np.isnan(run.gate_sum[:, 5]).all()
    assert np.isnan(run.up_sum[:, 9]).all()
    assert (run.gate[:, 5] == 10).all()
    assert (run.up[:, 9] == -10).all()
    assert np.isfinite(run.out.astype(F)).all()
    s2[:, 0, 0] = 0xFF  # behind the second product nothing clamps
    run = run_mega_kernel(x, ids, weights, prepare_mega_experts(w13, s13, w2, s2))
    assert np.isnan(run.out[:, 0].astype(F)).all()


def test_kernel_order_is_eight_gate_rows_then_eight_up_rows():
    rng = np.random.default_rng(5)
    w13, s13, w2, s2 = weights_of(rng)
    experts = prepare_mega_experts(w13, s13, w2, s2)
    np.testing.assert_array_equal(experts.w13[:, 8:16], w13[:, 128:136])
    np.testing.assert_array_equal(experts.w13[:, 16:24], w13[:, 8:16])
    words = interleave_gate_up(s13).view("<u4")
    np.testing.assert_array_equal(experts.w13_scales[:, 4 * 3 + 2], words[:, 32 * 2 + 3])
    assert experts.w13_scales.shape == (3, 256, 1)


@pytest.mark.parametrize(
    "change", [{"hidden": 64}, {"inner": 64}, {"hidden": 192}, {"inner": 96}], ids=lambda change: str(change)
)
def test_shapes_that_the_kernel_does_not_take(change):
    with pytest.raises(FormatError) as error:
        prepare_mega_experts(*weights_of(np.random.default_rng(6), **change))
    assert error.value.code == "mega.shape"


def test_shapes_that_do_not_belong_together():
    made = weights_of(np.random.default_rng(7))
    for index in range(4):
        wrong = list(made)
        wrong[index] = made[index][..., :-1, :]
        with pytest.raises(FormatError) as error:
            prepare_mega_experts(*wrong)
        assert error.value.code == "mega.shape"
    with pytest.raises(FormatError) as error:
        stage_tokens(np.zeros((2, 40), F))
    assert error.value.code == "quantize.block"
