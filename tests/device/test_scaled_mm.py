"""Whether a library's products are let through, decided by two small products; stand-ins play library and kernel."""

import sys

import numpy as np
import pytest

from nvfp4viz import quant

torch = pytest.importorskip("torch", reason="the ops work on torch's tensors")


def product(a, b_packed, b_scales, offsets, alphas, out_dtype=torch.bfloat16, *, seen=lambda scales: scales):
    """The defined bits; `seen` says how a library reads the scale bytes."""
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.numpy()))
    a_scales, weight_scales = seen(a.scales.numpy()), seen(b_scales.numpy())
    acc = quant.mma_grouped(a.packed.numpy(), a_scales, owners, b_packed.numpy(), weight_scales, path="numpy")
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(acc * alphas.numpy()[owners, None]).to(out_dtype)


def one_unit_more(*operands):
    """Every result but zero and NaN one BF16 pattern further from zero, as another order of K may have it."""
    exact = product(*operands)
    return torch.where((exact == 0) | exact.isnan(), exact, (exact.view(torch.int16) + 1).view(torch.bfloat16))


def reading(seen):
    return lambda *operands: product(*operands, seen=seen)


def refuse(*operands):
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def subnormals_to_zero(scales):
    return np.where(scales & 0x78, scales, 0).astype(np.uint8)


def nan_as_480(scales):
    return np.where(scales & 0x7F == 0x7F, 0x7E, scales).astype(np.uint8)


def signs_are_nan(scales):
    return np.where(scales & 0x80, 0x7F, scales).astype(np.uint8)


LIBRARIES = {
    "the defined bits": (product, True),
    "refuses": (refuse, False),
    "subnormal scales are zero": (reading(subnormals_to_zero), False),
    "a NaN scale is a number": (reading(nan_as_480), False),
    "a sign bit is NaN": (reading(signs_are_nan), False),
    "scales one further": (reading(lambda scales: np.where(scales & 0x7F == 0x7F, scales, scales ^ 1)), False),
    "all results are one unit off": (one_unit_more, False),
    "NaN where none belongs": (lambda *operands: product(*operands) * float("nan"), False),
}


@pytest.fixture
def scaled_mm(monkeypatch):
    from nvfp4viz.device import ops  # noqa: F401

    monkeypatch.setattr(sys.modules["nvfp4viz.device.ops.gemm"], "grouped_gemm_w4a4", product)
    return sys.modules["nvfp4viz.device.ops.scaled_mm"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_let_through_where_it_reads_scales_as_the_kernels_do(scaled_mm, monkeypatch, name):
    library, works = LIBRARIES[name]
    monkeypatch.setattr(scaled_mm, "scaled_mm_grouped", library)
    assert scaled_mm.agrees(torch.device("cpu")) is works


def test_last_bits_may_differ_with_ordinary_scales_alone(scaled_mm, monkeypatch):
    """There the order of K is the library's own; in the second product every order gives the same bits."""

    def ordinary_off(*operands):
        return one_unit_more(*operands) if operands[4].abs().max() <= 1 else product(*operands)

    monkeypatch.setattr(scaled_mm, "scaled_mm_grouped", ordinary_off)
    assert scaled_mm.agrees(torch.device("cpu"))


def test_every_sum_of_the_second_product_is_exact(scaled_mm):
    """The reason for asking equality: whole multiples of 2^-20, fewer than 2^24 of them even without signs."""
    *_, (a, b, factor, exact) = scaled_mm._probe_scales()
    assert exact
    for scales in (a.numpy(), b.numpy()):
        kept = scales[scales & 0x7F != 0x7F]
        assert (kept & 0x7F).max() <= 0x0F  # at most 15 * 2^-9
        assert {0, 1, 0x80, 0x81} <= set(kept.tolist())
        assert {0x7F, 0xFF} <= set(scales.ravel().tolist())
    assert scaled_mm.K * 144 * 15 * 15 < 2**23
    assert factor == 2**18
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 256, (*scales.shape[:-1], scaled_mm.K // 2), dtype=np.uint8) for scales in (a, b)]
    left, right = (widened(code, scales.numpy()) for code, scales in zip(codes, (a, b), strict=True))
    for expert in range(3):
        owners = np.full(len(left), expert)
        acc = quant.mma_grouped(codes[0], a.numpy(), owners, codes[1], b.numpy(), path="numpy")
        np.testing.assert_array_equal(acc, left @ right[expert].T)  # NaN where NaN belongs


def widened(packed, scales):
    """Exact values, float64; the sign of a scale is not read."""
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    size = scales & 0x7F
    step = np.where(size == 0x7F, np.nan, size * 2.0**-9)  # up to 0x0F, subnormal or not, m * 2^-9
    return values * np.repeat(step, 16, axis=-1)
