"""Marlin, the emulation and BF16: products of values, each with its own rounding points."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.formats import decode_e2m1, decode_e4m3, encode_e4m3
from nvfp4viz.moe import (
    Bf16Experts,
    decode_weights,
    prepare_emulation,
    prepare_w4a16,
    run_bf16_experts,
    run_emulation_experts,
    run_w4a16_experts,
)
from nvfp4viz.moe.activation import gelu_tanh_and_mul
from nvfp4viz.moe.dense import k_first, product_f32, qdq_emulation
from nvfp4viz.quant import QuantizedTensor
from nvfp4viz.quant.gemm import gemm_w4a16_marlin, marlin_weight

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 32
BF16 = ml_dtypes.bfloat16


def packed_weights(seed=0, low=0x28, high=0x60):
    rng = np.random.default_rng(seed)

    def weights(rows, columns):
        packed = rng.integers(0, 256, (EXPERTS, rows, columns // 2), np.uint8)
        scales = rng.integers(low, high, (EXPERTS, rows, columns // 16), np.uint8)
        return packed, scales, rng.lognormal(-7, 0.4, EXPERTS).astype(np.float32)

    return (*weights(2 * INTERMEDIATE, HIDDEN), *weights(HIDDEN, INTERMEDIATE))


def route(tokens=6, top_k=2, seed=1):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    return rng.standard_normal((tokens, HIDDEN)).astype(BF16), SimpleNamespace(ids=ids, weights=weights)


def bits(x):
    return np.asarray(x).view(np.uint16)


def sequential(x, columns):
    """f32, one k after the other."""
    acc = np.zeros(columns.shape[1], np.float32)
    for k in range(len(x)):
        acc = acc + np.float32(x[k]) * columns[k]
    return acc


def test_products_add_one_k_after_the_other():
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal((4, 64)) * 2.0 ** rng.integers(-20, 20, (4, 64))).astype(BF16)
    columns = rng.standard_normal((2, 64, 8)).astype(BF16).astype(np.float32)
    out = product_f32(rows, np.array([0, 0, 1, 1]), columns)
    for r, expert in enumerate([0, 0, 1, 1]):
        assert (out[r] == sequential(rows[r], columns[expert])).all()


@pytest.mark.parametrize(("byte", "expected"), [(0x7E, 1.0), (0x77, 1.0), (0x76, 2.0), (0x46, 128.0)])
def test_marlin_lifts_the_scales_of_all_experts_by_one_power_of_two(byte, expected):
    """sf = 2^floor(log2(448·128 / max(s·128))) over the layer: the largest scale lands in (224, 448]."""
    weights = list(packed_weights(low=0x20, high=0x46))
    weights[1] = weights[1].copy()
    weights[1][1, 3, 2] = byte
    experts = prepare_w4a16(*weights)
    assert experts.sf13 == expected
    assert 224 < decode_e4m3(np.uint8(byte)) * expected <= 448
    assert (experts.global13 == weights[2] * np.float32(2.0**119 / expected)).all()


def test_marlin_is_the_gemm_of_quant():
    """Row by row the same bits as `quant.gemm_w4a16_marlin` with the layer's scale factor."""
    weights = packed_weights()
    experts = prepare_w4a16(*weights)
    x, routing = route()
    trace = run_w4a16_experts(x, routing, experts, record=True).trace
    for expert in range(EXPERTS):
        rows = trace.rows_of(expert)
        shape = (2 * INTERMEDIATE, HIDDEN)
        q = QuantizedTensor(weights[0][expert], weights[1][expert], weights[2][expert], "modelopt", 16, shape)
        whole = gemm_w4a16_marlin(trace.input.values[rows], marlin_weight(q, experts.sf13))
        assert (bits(trace.c1[rows]) == bits(whole)).all()


