"""The CUTLASS path against a slow restatement of its nine steps, one scalar at a time."""

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import W4A4Experts, run_w4a4_experts
from nvfp4viz.moe.activation import gelu_tanh_and_mul
from nvfp4viz.quant import mma_step_reference, quantize

EXPERTS, HIDDEN, INTERMEDIATE = 5, 128, 64
BF16 = ml_dtypes.bfloat16


def make_layer(seed=0, **changes):
    rng = np.random.default_rng(seed)

    def weights(rows, columns):
        packed = rng.integers(0, 256, (EXPERTS, rows, columns // 2), np.uint8)
        return packed, rng.integers(0x20, 0x60, (EXPERTS, rows, columns // 16), np.uint8)

    scales = {
        "a1_gscale": rng.lognormal(6, 0.5, EXPERTS).astype(np.float32),
        "a2_gscale": rng.lognormal(4, 0.5, EXPERTS).astype(np.float32),
        "g1_alphas": rng.lognormal(-9, 0.5, EXPERTS).astype(np.float32),
        "g2_alphas": rng.lognormal(-8, 0.5, EXPERTS).astype(np.float32),
    }
    return W4A4Experts(*weights(2 * INTERMEDIATE, HIDDEN), *weights(HIDDEN, INTERMEDIATE), **(scales | changes))


def route(tokens, top_k, seed=1):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    return rng.standard_normal((tokens, HIDDEN)).astype(BF16), SimpleNamespace(ids=ids, weights=weights)


def codes_of(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)


def gemm_row(x, gscale, alpha, packed, scales):
    """One row through quantisation, the seven rules in 64-element steps, and the epilogue."""
    q = quantize(x, recipe="vllm-cuda", global_scale=gscale, path="reference")
    out = []
    for n in range(len(packed)):
        acc = np.float32(0)
        b_codes = codes_of(packed[n])
        for k in range(0, len(x), 64):
            codes, blocks = slice(k, k + 64), slice(k // 16, k // 16 + 4)
            acc = mma_step_reference(q.codes()[codes], b_codes[codes], q.scales[blocks], scales[n, blocks], acc)
        out.append(BF16(np.float32(alpha * acc)))
    return np.array(out)


def slow_layer(x, routing, layer):
    out = np.empty(x.shape, BF16)
    for t in range(len(x)):
        total = np.zeros(HIDDEN, np.float32)
        for expert, weight in zip(routing.ids[t], routing.weights[t], strict=True):
            c1 = gemm_row(
                x[t],
                layer.a1_gscale[expert],
                layer.g1_alphas[expert],
                layer.w13_packed[expert],
                layer.w13_scales[expert],
            )
            c2 = gelu_tanh_and_mul(c1[None])[0]
            c3 = gemm_row(
                c2, layer.a2_gscale[expert], layer.g2_alphas[expert], layer.w2_packed[expert], layer.w2_scales[expert]
            )
            product = c3.astype(np.float32) * np.float32(BF16(weight))
            total = total + product.astype(BF16).astype(np.float32)
        out[t] = total.astype(BF16)
    return out


def test_nine_steps_agree_with_scalars():
    layer = make_layer()
    x, routing = route(3, 2)
    x[1, 32:48] = 0
    out = run_w4a4_experts(x, routing, layer).out
    assert (out.view(np.uint16) == slow_layer(x, routing, layer).view(np.uint16)).all()
    assert np.unique(out.astype(np.float32)).size > 100


def test_numpy_and_numba_give_the_same_bits():
    layer = make_layer(2)
    x, routing = route(40, 3, seed=3)
    fast, slow = (run_w4a4_experts(x, routing, layer, path=path).out for path in ("numba", "numpy"))
    assert (fast.view(np.uint16) == slow.view(np.uint16)).all()


def test_a_token_does_not_depend_on_its_company():
    """Prefill and generation give the same bits: a row's values do not depend on its place in the permuted order."""
    layer = make_layer(4)
    x, routing = route(25, 3, seed=5)
    together = run_w4a4_experts(x, routing, layer).out
    for t in range(25):
        alone = SimpleNamespace(ids=routing.ids[t : t + 1], weights=routing.weights[t : t + 1])
        assert (run_w4a4_experts(x[t : t + 1], alone, layer).out.view(np.uint16) == together[t].view(np.uint16)).all()


def test_the_record_holds_every_step():
    layer = make_layer()
    x, routing = route(6, 2)
    result = run_w4a4_experts(x, routing, layer, record=True)
    trace = result.trace
    plan = trace.dispatch
    rows = plan.rows
    assert rows == 12
    assert trace.input.values.shape == (rows, HIDDEN)
    assert trace.input.packed.shape == (rows, HIDDEN // 2)
    assert trace.acc1.shape == trace.c1.shape == (rows, 2 * INTERMEDIATE)
    assert trace.intermediate.values.shape == (rows, INTERMEDIATE)
    assert trace.acc2.shape == trace.c3.shape == (rows, HIDDEN)
    assert trace.routes.shape == (6, 2, HIDDEN)
    assert trace.out is result.out
    for expert in range(EXPERTS):
        at = trace.rows_of(expert)
        assert (trace.input.gscale[at] == layer.a1_gscale[expert]).all()
        assert (trace.alpha2[at] == layer.g2_alphas[expert]).all()
        assert (plan.row_expert[at] == expert).all()
    for t in range(6):
        for j in range(2):
            row = plan.c_map[t * 2 + j]
            assert plan.a_map[row] == t
            assert (trace.routes[t, j] == trace.c3[row]).all()


def test_recording_changes_nothing():
    layer = make_layer()
    x, routing = route(6, 2)
    plain, recorded = run_w4a4_experts(x, routing, layer), run_w4a4_experts(x, routing, layer, record=True)
    assert plain.trace is None
    assert (plain.out.view(np.uint16) == recorded.out.view(np.uint16)).all()


@pytest.mark.parametrize("bad", [1, 4])
def test_a_nan_scale_byte_in_a_weight_row_reaches_its_column_only(bad):
    layer = make_layer()
    scales = layer.w13_scales.copy()
    scales[bad, 7, 2] = 0xFF
    broken = dataclasses.replace(layer, w13_scales=scales)
    x, routing = route(10, 2)
    trace = run_w4a4_experts(x, routing, broken, record=True).trace
    nan = np.isnan(trace.c1.astype(np.float32))
    rows = trace.rows_of(bad)
    assert nan[rows, 7].all()
    assert nan.sum() == rows.stop - rows.start


def test_one_nan_in_the_input_becomes_six_and_is_lost():
    """A single NaN element is code 7 (+6) in its block: the kernel's maximum skips it, the product stays finite."""
    layer = make_layer()
    x, routing = route(2, 1)
    x[0, 5] = np.nan
    result = run_w4a4_experts(x, routing, layer, record=True)
    assert result.nan_experts == ()
    row = result.trace.dispatch.c_map[0]
    assert result.trace.input.packed[row, 2] >> 4 == 7


def test_per_token_scales_need_no_calibration():
    """With input scales of 1.0 alphas are weight_scale_2, and each row brings its own scale."""
    ones = np.ones(EXPERTS, np.float32)
    layer = make_layer(a1_gscale=ones, a2_gscale=ones, per_token=True)
    x, routing = route(8, 2)
    small = (x.astype(np.float32) * 2.0**-20).astype(BF16)
    first = run_w4a4_experts(x, routing, layer, record=True).trace
    second = run_w4a4_experts(small, routing, layer, record=True).trace
    assert (first.input.packed == second.input.packed).all()
    assert (first.input.scales == second.input.scales).all()
    assert (second.c1.astype(np.float32) == first.c1.astype(np.float32) * 2.0**-20).all()


def test_no_tokens():
    layer = make_layer()
    routing = SimpleNamespace(ids=np.zeros((0, 2), np.int32), weights=np.zeros((0, 2), np.float32))
    result = run_w4a4_experts(np.zeros((0, HIDDEN), BF16), routing, layer)
    assert result.out.shape == (0, HIDDEN)
    assert result.nan_experts == ()


def test_silu_is_fused_and_rounds_once():
    """SiLU alone takes the fused kernel: bf16(silu(gate) * up), where the stand-alone op rounds silu(gate) as well."""
    x, routing = route(30, 2)
    trace = run_w4a4_experts(x, routing, dataclasses.replace(make_layer(), activation="silu"), record=True).trace
    gate, up = np.split(trace.c1.astype(np.float64), 2, axis=1)
    silu = (gate / (1 + np.exp(-gate))).astype(np.float32)
    once = (silu * up.astype(np.float32)).astype(BF16)
    twice = (silu.astype(BF16).astype(np.float32) * up.astype(np.float32)).astype(BF16)
    assert (trace.intermediate.values.view(np.uint16) == once.view(np.uint16)).all()
    assert (once != twice).any()
