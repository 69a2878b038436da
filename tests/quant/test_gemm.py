"""The three products with a quantised weight, each against a scalar twin written from its definition."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import FormatError
from nvfp4viz.quant import dequantize, quantize
from nvfp4viz.quant.gemm import (
    gemm_dequantized,
    gemm_w4a4,
    gemm_w4a16_marlin,
    marlin_scale_factor,
    marlin_values,
    marlin_weight,
    scale_and_round,
)
from nvfp4viz.quant.tensor_core_explain import tensor_core_explain
from nvfp4viz.quant.tensor_core_step import mma_step_reference
from nvfp4viz.quant.types import QuantizedTensor

BF16 = ml_dtypes.bfloat16
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 += [-v for v in E2M1]


def e4m3(byte: int) -> float:
    return float(np.uint8(byte).view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def nvfp4(rng, rows: int, k: int, scales=None, g: float = 0.01) -> QuantizedTensor:
    packed = rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
    if scales is None:
        scales = rng.integers(0x20, 0x60, (rows, k // 16)).astype(np.uint8)
    return QuantizedTensor(packed, np.asarray(scales, np.uint8), np.float32(g), "modelopt", 16, (rows, k))


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    kind = np.uint16 if got.dtype == BF16 else np.uint32
    np.testing.assert_array_equal(got.view(kind), want.view(kind))


# ------------------------------------------------------------------------------------------------------- W4A4


@pytest.mark.parametrize("recipe", ["ieee", "vllm-cuda", "modelopt", "ocp-floor"])
def test_w4a4_is_the_tensor_core_then_alpha_then_one_rounding(recipe):
    rng = np.random.default_rng(1)
    a = quantize(rng.standard_normal((3, 128)).astype(BF16), recipe=recipe)
    b = quantize(rng.standard_normal((5, 128)).astype(np.float32), recipe=recipe)
    kind, block = ("nvfp4", 16) if a.block_size == 16 else ("mxfp4", 32)
    alpha = np.float32(a.decode_scale * b.decode_scale)
    want = np.empty((3, 5), np.float32)
    for m, n in np.ndindex(3, 5):
        acc = np.float32(0)
        for k in range(0, 128, 64):
            part, scales = slice(k, k + 64), slice(k // block, (k + 64) // block)
            codes = a.codes()[m, part].tolist(), b.codes()[n, part].tolist()
            acc = mma_step_reference(*codes, a.scales[m, scales], b.scales[n, scales], acc, kind)
        want[m, n] = alpha * acc
    for path in ("numpy", "numba"):
        same_bits(gemm_w4a4(a, b, out_dtype=np.float32, path=path), want)
        same_bits(gemm_w4a4(a, b, alpha, path=path), want.astype(BF16))


def test_w4a4_with_a_negative_alpha_flips_the_sign_and_a_negative_block_scale_does_not():
    rng = np.random.default_rng(2)
    a, b = nvfp4(rng, 2, 64), nvfp4(rng, 3, 64)
    plain = gemm_w4a4(a, b, 0.5)
    same_bits(gemm_w4a4(a, b, -0.5), -plain)
    flipped = QuantizedTensor(a.packed, a.scales | 0x80, a.global_scale, a.recipe, 16, a.shape)
    same_bits(gemm_w4a4(flipped, b, 0.5), plain)


def test_every_nan_is_the_gpus():
    acc = np.array([np.inf, 0x7FFF, 1], np.float32)
    bits = scale_and_round(acc, np.array([0, np.nan, np.nan], np.float32), np.float32).view(np.uint32)
    assert bits.tolist() == [0x7FFFFFFF] * 3
    assert scale_and_round(acc, np.float32(np.nan)).view(np.uint16).tolist() == [0x7FFF] * 3
    rng = np.random.default_rng(3)
    a, b = nvfp4(rng, 2, 64), nvfp4(rng, 2, 64)
    bad = QuantizedTensor(a.packed, np.where(np.arange(4) == 2, 0xFF, a.scales).astype(np.uint8), *_rest(a))
    assert (gemm_w4a4(bad, b).view(np.uint16) == 0x7FFF).all()


def _rest(q: QuantizedTensor):
    return q.global_scale, q.recipe, q.block_size, q.shape


# ------------------------------------------------------------------------------------------------------ Marlin


def marlin_twin(x: np.ndarray, w: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Accumulators and scaled results, one number at a time, from the sentences of `numerics-vllm.md` section 7."""
    scales = [e4m3(b) for b in w.scales.ravel().tolist()]
    top = max(s * 128 for s in scales if s != 0)
    sf = 2.0 ** math.floor(math.log2(448 * 128 / top)) if top < 57344 else 1.0
    g = np.float32(w.global_scale) * np.float32(2.0**119) / np.float32(sf)
    codes = w.codes()
    acc = np.zeros((len(x), len(codes)), np.float32)
    for n in range(len(codes)):
        row = []
        for k, code in enumerate(codes[n].tolist()):
            lifted = e4m3(int(w.scales[n, k // 16])) * sf * 128
            lifted = 0.0 if lifted < 2 else lifted
            value = np.float32(E2M1[code] * lifted * 2.0**-126)
            assert float(value.astype(BF16)) == E2M1[code] * lifted * 2.0**-126  # exact in BF16
            row.append(value)
        for m in range(len(x)):
            total = np.float32(0)
            for k, value in enumerate(row):
                total = np.float32(total + np.float32(x[m, k].astype(np.float32) * value))
            acc[m, n] = total
    return acc, (acc * g).astype(np.float32)


@pytest.mark.parametrize("case", ["ordinary", "small scales", "large scales", "subnormal scales", "tiny activations"])
def test_marlin_follows_its_definition(case):
    rng = np.random.default_rng(4)
    bytes_ = {
        "ordinary": (0x20, 0x50),
        "small scales": (0x01, 0x18),
        "large scales": (0x01, 0x7F),
        "subnormal scales": (0x00, 0x08),
        "tiny activations": (0x20, 0x50),
    }[case]
    w = nvfp4(rng, 5, 96, rng.integers(*bytes_, (5, 6)))
    if case == "large scales":
        w.scales[2, 3] = 0x7E
    x = rng.standard_normal((3, 96)) * (2.0**-30 if case == "tiny activations" else 1)
    x = x.astype(np.float32).astype(BF16)
    acc, scaled = marlin_twin(x, w)
    for path in ("numpy", "numba"):
        same_bits(gemm_w4a16_marlin(x, w, np.float32, apply_global=False, path=path), acc)
        same_bits(gemm_w4a16_marlin(x, w, np.float32, path=path), scaled)
        same_bits(gemm_w4a16_marlin(x, w, path=path), scaled.astype(BF16))
    if case == "tiny activations":
        assert (np.abs(acc) < np.finfo(np.float32).tiny).any()
    # Far from underflow it is y = G * sum(a * element * s), up to rounding: 96 sums, the two products of dequantize, G'
    # and the last product each lose at most half an ulp of the sum of magnitudes.
    if case in ("ordinary", "small scales"):
        values = dequantize(w).astype(np.float64)
        exact = x.astype(np.float64) @ values.T
        bound = 100 * 2.0**-24 * (np.abs(x.astype(np.float64)) @ np.abs(values).T)
        assert (np.abs(scaled - exact) <= bound).all()


def test_marlin_loses_subnormal_scales_beside_a_large_one():
    rng = np.random.default_rng(5)
    w = nvfp4(rng, 2, 64, [[0x7E, 0x01, 0x07, 0x08], [0x00, 0x38, 0xB8, 0xFE]], g=1.0)
    weight = marlin_weight(w)
    assert weight.scale_factor == 1
    # 2^-9 and 7 * 2^-9 vanish, 2^-6 is the smallest that stays (s' = 2); negative ones vanish too.
    assert weight.scale_bytes.tolist() == [[0xF6, 0, 0, 0x80], [0, 0xB0, 0, 0]]
    assert weight.vanished == 4
    assert marlin_weight(nvfp4(rng, 1, 16, [[0x01]])).vanished == 0
    values = marlin_values(weight) * 2.0**119
    np.testing.assert_array_equal(values[0, :16], dequantize(w)[0, :16] + 0.0)


def test_marlin_scale_factor_is_the_floor_of_the_exact_logarithm():
    for byte in range(1, 0x7F):
        top = Fraction(e4m3(byte)) * 128
        want = Fraction(1)
        while top * want * 2 <= 57344:
            want *= 2
        assert marlin_scale_factor(np.uint8([0, byte])) == want
    assert marlin_scale_factor(np.zeros(3, np.uint8)) == 1
    assert marlin_scale_factor(np.uint8([0x7F, 0x38])) == 1
    assert marlin_scale_factor(np.uint8([0xB8])) == 1


def test_marlin_reads_a_nan_scale_as_a_number():
    w = nvfp4(np.random.default_rng(6), 1, 16, [[0x7F]])
    weight = marlin_weight(w)
    assert weight.scale_bytes.tolist() == [[0xFC]]
    assert np.isfinite(marlin_values(weight)).all()


# ------------------------------------------------------------------------------------------------ decode first


def test_dequantized_product_is_the_float32_product_of_the_values():
    rng = np.random.default_rng(7)
    a, b = nvfp4(rng, 4, 256), nvfp4(rng, 6, 256)
    va, vb = dequantize(a).astype(np.float64), dequantize(b).astype(np.float64)
    want = np.array([[math.fsum(x * y for x, y in zip(r, c, strict=True)) for c in vb] for r in va])
    # BLAS adds 256 products in an order of its own: at most 256 roundings, each half an ulp of the sum of magnitudes.
    bound = 256 * 2.0**-24 * (np.abs(va) @ np.abs(vb).T)
    for left in (a, dequantize(a)):
        got = gemm_dequantized(left, b)
        assert got.dtype == np.float32
        assert (np.abs(got - want) <= bound).all()
    same_bits(gemm_dequantized(a, b, BF16), gemm_dequantized(a, b).astype(BF16))
    x = rng.standard_normal((2, 256)).astype(BF16)
    same_bits(gemm_dequantized(x, b), gemm_dequantized(x.astype(np.float32), b))


def test_wrong_operands_say_what_is_wrong():
    rng = np.random.default_rng(8)
    a = nvfp4(rng, 2, 64)
    mx = quantize(rng.standard_normal((2, 64)).astype(np.float32), recipe="ocp-floor")
    x = rng.standard_normal((2, 64)).astype(BF16)
    for call, code in (
        (lambda: gemm_w4a4(a, mx), "gemm.recipe"),
        (lambda: gemm_w4a4(a, nvfp4(rng, 2, 128)), "gemm.shape"),
        (lambda: gemm_w4a4(a, a, out_dtype=np.float64), "quantize.dtype"),
        (lambda: gemm_w4a16_marlin(x, mx), "gemm.recipe"),
        (lambda: gemm_w4a16_marlin(x[:, :32], a), "gemm.shape"),
        (lambda: gemm_w4a16_marlin(x.astype(np.float32), a), "quantize.dtype"),
        (lambda: gemm_dequantized(x[:, :32], a), "gemm.shape"),
        (lambda: gemm_dequantized(x.astype(np.float64), a), "quantize.dtype"),
    ):
        with pytest.raises(FormatError) as caught:
            call()
        assert caught.value.code == code


# ------------------------------------------------------------------------------------------------- explanation


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_explanation_adds_up(kind):
    rng = np.random.default_rng(9)
    block = 16 if kind == "nvfp4" else 32
    for _ in range(20):
        a, b = rng.integers(0, 16, (2, 64))
        one = 0x38 if kind == "nvfp4" else 127
        sa, sb = rng.integers(one - 20, one + 20, (2, 64 // block))
        seen = tensor_core_explain(a, b, sa, sb, float(rng.standard_normal() * 100), kind)
        exact = Fraction(seen.c)
        for k in range(64):
            scale = Fraction(seen.a_scale_values[k // block]) * Fraction(seen.b_scale_values[k // block])
            exact += Fraction(seen.a_values[k]) * Fraction(seen.b_values[k]) * scale
        assert seen.trace.exact == exact
        assert seen.result == mma_step_reference(a, b, sa, sb, seen.c, kind)
        assert seen.difference == float(seen.result) - float(seen.dequantized)
        lower, upper = sorted([seen.result, seen.dequantized])
        steps = 0
        while lower < upper:
            lower = np.nextafter(lower, upper)
            steps += 1
        assert seen.ulps == (steps if seen.result > seen.dequantized else -steps)


def test_explanation_of_a_nan():
    seen = tensor_core_explain([2] * 64, [2] * 64, [0x7F] * 4, [0x38] * 4)
    assert seen.trace.special == "nan"
    assert seen.ulps is None
    assert np.isnan(seen.difference)
