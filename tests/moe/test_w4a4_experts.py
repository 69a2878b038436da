"""The CUTLASS path: its nine steps number by number and at once, and what each of them does."""

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import W4A4Experts, run_w4a4_experts
from nvfp4viz.moe.activation import fused_silu, fused_silu_scalar, gelu_tanh, gelu_tanh_scalar

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


def bits_of(array):
    """Bits to compare: a NaN of f32 has no sign or payload that anybody defines, nor one of BF16 between the GEMMs."""
    wide = array.astype(np.float32) if array.dtype == BF16 else array
    if wide.dtype == np.float32:
        wide = np.where(np.isnan(wide), np.float32(np.nan), wide)
    return wide.tobytes()


def same_record(fast, slow):
    """Two records, field by field to the last bit."""
    for field in dataclasses.fields(fast):
        a, b = getattr(fast, field.name), getattr(slow, field.name)
        if dataclasses.is_dataclass(a):
            same_record(a, b)
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert bits_of(a) == bits_of(b), field.name
        else:
            assert a == b, field.name


def layer_of(kind):
    """A layer, its input and routes; each kind breaks something else."""
    layer = make_layer()
    x, routing = route(2, 2)
    x[1, 32:48] = 0
    if kind == "silu":
        return dataclasses.replace(layer, activation="silu"), x, routing
    if kind == "per token":
        ones = np.ones(EXPERTS, np.float32)
        x[0] = 0  # a row of zeros has a decode scale of 0
        return dataclasses.replace(layer, a1_gscale=ones, a2_gscale=ones, per_token=True), x, routing
    if kind == "missing input scales":
        gscale, alphas = layer.a1_gscale.copy(), layer.g1_alphas.copy()
        gscale[routing.ids[1, 0]], alphas[routing.ids[1, 0]] = np.inf, 0
        return dataclasses.replace(layer, a1_gscale=gscale, g1_alphas=alphas), x, routing
    if kind == "NaN":
        x[0, 5], x[1, 7] = np.nan, np.inf
        scales = layer.w2_scales.copy()
        scales[routing.ids[1, 0], 3, 2] = 0x7F
        return dataclasses.replace(layer, w2_scales=scales), x, routing
    return layer, x, routing


@pytest.mark.parametrize("kind", ["healthy", "silu", "per token", "missing input scales", "NaN"])
def test_nine_steps_are_the_same_bits_number_by_number(kind):
    layer, x, routing = layer_of(kind)
    fast = run_w4a4_experts(x, routing, layer, record=True)
    slow = run_w4a4_experts(x, routing, layer, path="reference")
    same_record(fast, slow)
    assert fast.out.tobytes() == slow.out.tobytes()  # the last NaN is canonical
    assert np.unique(fast.out.astype(np.float32)).size > 50
    assert bool(fast.nan_experts) == (kind not in ("healthy", "silu"))


def test_one_rank_s_experts_are_the_same_bits_number_by_number():
    layer = make_layer(6)
    x, routing = route(2, 3)
    mine = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    mine = W4A4Experts(**{name: v[[1, 3, 4]] if isinstance(v, np.ndarray) else v for name, v in mine.items()})
    here = np.array([-1, 0, -1, 1, 2])
    fast = run_w4a4_experts(x, routing, mine, record=True, expert_map=here)
    same_record(fast, run_w4a4_experts(x, routing, mine, expert_map=here, path="reference"))
    assert fast.trace.dispatch.rows < 6


def test_sizes_that_no_step_of_64_divides_are_filled_up_alike():
    rng = np.random.default_rng(9)
    made = [rng.integers(0x20, 0x60, shape, np.uint8) for shape in ((1, 32, 48), (1, 32, 6), (1, 96, 8), (1, 96, 1))]
    ones = np.ones(1, np.float32)
    layer = W4A4Experts(*made, a1_gscale=64 * ones, a2_gscale=ones, g1_alphas=ones / 256, g2_alphas=ones / 256)
    routing = SimpleNamespace(ids=np.zeros((1, 1), np.int32), weights=np.ones((1, 1), np.float32))
    x = rng.standard_normal((1, 96)).astype(BF16)
    same_record(run_w4a4_experts(x, routing, layer, record=True), run_w4a4_experts(x, routing, layer, path="reference"))


@pytest.mark.parametrize(("whole", "alone"), [(gelu_tanh, gelu_tanh_scalar), (fused_silu, fused_silu_scalar)])
def test_every_gate_is_activated_alike_alone(whole, alone):
    gates = np.arange(2**16, dtype=np.uint16).view(BF16).astype(np.float32)
    with np.errstate(all="ignore"):
        one_by_one = np.array([alone(gate) for gate in gates], np.float32)
    assert bits_of(whole(gates)) == bits_of(one_by_one)


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
    slow = run_w4a4_experts(np.zeros((0, HIDDEN), BF16), routing, layer, path="reference")
    assert (slow.out.shape, slow.nan_experts) == ((0, HIDDEN), ())


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
