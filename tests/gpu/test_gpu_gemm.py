"""Grouped GEMMs on the GPU: W4A4 bit for bit against the CPU's tensor-core product, W4A16 within its stated bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nvfp4viz.errors import FormatError
from tests.kernels.gemm_cases import BFLOAT16, RAGGED, W4A4Case, W4A16Case, bits, mma_tiles_case, w4a4_case, w4a16_case


@pytest.fixture(scope="module")
def ops():
    from nvfp4viz.device import ops

    return ops


def cuda(array):
    from nvfp4viz.device.dispatch import to_cuda

    return to_cuda(array)


def numpy_of(tensor):
    from nvfp4viz.device.dispatch import to_numpy_bf16

    return to_numpy_bf16(tensor) if tensor.element_size() == 2 else tensor.cpu().numpy()


def run_w4a4(ops, torch, case: W4A4Case, layout: str, dtype, row_alphas=None) -> np.ndarray:
    recipe = {"nvfp4": "ieee", "mxfp4": "ocp-floor"}[case.kind]
    shape = (len(case.a), case.a.shape[1] * 2)
    a_scales, b_scales, offsets = cuda(case.a_scales), cuda(case.b_scales), cuda(case.offsets)
    owner = None
    if layout == "tiles of each expert":
        a_scales, b_scales, owner = ops.swizzle(a_scales, offsets), ops.swizzle(b_scales), offsets
    elif layout == "tiles of the matrix":
        a_scales, b_scales = ops.swizzle(a_scales), ops.swizzle(b_scales)
    name = "linear" if layout == "linear" else "swizzled"
    a = ops.DeviceQuantized(cuda(case.a), a_scales, 1.0, recipe, shape, name, owner)
    out = ops.grouped_gemm_w4a4(
        a, cuda(case.b), b_scales, offsets, cuda(case.alphas),
        torch.float32 if dtype == np.float32 else torch.bfloat16,
        row_alphas=None if row_alphas is None else cuda(row_alphas),
    )  # fmt: skip
    return numpy_of(out)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "tiles of each expert", "tiles of the matrix"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_w4a4_on_ragged_experts(ops, torch, kind, layout, dtype):
    """0, 1, 127, 128 and 129 rows; K ends inside a step, N inside a tile."""
    case = w4a4_case(kind, RAGGED, 200, 352, seed=1)
    np.testing.assert_array_equal(bits(run_w4a4(ops, torch, case, layout, dtype)), bits(case.expected(dtype)))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "tiles of each expert"])
def test_w4a4_with_any_scale_byte_and_any_alpha(ops, torch, kind, layout):
    case = w4a4_case(kind, (5, 0, 40, 129, 3, 2, 64, 33), 136, 512, garbage=True, seed=2)
    expected = case.expected(np.float32)
    assert np.isnan(expected).any()
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(bits(run_w4a4(ops, torch, case, layout, np.float32)), bits(expected))


def test_w4a4_at_the_size_of_a_layer(ops, torch):
    counts = tuple(np.random.default_rng(3).multinomial(512, np.full(64, 1 / 64)).tolist())
    case = w4a4_case("nvfp4", counts, 256, 2816, seed=3)
    np.testing.assert_array_equal(bits(run_w4a4(ops, torch, case, "linear", BFLOAT16)), bits(case.expected(BFLOAT16)))


def test_w4a4_with_an_alpha_for_each_row_and_rows_behind(ops, torch):
    case = w4a4_case("nvfp4", (3, 40), 72, 128, seed=4)
    row_alphas = np.random.default_rng(5).standard_normal(43).astype(np.float32)
    expected = case.expected(np.float32, row_alphas)
    got = run_w4a4(ops, torch, case, "linear", np.float32, row_alphas)
    np.testing.assert_array_equal(bits(got), bits(expected))
    shorter = run_w4a4(ops, torch, replace(case, counts=(3, 30)), "linear", np.float32, row_alphas)
    np.testing.assert_array_equal(bits(shorter[:33]), bits(expected[:33]))
    assert not bits(shorter[33:]).any()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("soft", [False, True])
def test_one_instruction_on_many_tiles(ops, kind, soft):
    case = mma_tiles_case(kind, 3001, seed=5)
    operands = map(cuda, (case.a, case.a_scales, case.b, case.b_scales, case.c))
    out = numpy_of(ops.mma_tiles(*operands, kind=kind, soft=soft))
    np.testing.assert_array_equal(bits(out), bits(case.expected()))


def reference_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, output_dtype):
    """What ``scaled_mm`` is documented to give, in float64, from the very arguments: packed codes, swizzled scales."""
    import torch

    from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles, unswizzle_128x4

    names = [[kind.name for kind in kinds] for kinds in (recipe_a, recipe_b, swizzle_a, swizzle_b)]
    assert names == [["BlockWise1x16", "TensorWise"]] * 2 + [["SWIZZLE_32_4_4", "NO_SWIZZLE"]] * 2
    values, factor = [], 1.0
    for codes, (scales, whole) in ((a, scale_a), (b.t(), scale_b)):
        packed = codes.view(torch.uint8).cpu().numpy()
        blocks = unswizzle_128x4(scales.view(torch.uint8).cpu().numpy(), len(packed), packed.shape[1] // 8)
        elements = decode_e2m1(unpack_nibbles(packed)).astype(np.float64)
        # UE4M3: the tensor core does not look at the sign bit.
        values.append(elements * np.repeat(decode_e4m3(blocks & 0x7F).astype(np.float64), 16, axis=1))
        factor *= float(whole.cpu())
    return torch.from_numpy(values[0] @ values[1].T * factor).to(a.device).to(output_dtype)


@pytest.mark.parametrize("layout", ["linear", "each expert", "matrix"])
def test_the_library_is_given_every_expert_s_own_operands(ops, torch, monkeypatch, layout):
    """The library itself runs on data-centre Blackwell alone: a stand-in reads the arguments as it would."""
    from nvfp4viz.device.ops import scaled_mm

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", reference_scaled_mm)
    case = w4a4_case("nvfp4", (0, 1, 127, 0, 129), 144, 176, seed=15)
    offsets, a_scales, b_scales, owner = cuda(case.offsets), cuda(case.a_scales), cuda(case.b_scales), None
    if layout != "linear":
        owner = offsets if layout == "each expert" else None
        a_scales, b_scales = ops.swizzle(a_scales, owner), ops.swizzle(b_scales)
    a = ops.DeviceQuantized(
        cuda(case.a), a_scales, 1.0, "ieee", (257, 176), "linear" if layout == "linear" else "swizzled", owner
    )
    args = (a, cuda(case.b), b_scales, offsets, cuda(case.alphas), torch.float32)
    out = numpy_of(scaled_mm.scaled_mm_grouped(*args))
    expected = case.expected(np.float32)
    # The kernel cuts aligned terms at 2^-35 of the largest and sums at 24 bits, three steps here.
    np.testing.assert_allclose(out, expected, rtol=0, atol=float(np.abs(expected).max()) * 2.0**-18)
    assert scaled_mm.agrees(a.packed.device)


def test_a_wrong_or_refusing_library_is_not_taken(ops, torch, monkeypatch):
    from nvfp4viz.device.ops import scaled_mm
    from nvfp4viz.errors import DeviceError

    def refuses(*args, **options):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    for stand_in in (refuses, lambda *args, **options: reference_scaled_mm(*args, **options) * 1.1):
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
        assert not scaled_mm.agrees(cuda(np.zeros(1, np.uint8)).device)  # the CPU in tests/kernels, GPU or not
    case = w4a4_case("mxfp4", (3, 40), 72, 128, seed=16)  # the library has no MXFP4: auto falls back, library says why
    a = ops.DeviceQuantized(cuda(case.a), cuda(case.a_scales), 1.0, "ocp-floor", (43, 128))
    args = (a, cuda(case.b), cuda(case.b_scales), cuda(case.offsets), cuda(case.alphas), torch.float32)
    out = numpy_of(ops.grouped_gemm_w4a4(*args, method="auto"))
    np.testing.assert_array_equal(bits(out), bits(case.expected(np.float32)))
    with pytest.raises(DeviceError) as raised:
        ops.grouped_gemm_w4a4(*args, method="library")
    assert raised.value.code == "ops.library"


# ------------------------------------------------------------------------------------------------- W4A16


def run_w4a16(ops, case: W4A16Case, method: str = "fused", packed=None) -> np.ndarray:
    weight = (cuda(case.packed), cuda(case.scales)) if packed is None else (packed, None)
    return numpy_of(ops.grouped_gemm_w4a16(cuda(case.x), *weight, cuda(case.decode), cuda(case.offsets), method))


COUNTS = {
    16: (0, 1, 7, 16, 17, 3),
    32: (0, 1, 17, 32, 33),
    64: (0, 1, 63, 64, 65, 127, 128, 129),
}


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("size", [(2816, 704), (152, 336), (8, 16)])
def test_w4a16_is_the_product_within_its_bound(ops, tokens, size):
    from nvfp4viz.device.ops.gemm import tokens_of_a_block

    case = w4a16_case(COUNTS[tokens], *size, seed=6)
    assert tokens_of_a_block(len(case.x), len(case.counts)) == tokens, "the tile this case is meant for"
    expected, allowed = case.expected()
    out = run_w4a16(ops, case).astype(np.float64)
    assert (np.abs(out - expected) <= allowed).all(), float((np.abs(out - expected) / allowed).max())


@pytest.mark.parametrize("any_scale", [False, True])
def test_dequantizing_first_gives_the_product_too(ops, any_scale):
    """One rounding to BF16 more than the fused kernel, before the decode scale: 2^-9 of the value more."""
    case = w4a16_case((0, 5, 130, 1), 264, 448, seed=7, any_scale=any_scale)
    expected, allowed = case.expected()
    for method, more in (("dequantize", np.abs(expected) * 2.0**-8), ("fused", 0)):
        out = run_w4a16(ops, case, method).astype(np.float64)
        assert (np.abs(out - expected) <= allowed + more).all(), method


def test_widened_weights_are_exact(ops):
    """Every code under every finite scale byte, and random ones: what the registers hold is the product, exactly."""
    every = np.array([byte for byte in range(256) if byte % 128 != 127], np.uint8)
    codes = np.tile(np.arange(16, dtype=np.uint8)[0::2] | (np.arange(16, dtype=np.uint8)[1::2] << 4), (1, 254, 1))
    exhaustive = replace(w4a16_case((0,), 254, 16), packed=codes, scales=every[None, :, None].copy())
    for case in (exhaustive, w4a16_case((0, 0, 0), 136, 720, seed=8, any_scale=True)):
        weight = ops.pack_w4a16(cuda(case.packed), cuda(case.scales))
        got = numpy_of(ops.widened_weight(weight)).astype(np.float32)
        np.testing.assert_array_equal(got, case.weights())
        assert not weight.row_nan.any()


def test_a_token_does_not_feel_its_neighbours(ops):
    """Same bits alone, in a small tile and in a large one: a row's sum has one order."""
    case = w4a16_case((150, 100), 264, 704, seed=9)
    weight = ops.pack_w4a16(cuda(case.packed), cuda(case.scales))
    whole = bits(run_w4a16(ops, case, packed=weight))
    for rows in (1, 5, 20, 64, 150):
        few = replace(case, x=np.ascontiguousarray(case.x[:rows]), counts=(rows, 0))
        np.testing.assert_array_equal(bits(run_w4a16(ops, few, packed=weight)), whole[:rows])


