"""The grouped GEMM kernels themselves, run by g++ warp by warp: no GPU, every load, fragment, scale and epilogue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nvfp4viz.quant.gemm import scale_and_round
from tests.host.kernels_on_host import HostKernels
from tests.kernels.gemm_cases import BFLOAT16, W4A4Case, bits, mma_tiles_case, w4a4_case, w4a16_case

pytestmark = pytest.mark.host
W4A4 = [
    f"nv_grouped_w4a4_{kind}_{layout}_{out}"
    for kind in ("nvfp4", "mxfp4")
    for layout in ("linear", "swizzled")
    for out in ("bf16", "f32")
]
W4A4 += ["nv_mma_tiles_nvfp4", "nv_mma_tiles_mxfp4"]
W4A16 = ["nv_w4a16_prepack", "nv_w4a16_widen", "nv_scale_rows"]
W4A16 += [f"nv_grouped_w4a16_{tokens}" for tokens in (16, 32, 64)]
FEATURES = 128  # of the result, a block of W4A4


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("w4a4"), "gemm_w4a4.cu", W4A4)


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("w4a16"), "gemm_w4a16.cu", W4A16)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_one_instruction_on_many_tiles(w4a4: HostKernels, kind: str) -> None:
    """The gather of fragments and scale words, with accumulators that a GEMM does not reach."""
    case = mma_tiles_case(kind, 27)
    words = [np.zeros((27, rows, 4), np.uint8) for rows in (16, 8)]
    for word, scales in zip(words, (case.a_scales, case.b_scales), strict=True):
        word[:, :, : scales.shape[2]] = scales
    out = np.zeros_like(case.c)
    w4a4(f"nv_mma_tiles_{kind}", 7, 128, case.a, words[0], case.b, words[1], case.c, out, np.int32(27))
    np.testing.assert_array_equal(bits(out), bits(case.expected()))


def run_w4a4(kernels: HostKernels, case: W4A4Case, layout: str, dtype, row_alphas=None) -> np.ndarray:
    rows, n, k = len(case.a), case.b.shape[1], case.a.shape[1] * 2
    out = np.full((rows, n), np.nan, dtype)
    a_scales, b_scales, scale_offsets = case.a_scales, case.b_scales, None
    if layout == "swizzled":
        a_scales, b_scales, scale_offsets = case.swizzled(padding=0x7F)  # a NaN that must not be looked at
    name = f"nv_grouped_w4a4_{case.kind}_{layout}_{'f32' if dtype == np.float32 else 'bf16'}"
    grid = (-(-n // FEATURES), rows // 32 + len(case.counts) + 1)
    kernels(
        name, grid, 128, case.a, a_scales, case.b, b_scales, case.offsets, scale_offsets, case.alphas, row_alphas, out,
        np.int32(rows), np.int32(len(case.counts)), np.int32(n), np.int32(k),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_w4a4_is_the_tensor_core_product(w4a4: HostKernels, kind: str, layout: str, dtype) -> None:
    case = w4a4_case(kind, (0, 1, 33), 40, 160, seed=1)  # K ends inside a step, N inside a tile
    np.testing.assert_array_equal(bits(run_w4a4(w4a4, case, layout, dtype)), bits(case.expected(dtype)))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_w4a4_with_any_scale_byte_and_any_alpha(w4a4: HostKernels, kind: str) -> None:
    case = w4a4_case(kind, (5, 0, 1, 17, 3, 2, 8, 9), 24, 128, garbage=True, seed=2)
    expected = case.expected(np.float32)
    assert np.isnan(expected).any()
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(bits(run_w4a4(w4a4, case, "linear", np.float32)), bits(expected))


def test_w4a4_with_an_alpha_for_each_row(w4a4: HostKernels) -> None:
    case = w4a4_case("nvfp4", (3, 4), 16, 64, seed=3)
    row_alphas = np.linspace(-1, 1, 7, dtype=np.float32)
    expected = case.expected(np.float32, row_alphas)
    np.testing.assert_array_equal(bits(run_w4a4(w4a4, case, "linear", np.float32, row_alphas)), bits(expected))


def test_rows_behind_the_last_expert_are_zero(w4a4: HostKernels, w4a16: HostKernels) -> None:
    case = w4a4_case("nvfp4", (3, 4), 160, 64, seed=7)
    shorter = replace(case, counts=(3, 2))
    for dtype in (np.float32, BFLOAT16):
        out = run_w4a4(w4a4, shorter, "linear", dtype)
        np.testing.assert_array_equal(bits(out[:3]), bits(case.expected(dtype)[:3]))
        assert not bits(out[5:]).any()
    x = w4a16_case((3, 4), 160, 64, seed=7)
    out = run_w4a16(w4a16, replace(x, counts=(3, 2)), 16)
    assert not bits(out[5:]).any()
    assert bits(out[:5]).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_w4a4_on_ragged_experts(w4a4: HostKernels, layout: str) -> None:
    case = w4a4_case("nvfp4", (0, 1, 127, 128, 129), 136, 192, seed=4)
    np.testing.assert_array_equal(bits(run_w4a4(w4a4, case, layout, np.float32)), bits(case.expected(np.float32)))


# ------------------------------------------------------------------------------------------------- W4A16


def prepacked(kernels: HostKernels, packed: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, ...]:
    experts, n, k = packed.shape[0], packed.shape[1], packed.shape[2] * 2
    pieces = experts * -(-n // 16) * -(-k // 64)
    words, lifted = np.zeros((pieces, 32, 4), np.uint32), np.zeros((pieces, 8, 2), np.uint32)
    row_nan = np.zeros((experts, n), np.uint8)
    sizes = (np.int32(experts), np.int32(n), np.int32(k))
    kernels("nv_w4a16_prepack", -(-pieces // 4), 128, packed, scales, words, lifted, row_nan, *sizes)
    return words, lifted, row_nan


def test_widened_weights_are_exact(w4a16: HostKernels) -> None:
    """All 16 codes under all finite scale bytes, from the registers the GEMM multiplies."""
    every = np.array([byte for byte in range(256) if byte % 128 != 127], np.uint8)
    case = w4a16_case((0,), 254, 16)
    packed = np.tile(np.arange(16, dtype=np.uint8)[0::2] | (np.arange(16, dtype=np.uint8)[1::2] << 4), (1, 254, 1))
    for packed_now, scales in ((packed, every[None, :, None]), (case.packed, case.scales)):
        words, lifted, row_nan = prepacked(w4a16, packed_now, scales)
        out = np.zeros((1, 254, 16), BFLOAT16)
        w4a16("nv_w4a16_widen", -(-len(words) // 4), 128, words, lifted, out, np.int32(1), np.int32(254), np.int32(16))
        wanted = type(case)(case.x, packed_now, scales, case.decode, (0,)).weights()
        np.testing.assert_array_equal(out.astype(np.float32), wanted)
        np.testing.assert_array_equal(wanted.astype(BFLOAT16).astype(np.float32), wanted)
        assert not row_nan.any()


def run_w4a16(kernels: HostKernels, case, tokens: int) -> np.ndarray:
    words, lifted, row_nan = prepacked(kernels, case.packed, case.scales)
    rows, (experts, n, half) = len(case.x), case.packed.shape
    out = np.full((rows, n), np.nan, BFLOAT16)
    grid = (-(-n // (256 if tokens == 16 else 128)), rows // tokens + experts + 1)
    kernels(
        f"nv_grouped_w4a16_{tokens}", grid, 128, case.x, words, lifted, row_nan, case.decode, case.offsets, out,
        np.int32(rows), np.int32(experts), np.int32(n), np.int32(2 * half),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("tokens", "any_scale"), [(16, False), (16, True), (32, False), (64, False)])
def test_w4a16_is_the_product_within_its_bound(w4a16: HostKernels, tokens: int, any_scale: bool) -> None:
    # more steps than stages, K inside a step, N inside a block and not a multiple of 16 rows a warp
    case = w4a16_case((0, 1, tokens + 3, 9), 152, 336, seed=5, any_scale=any_scale)
    out, (expected, allowed) = run_w4a16(w4a16, case, tokens).astype(np.float64), case.expected()
    assert (np.abs(out - expected) <= allowed).all()
    assert np.abs(expected).max() > 100 * allowed.max() / 16  # the bound is tight enough to mean something


def test_scaling_rows_after_a_product(w4a16: HostKernels) -> None:
    rng = np.random.default_rng(8)
    out = rng.standard_normal((90, 24)).astype(BFLOAT16)
    decode = np.array([0.5, np.nan, -3e38], np.float32)
    wanted = np.zeros_like(out)
    for rows, factor in ((slice(0, 70), decode[0]), (slice(71, 80), decode[2])):
        wanted[rows] = scale_and_round(out[rows].astype(np.float32), factor)
    wanted[70] = scale_and_round(out[70].astype(np.float32), decode[1])
    offsets = np.array([0, 70, 71, 80], np.int32)
    w4a16("nv_scale_rows", (1, 90 // 64 + 4), 128, out, decode, offsets, np.int32(90), np.int32(3), np.int32(24))
    np.testing.assert_array_equal(bits(out), bits(wanted))


def test_w4a16_answers_nan_where_a_scale_is_nan(w4a16: HostKernels) -> None:
    case = w4a16_case((3, 2), 32, 64, seed=6)
    case.scales[1, 5, 3] = 0xFF
    out = run_w4a16(w4a16, case, 16)
    nan = np.zeros((5, 32), bool)
    nan[3:, 5] = True
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), nan)
    assert set(bits(out)[nan].tolist()) == {0x7FFF}