def test_marlin_drops_scales_far_below_the_largest():
    """s·sf below 2^-6 becomes 0; with 448 present sf is 1, so exactly the E4M3 subnormals vanish."""
    packed13, scales13, g13, packed2, scales2, g2 = packed_weights()
    scales13 = scales13.copy()
    scales13[0, 0, :3] = [0x7E, 0x07, 0x08]  # 448, the largest subnormal, the smallest normal
    experts = prepare_w4a16(packed13, scales13, g13, packed2, scales2, g2)
    assert experts.sf13 == 1.0
    assert experts.vanished13 == 1
    row = experts.w13[0, :, 0]
    assert (row[16:32] == 0).all()
    nibbles = np.stack([packed13[0, 0] & 15, packed13[0, 0] >> 4], axis=-1).ravel()
    assert (row[32:48] == decode_e2m1(nibbles[32:48]) * np.float32(2.0**-125)).all()


def test_marlin_has_no_negative_scales():
    """s' < 2 becomes 0, and so does every negative one; the server only warns."""
    weights = list(packed_weights())
    weights[1] = weights[1].copy()
    weights[1][2, 5, 0] = 0x80 | 0x40
    experts = prepare_w4a16(*weights)
    assert (experts.w13[2, :16, 5] == 0).all()
    assert experts.vanished13 == 1


def test_marlin_values_are_exact_in_bf16():
    experts = prepare_w4a16(*packed_weights(3, 0x08, 0x7F))
    assert (experts.w13.astype(BF16).astype(np.float32) == experts.w13).all()
    assert np.abs(experts.w13[experts.w13 != 0]).min() >= 2.0**-126, "no subnormal weight"


def test_marlin_rounds_the_second_product_before_scaling_it():
    """c1 = bf16(acc·G'), c3 = bf16(bf16(acc)·bf16(w·G')), sum in f32: said with plain numbers, without the 2^-126."""
    weights = packed_weights()
    experts = prepare_w4a16(*weights)
    x, routing = route()
    out = run_w4a16_experts(x, routing, experts).out
    values13 = decode_e2m1(unpack(weights[0])) * np.repeat(decode_e4m3(weights[1]), 16, axis=-1)
    values2 = decode_e2m1(unpack(weights[3])) * np.repeat(decode_e4m3(weights[4]), 16, axis=-1)
    for t in range(len(x)):
        total = np.zeros(HIDDEN, np.float32)
        for expert, w in zip(routing.ids[t], routing.weights[t], strict=True):
            acc = sequential(x[t], values13[expert].T)
            c2 = gelu_tanh_and_mul((acc * weights[2][expert]).astype(BF16)[None])
            acc = sequential(c2[0], values2[expert].T)
            # G' carries a power of two, so rounding w·G' to BF16 and rounding w·G agree.
            factor = np.float32(BF16(w * weights[5][expert]))
            total = total + (acc.astype(BF16).astype(np.float32) * factor).astype(BF16).astype(np.float32)
        assert (bits(out[t]) == bits(total.astype(BF16))).all()


