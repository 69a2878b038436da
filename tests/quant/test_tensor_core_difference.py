"""How far a tensor-core GEMM lies from the exact product; and where "always toward zero" holds."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles
from nvfp4viz.quant.tensor_core_difference import compare_accumulation, outward
from nvfp4viz.quant.tensor_core_step import FRACTION_BITS, mma_step_trace
from nvfp4viz.quant.types import QuantizedTensor


def _operand(rows: int, k: int, seed: int, *, signed: bool = True, spread: int = 8) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * np.repeat(2.0 ** -rng.integers(0, spread + 1, k // 16), 16)
    x = np.asarray((x if signed else np.abs(x)).astype(np.float32), ml_dtypes.bfloat16)
    return quant.quantize(x, recipe="vllm-cuda")


def _with_scales(operand: QuantizedTensor, scales: np.ndarray) -> QuantizedTensor:
    return QuantizedTensor(
        operand.packed, scales, operand.global_scale, operand.recipe, operand.block_size, operand.shape
    )


def _random_scales(operand: QuantizedTensor, seed: int) -> QuantizedTensor:
    """Any finite scale byte, negative, zero and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 256, operand.scales.shape).astype(np.uint8)
    scales[(scales & 0x7F) == 0x7F] = 0x80
    return _with_scales(operand, scales)


@pytest.fixture(scope="module")
def signed():
    return compare_accumulation(_operand(24, 1024, 1), _operand(32, 1024, 2))


@pytest.fixture(scope="module")
def positive():
    return compare_accumulation(_operand(24, 1024, 3, signed=False), _operand(32, 1024, 4, signed=False))


def _exact(a: QuantizedTensor, b: QuantizedTensor, row: int, column: int) -> Fraction:
    def values(operand: QuantizedTensor, at: int) -> list[Fraction]:
        codes, scales = decode_e2m1(unpack_nibbles(operand.packed[at])), np.abs(decode_e4m3(operand.scales[at]))
        return [Fraction(float(code)) * Fraction(float(scales[k // 16])) for k, code in enumerate(codes)]

    return sum((x * y for x, y in zip(values(a, row), values(b, column), strict=True)), Fraction(0))


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_product_is_that_of_fractions(seed):
    a, b = _random_scales(_operand(3, 192, seed), seed), _random_scales(_operand(2, 192, seed + 9), seed + 9)
    found = compare_accumulation(a, b)
    for row in range(3):
        for column in range(2):
            assert Fraction(int(found.exact[row, column]), 1 << 20) == _exact(a, b, row, column)


def test_one_step_is_that_of_the_explanation():
    a, b = _operand(4, 64, 5), _operand(5, 64, 6)
    found = compare_accumulation(a, b)
    for row in range(4):
        for column in range(5):
            seen = quant.tensor_core_explain(
                unpack_nibbles(a.packed[row]), unpack_nibbles(b.packed[column]), a.scales[row], b.scales[column]
            )
            assert found.tensor_core[row, column].view(np.uint32) == seen.result.view(np.uint32)
            assert found.float32[row, column] == seen.dequantized
            assert Fraction(int(found.exact[row, column]), 1 << 20) == seen.trace.exact
    assert found.split_differs == 0


def test_differences_are_exact(signed):
    for result in (signed.tensor_core, signed.float32):
        for row, column in ((0, 0), (7, 11), (23, 31)):
            exact = Fraction(int(signed.exact[row, column]), 1 << 20)
            off = Fraction(float(result[row, column])) - exact
            ulp = Fraction(float(np.spacing(np.abs(np.float32(float(exact))))))
            assert Fraction(signed.against_exact(result)[row, column]) == off / ulp * (1 if exact > 0 else -1)


def test_without_negative_products_nothing_exceeds_the_exact_sum(positive):
    off = positive.against_exact(positive.tensor_core)
    assert (off <= 0).all()
    assert (off < 0).mean() > 0.9  # and it is no empty statement: nearly all of them lose something


def test_with_signs_most_results_lie_nearer_zero_but_not_all(signed):
    """The sentence "always toward zero" is wrong for whole GEMMs: the cuts are, their sum is not."""
    for off in (signed.against_exact(signed.tensor_core), signed.against_float32()):
        assert (off < 0).sum() > (off > 0).sum() > 0


def test_float32_rounds_to_either_side(signed):
    off = signed.against_exact(signed.float32)
    assert 0.8 < (off < 0).sum() / (off > 0).sum() < 1.25  # nearest even has no side; bounds are for 768 outputs


@pytest.mark.parametrize("seed", range(50))
def test_every_single_cut_is_toward_zero(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (2, 64))
    scales = rng.integers(0, 0x7F, (2, 4))
    c = np.float32(rng.standard_normal() * 2.0 ** rng.integers(-20, 40))
    trace = mma_step_trace(*codes, *scales, c)
    unit = Fraction(2) ** (trace.max_exponent - FRACTION_BITS)
    for term in trace.terms:
        assert 0 <= term.lost * (1 if term.value > 0 else -1) < unit
    total = trace.total * unit
    assert abs(Fraction(float(trace.result))) <= abs(total)


def test_one_step_can_end_farther_from_zero_than_the_exact_sum():
    """A large positive accumulator and one small negative product: the product is cut off altogether."""
    a, b, one = [0xA] + [0] * 63, [2] + [0] * 63, [0x38] * 4
    trace = mma_step_trace(a, b, one, one, 2.0**40)
    assert trace.exact == 2**40 - 1
    assert Fraction(float(trace.result)) == 2**40 > trace.exact


def test_two_halves_are_added_in_float32():
    a, b = _operand(6, 192, 7), _operand(7, 192, 8)

    def part(low: int, high: int) -> np.ndarray:
        return quant.mma_matmul(
            *(
                np.ascontiguousarray(array)
                for operand in (a, b)
                for array in (operand.packed[:, low // 2 : high // 2], operand.scales[:, low // 16 : high // 16])
            )
        )

    found = compare_accumulation(a, b)
    assert np.array_equal(found.split.view(np.uint32), (part(0, 64) + part(64, 192)).view(np.uint32))


def test_the_order_of_k_decides_bits(signed):
    assert signed.split_differs > 0


@pytest.mark.parametrize(
    ("difference", "reference", "ulps"),
    [
        (2.0**-23, 1.0, 1.0),
        (-(2.0**-23), 1.0, -1.0),
        (2.0**-23, -1.0, -1.0),
        (2.0**-149, 2.0**-140, 1.0),  # subnormal: the spacing stays
        (-3.0, 0.0, 3 * 2.0**149),
        (0.0, 5.0, 0.0),
    ],
)
def test_outward_counts_spacings(difference, reference, ulps):
    assert outward(np.array([difference]), np.array([reference])).tolist() == [ulps]


def test_what_has_no_exact_product_is_refused():
    a, b = _operand(2, 64, 1), _operand(2, 64, 2)
    bad = a.scales.copy()
    bad[0, 0] = 0x7F
    with pytest.raises(FormatError) as error:
        compare_accumulation(_with_scales(a, bad), b)
    assert error.value.code == "mma.exact-nan"
    mx = quant.quantize(np.ones((2, 64), np.float32), recipe="ocp-floor")
    with pytest.raises(FormatError) as error:
        compare_accumulation(mx, mx)
    assert error.value.code == "gemm.recipe"