def test_a_nan_scale_answers_nan_for_its_row(ops):
    case = w4a16_case((3, 2), 32, 64, seed=10)
    case.scales[1, 5, 3] = 0xFF
    nan = np.zeros((5, 32), bool)
    nan[3:, 5] = True
    for method in ("fused", "dequantize"):
        np.testing.assert_array_equal(np.isnan(run_w4a16(ops, case, method).astype(np.float32)), nan)


def test_no_rows_and_rows_behind(ops):
    case = w4a16_case((0, 0), 32, 64, seed=11)
    assert run_w4a16(ops, case).shape == (0, 32)
    case = w4a16_case((3, 4), 32, 64, seed=12)
    for method in ("fused", "dequantize"):
        whole = run_w4a16(ops, case, method)
        out = run_w4a16(ops, replace(case, counts=(3, 2)), method)
        np.testing.assert_array_equal(bits(out[:5]), bits(whole[:5]))
        assert not bits(out[5:]).any()


def test_memory_that_does_not_suffice_is_worked_around(ops, torch, monkeypatch):
    """Fewer experts at a time until they fit: the same bits as all at once."""
    from nvfp4viz.device.ops import gemm

    case = w4a16_case((5, 0, 9, 1, 20), 64, 128, seed=13)
    wanted, real, tried = run_w4a16(ops, case, "dequantize"), gemm._dequantized_by, []

    def tight(chunk, *rest):
        tried.append(chunk)
        if chunk > 2:
            raise torch.OutOfMemoryError("no room")
        return real(chunk, *rest)

    monkeypatch.setattr(gemm, "_dequantized_by", tight)
    np.testing.assert_array_equal(bits(run_w4a16(ops, case, "dequantize")), bits(wanted))
    assert tried == [5, 3, 2]


def test_wrong_tensors_are_refused_before_a_kernel_reads_them(ops, torch):
    case = w4a16_case((3, 2), 32, 64, seed=14)
    x, packed, scales, decode, offsets = map(cuda, (case.x, case.packed, case.scales, case.decode, case.offsets))
    for wrong in (
        (x.float(), packed, scales, decode, offsets),
        (x.cpu(), packed, scales, decode, offsets),
        (x[:, :48], packed, scales, decode, offsets),
        (x, packed, scales[:, :, :3].contiguous(), decode, offsets),
        (x, packed, scales, decode[:1], offsets),
        (x, packed, scales, decode, offsets.long()),
    ):
        for method in ("fused", "dequantize"):
            with pytest.raises(FormatError) as raised:
                ops.grouped_gemm_w4a16(*wrong, method)
            assert raised.value.code == "ops.tensor"
    with pytest.raises(FormatError) as raised:
        ops.grouped_gemm_w4a16(x, packed, scales, decode, offsets, "guess")
    assert raised.value.code == "ops.method"