def unpack(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def test_the_emulation_rounds_weights_to_bf16():
    packed, scales, g, *_ = packed_weights()
    values = decode_weights(packed, scales, g)
    factor = decode_e4m3(scales[1, 2, 1]) * g[1]
    expected = (decode_e2m1(unpack(packed[1, 2])[16:32]) * factor).astype(BF16).astype(np.float32)
    assert (values[1, 2, 16:32] == expected).all()


def test_the_emulation_is_a_plain_product_of_dequantised_values():
    weights = packed_weights()
    a1, a2 = np.float32(700), np.float32(90)
    experts = prepare_emulation(*weights, a1, a2)
    x, routing = route()
    trace = run_emulation_experts(x, routing, experts, record=True).trace
    _, _, back = qdq_emulation(trace.input.values, a1)
    assert (bits(trace.input.dequantised) == bits(back)).all()
    assert (trace.acc1 == product_f32(back, trace.dispatch.row_expert, experts.w13)).all()
    assert (bits(trace.c1) == bits(trace.acc1.astype(BF16))).all()
    weight = np.empty(trace.dispatch.rows, np.float32)
    weight[trace.dispatch.c_map] = routing.weights.ravel()
    assert (bits(trace.c3) == bits((trace.acc2 * weight[:, None]).astype(BF16))).all()


# Where the Triton kernel and the CUDA kernel part (`numerics-vllm.md` section 3).
@pytest.mark.parametrize(
    ("g", "row", "expected"),
    [
        (np.inf, [1.0, -2.0, 0.0], [0, 0, 0]),  # the CUDA kernel: ±6 at scale 448
        (0.0, [1.0, -2.0, 0.0], [math.nan] * 3),  # the CUDA kernel: zeros
        (2688.0, [1.0, math.nan, -1.0], [1.0, 0.0, -1.0]),  # the CUDA kernel: +6
        (2688.0, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        (math.nan, [1.0, 2.0, 3.0], [math.nan] * 3),
    ],
)
def test_emulation_edges(g, row, expected):
    x = np.zeros((1, 16), BF16)
    x[0, :3] = row
    _, _, back = qdq_emulation(x, np.float32(g))
    np.testing.assert_array_equal(back[0, :3].astype(np.float32), np.float32(expected))


def test_the_emulation_divides_once():
    """o = g/S in one division; where that and the kernel's two reciprocals differ, codes near a tie may flip."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((200, 64)).astype(BF16)
    g = np.float32(613)
    packed, scales, back = qdq_emulation(x, g)
    blocks = x.astype(np.float32).reshape(200, 4, 16)
    expected = encode_e4m3(g * (np.abs(blocks).max(axis=-1) * np.float32(1 / 6)))
    assert (scales == expected).all()
    s = decode_e4m3(scales)
    codes = unpack(packed).reshape(200, 4, 16)
    assert (np.abs(decode_e2m1(codes) - np.clip(blocks * (g / s)[..., None], -6, 6)) <= 1.0).all()
    assert (bits(back) == bits((decode_e2m1(codes) * (s / g)[..., None]).astype(BF16).reshape(200, 64))).all()


def test_bf16_experts_are_the_plain_layer():
    rng = np.random.default_rng(5)
    w13 = rng.standard_normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN)).astype(BF16).astype(np.float32) / 8
    w2 = rng.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE)).astype(BF16).astype(np.float32) / 8
    x, routing = route()
    out = run_bf16_experts(x, routing, Bf16Experts(k_first(w13), k_first(w2))).out.astype(np.float64)
    wide = x.astype(np.float64)
    for t in range(len(x)):
        expected = np.zeros(HIDDEN)
        for expert, w in zip(routing.ids[t], routing.weights[t], strict=True):
            gate, up = np.split(w13[expert].astype(np.float64) @ wide[t], 2)
            gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            expected += w * (w2[expert].astype(np.float64) @ (gelu * up))
        # BF16 keeps 8 bits; five roundings on the way leave a few units of 2^-8 of the largest number.
        assert np.abs(out[t] - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("backend", ["marlin", "bf16", "emulation"])
def test_a_token_does_not_depend_on_its_company(backend):
    weights = packed_weights()
    decoded = decode_weights(*weights[:3]), decode_weights(*weights[3:])
    run, experts = {
        "marlin": (run_w4a16_experts, prepare_w4a16(*weights)),
        "bf16": (run_bf16_experts, Bf16Experts(*map(k_first, decoded))),
        "emulation": (run_emulation_experts, prepare_emulation(*weights, np.float32(700), np.float32(90))),
    }[backend]
    x, routing = route(9)
    together = run(x, routing, experts).out
    for t in range(9):
        alone = SimpleNamespace(ids=routing.ids[t : t + 1], weights=routing.weights[t : t + 1])
        assert (bits(run(x[t : t + 1], alone, experts).out) == bits(together[t])).all()
