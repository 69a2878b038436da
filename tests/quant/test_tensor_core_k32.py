"""The K = 32 product (FP8 times FP4 or FP8): the scalar rules, int64 arrays and Numba agree to the bit."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e2m1, decode_e4m3, pack_nibbles, widen_e2m1
from nvfp4viz.quant.tensor_core import mma_matmul
from nvfp4viz.quant.tensor_core_k32 import element_tables, mma_k32
from nvfp4viz.quant.tensor_core_k32_step import (
    ELEMENTS,
    mma_step_k32_reference,
    mma_step_k32_trace,
    split_element,
)

CANONICAL_NAN = 0x7FFFFFFF
FP8_FP4 = ("e4m3", "e2m1")
PAIRS = [FP8_FP4, ("e4m3", "e4m3"), ("e5m2", "e2m1"), ("e5m2", "e5m2"), ("e2m1", "e2m1")]
CODES = {"e4m3": 256, "e5m2": 256, "e2m1": 16}


def f32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def stored(codes: np.ndarray, element: str) -> np.ndarray:
    return pack_nibbles(codes) if element == "e2m1" else codes


def scalar_product(a, sa, b, sb, c, elements) -> np.ndarray:
    out = np.empty((len(a), len(b)), np.uint32)
    for m, n in np.ndindex(out.shape):
        acc = c[m, n]
        for step in range(a.shape[1] // 32):
            k = slice(32 * step, 32 * step + 32)
            acc = mma_step_k32_reference(a[m, k], b[n, k], sa[m, step], sb[n, step], acc, elements)
        out[m, n] = np.float32(acc).view(np.uint32)
    return out


def assert_all_paths_agree(a, sa, b, sb, c=None, elements=FP8_FP4) -> np.ndarray:
    """Scalar, NumPy and Numba give the same bits; returns them."""
    start = np.zeros((len(a), len(b)), np.float32) if c is None else c
    expected = scalar_product(a, sa, b, sb, start, elements)
    for path in ("numpy", "numba"):
        got = mma_k32(stored(a, elements[0]), sa, stored(b, elements[1]), sb, c, elements, path=path)
        np.testing.assert_array_equal(got.view(np.uint32), expected, err_msg=path)
    return expected


def random_side(rng, rows: int, k: int, element: str, scales=(120, 135), finite=True):
    codes = rng.integers(0, CODES[element], (rows, k), dtype=np.uint8)
    if finite:
        codes[element_tables(element)[2][codes] > 0] = 1
    return codes, rng.integers(*scales, (rows, k // 32)).astype(np.uint8)


def constant(code: int, scale: int = 127, rows: int = 1, k: int = 32):
    return np.full((rows, k), code, np.uint8), np.full((rows, k // 32), scale, np.uint8)


# ------------------------------------------------------------------------------------------ the pieces


@pytest.mark.parametrize("element", ELEMENTS)
def test_splitting_keeps_the_value_and_the_smallest_exponent(element):
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}[element]
    smallest = {"e4m3": -6, "e5m2": -14, "e2m1": 0}[element]
    for code in range(CODES[element]):
        value = float(np.array([code], np.uint8).view(dtype)[0])
        parts = split_element(code, element)
        if isinstance(parts, float):
            assert parts == value or (np.isnan(parts) and np.isnan(value))
        elif value == 0:
            assert parts == (0, -126)
        else:
            assert parts[0] * Fraction(2) ** parts[1] == Fraction(value)
            assert parts[1] == max(int(np.floor(np.log2(abs(value)))), smallest)


def test_the_tables_are_the_split():
    for element, code in product(ELEMENTS, range(256)):
        significands, exponents, special = element_tables(element)
        parts = split_element(code % CODES[element], element)
        if isinstance(parts, float):
            assert special[code] == (2 if np.isnan(parts) else 1)
        else:
            assert (int(significands[code]), int(exponents[code]), int(special[code])) == (parts[0] * 8, parts[1], 0)


# ------------------------------------------------------------------------------------------ rules, one by one


def test_a_nan_scale_or_accumulator_or_element_gives_the_canonical_nan():
    a, b = constant(0x38), constant(0x2)
    nan_scale = np.full((1, 1), 0xFF, np.uint8)
    assert assert_all_paths_agree(a[0], nan_scale, *b) == CANONICAL_NAN
    assert assert_all_paths_agree(*a, b[0], nan_scale) == CANONICAL_NAN
    assert assert_all_paths_agree(np.zeros_like(a[0]), nan_scale, *b) == CANONICAL_NAN  # zeros do not hide it
    for nan in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        assert assert_all_paths_agree(*a, *b, f32(nan)[None]) == CANONICAL_NAN
    for byte in (0x7F, 0xFF):
        bad = a[0].copy()
        bad[0, 17] = byte
        assert assert_all_paths_agree(bad, a[1], *b) == CANONICAL_NAN
        assert assert_all_paths_agree(bad, a[1], np.zeros_like(b[0]), b[1]) == CANONICAL_NAN  # NaN times zero
        assert assert_all_paths_agree(bad, a[1], *b, f32(0x7F800000)[None]) == CANONICAL_NAN


def test_a_nan_in_an_early_step_outlives_the_later_ones():
    a, sa = constant(0x38, k=96)
    b, sb = constant(0x2, k=96)
    sa[0, 0] = 0xFF
    assert assert_all_paths_agree(a, sa, b, sb) == CANONICAL_NAN
    assert assert_all_paths_agree(a, sa[:, ::-1].copy(), b, sb, f32(0x7F800000)[None]) == CANONICAL_NAN


def test_an_infinite_accumulator_stays_infinite():
    a, b = constant(0x7E), constant(0xF)
    for bits in (0x7F800000, 0xFF800000):
        assert assert_all_paths_agree(*a, *b, f32(bits)[None]) == bits


def test_infinities_of_e5m2():
    """0x7C and 0xFC are infinite: they win, meet their opposite, or meet a zero."""
    elements = ("e5m2", "e5m2")
    plain = constant(0x3C)
    for place, bits in ((0x7C, 0x7F800000), (0xFC, 0xFF800000)):
        a, sa = constant(0x3C)
        a[0, 5] = place
        assert assert_all_paths_agree(a, sa, *plain, None, elements) == bits
        assert assert_all_paths_agree(*plain, a, sa, None, elements) == bits
        assert assert_all_paths_agree(a, sa, *plain, f32(bits ^ 0x80000000)[None], elements) == CANONICAL_NAN
        assert assert_all_paths_agree(a, sa, *constant(0x80), None, elements) == CANONICAL_NAN  # infinity times zero
        a[0, 6] = place ^ 0x80
        assert assert_all_paths_agree(a, sa, *plain, None, elements) == CANONICAL_NAN
        zeros = np.full((1, 32), 0x3C, np.uint8)
        zeros[0, 6] = 0
        assert assert_all_paths_agree(a, sa, zeros, plain[1], None, elements) == CANONICAL_NAN


def test_infinities_among_random_elements_over_several_steps():
    rng = np.random.default_rng(1)
    for elements in (("e5m2", "e2m1"), ("e5m2", "e5m2"), ("e4m3", "e5m2")):
        a = random_side(rng, 12, 96, elements[0])
        b = random_side(rng, 9, 96, elements[1])
        for side, element in ((a, elements[0]), (b, elements[1])):
            if element == "e5m2":
                side[0][rng.random(side[0].shape) < 0.01] = 0x7C
                side[0][rng.random(side[0].shape) < 0.005] = 0xFC
        bits = assert_all_paths_agree(*a, *b, None, elements)
        values = bits.view(np.float32)
        assert np.isinf(values).any()
        assert np.isfinite(values).any() or elements == ("e5m2", "e5m2")


def test_overflow_becomes_the_infinity_of_its_sign():
    for code, bits in ((0x7E, 0x7F800000), (0xFE, 0xFF800000)):
        assert assert_all_paths_agree(*constant(code, 250), *constant(0x7, 250)) == bits
    # 32 * 2^122 = 2^127 fits; with the accumulator it is 2^128, one step of K later it is still infinite
    a, b = constant(0x38, 188, k=64), constant(0x2, 188, k=64)
    assert assert_all_paths_agree(a[0][:, :32], a[1][:, :1], b[0][:, :32], b[1][:, :1]) == 0x7F000000
    assert assert_all_paths_agree(*a, *b) == 0x7F800000
    ones, scales = np.full((1, 96), 0x38, np.uint8), np.full((1, 3), 188, np.uint8)
    ones[0, 32:] |= 0x80  # 2^127 - 2^127 - 2^127
    assert assert_all_paths_agree(ones, scales, np.full((1, 96), 2, np.uint8), scales) == 0xFF000000


def test_every_product_is_a_term_of_its_own():
    """Two halves of a unit vanish one by one; the K = 64 kinds sum sixteen products before they cut."""
    a, sa = constant(0)
    b, sb = constant(0)
    a[0, :2], b[0, :2] = 0x38, 0x2  # 1.0 * 1.0, twice
    sa[0, 0] = sb[0, 0] = 127 - 13  # each product is 2^-26 beside c = -1: half a unit of 2^-25
    trace = mma_step_k32_trace(a[0], b[0], sa[0, 0], sb[0, 0], -1.0)
    assert [term.aligned for term in trace.terms[:2]] == [0, 0]
    assert trace.terms[0].lost == Fraction(1, 1 << 26)
    assert assert_all_paths_agree(a, sa, b, sb, f32(0xBF800000)[None]) == 0xBF800000
    sa[0, 0] += 1  # 2^-25 each: both are kept, and f32's last place below 1 is 2^-24
    assert assert_all_paths_agree(a, sa, b, sb, f32(0xBF800000)[None]) == 0xBF7FFFFF


def test_twenty_five_places_and_not_thirty_five():
    """One FP4 product of 2^-26 beside 1.0: the K = 64 kind keeps it until its result is cut, this one drops it."""
    codes = np.zeros((1, 64), np.uint8)
    codes[0, :2] = 2
    scales = np.full((1, 2), 114, np.uint8)
    c = np.full((1, 1), -1.0, np.float32)
    k64 = mma_matmul(pack_nibbles(codes), scales, pack_nibbles(codes), scales, c, "mxfp4")
    k32 = mma_k32(pack_nibbles(codes), scales, pack_nibbles(codes), scales, c, ("e2m1", "e2m1"))
    assert k64.view(np.uint32) == 0xBF7FFFFF
    assert k32.view(np.uint32) == 0xBF800000


def test_truncation_is_toward_zero_on_both_sides():
    for sign_code, c in ((0xB8, 1.0), (0x38, -1.0)):
        a, sa = constant(0, 114)
        b, sb = constant(2, 114)
        a[0, 0] = sign_code
        assert assert_all_paths_agree(a, sa, b, sb, np.full((1, 1), c, np.float32)).view(np.float32) == c


def test_zero_terms_have_exponent_minus_126_and_can_still_set_the_step_s():
    """Zeros on both sides stay out of the way; under the largest scales a zero times a number does not."""
    a, sa = constant(0x00, 254)
    b, sb = constant(0x80 & 0xF, 254)
    trace = mma_step_k32_trace(a[0], b[0], 254, 254, 1.0)
    assert [term.exponent for term in trace.terms] == [2] * 32 + [0]  # -126 - 126 + 127 + 127
    c = f32(0x3F800001)[None]
    assert assert_all_paths_agree(a, sa, b, sb, c) == 0x3F800001  # 25 places from 2^2 reach 2^-23
    six = np.full_like(b, 7)  # e(6) = 2: the zero products stand at 2^130, and c is cut away
    trace = mma_step_k32_trace(a[0], six[0], 254, 254, 1.0)
    assert trace.max_exponent == -126 + 2 + 254
    assert assert_all_paths_agree(a, sa, six, sb, c) == 0
    for bits in (1, 0x80000001, 0x007FFFFF, 0x3F800001):  # under ordinary scales every accumulator passes unharmed
        assert assert_all_paths_agree(*constant(0), *constant(0), f32(bits)[None]) == bits


def test_an_exact_zero_sum_is_plus_zero():
    a, b = constant(0x38), constant(0xA)
    assert assert_all_paths_agree(*a, *b, np.full((1, 1), 32, np.float32)) == 0
    for c in (0x00000000, 0x80000000):
        assert assert_all_paths_agree(*constant(0x80), *constant(8), f32(c)[None]) == 0


def test_the_result_is_truncated_and_subnormals_are_kept():
    a, sa = constant(0x01, 1)
    b, sb = constant(0x1, 1)  # 2^-9 * 2^-1 * 2^-252: below everything
    assert assert_all_paths_agree(a, sa, b, sb) == 0
    a, sa = constant(0x38, 56)
    b, sb = constant(0x3, 60)  # 1.5 * 2^(56 + 60 - 254) = 1.5 * 2^-138, 32 times: a subnormal
    assert f32(int(assert_all_paths_agree(a, sa, b, sb)[0, 0]))[0] == np.float32(1.5 * 2.0**-133)
    a, sa = constant(0, 40)
    a[0, 0] = 0x39  # 1.125 * 2^(40 + 65 - 254) = 1.125 * 2^-149: cut to one unit
    assert assert_all_paths_agree(a, sa, *constant(0x2, 65)) == 1


def test_widening_fp4_keeps_values_but_not_every_bit():
    """0.5 is subnormal in E2M1 (exponent 0) and normal in E4M3 (exponent -1): the step's exponent is another."""
    a, sa = constant(0)
    b, sb = constant(0)
    a[0, :2], b[0, :2] = (0x38, 0xB8), 1  # 0.5 - 0.5
    c = f32(0x3E000001)[None]  # 2^-3, and one last place more
    assert assert_all_paths_agree(a, sa, b, sb, c) == 0x3E000000
    assert assert_all_paths_agree(a, sa, widen_e2m1(b), sb, c, ("e4m3", "e4m3")) == 0x3E000001


# ------------------------------------------------------------------------------------------ equal bits, in bulk


@pytest.mark.parametrize("elements", PAIRS, ids="-".join)
def test_all_pairs_of_codes(elements):
    """Every finite code against every one: 32 equal products under scales of 1 are exact, so floats can tell."""
    sides = []
    for element in elements:
        codes = np.arange(CODES[element], dtype=np.uint8)
        codes = codes[element_tables(element)[2][codes] == 0]
        if elements != FP8_FP4:
            codes = codes[:: max(1, len(codes) // 24)]
        sides.append((np.repeat(codes[:, None], 32, axis=1), np.full((len(codes), 1), 127, np.uint8)))
    bits = assert_all_paths_agree(*sides[0], *sides[1], None, elements)
    if elements == FP8_FP4:
        values = decode_e4m3(sides[0][0][:, 0]).astype(np.float64)[:, None] * decode_e2m1(sides[1][0][:, 0])
        np.testing.assert_array_equal(bits.view(np.float32), 32 * values)


@pytest.mark.parametrize("elements", PAIRS, ids="-".join)
@pytest.mark.parametrize("scales", [(120, 135), (0, 255)], ids=["ordinary", "any"])
def test_random_operands_and_accumulators(elements, scales):
    rng = np.random.default_rng(2)
    a = random_side(rng, 10, 96, elements[0], scales)
    b = random_side(rng, 11, 96, elements[1], scales)
    c = (rng.standard_normal((10, 11)) * 2.0 ** rng.integers(-30, 30, (10, 11))).astype(np.float32)
    assert_all_paths_agree(*a, *b, c, elements)


def test_any_bits_at_all():
    """Random bytes and accumulators: NaN elements and scales, infinities and subnormals come along."""
    rng = np.random.default_rng(3)
    a = random_side(rng, 24, 64, "e4m3", (0, 256), finite=False)
    a[0][::2][element_tables("e4m3")[2][a[0][::2]] > 0] = 0
    b = random_side(rng, 24, 64, "e2m1", (0, 256))
    c = rng.integers(0, 1 << 32, (24, 24), dtype=np.uint32).view(np.float32)
    c[0, :6] = f32(0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF)
    assert_all_paths_agree(*a, *b, c)


def test_all_pairs_of_scale_bytes_on_the_array_paths():
    """256 x 256, from nothing over subnormals to infinity; the scalar joins on every thirteenth pair."""
    rng = np.random.default_rng(4)
    a, _ = random_side(rng, 256, 32, "e4m3")
    b, _ = random_side(rng, 256, 32, "e2m1")
    scales = np.arange(256, dtype=np.uint8)[:, None]
    c = rng.standard_normal((256, 256)).astype(np.float32)
    c[::3] = 0
    paths = [mma_k32(a, scales, pack_nibbles(b), scales, c, path=p).view(np.uint32) for p in ("numpy", "numba")]
    np.testing.assert_array_equal(*paths)
    magnitude = np.abs(paths[0].view(np.float32))
    assert np.isinf(magnitude).any()
    assert ((magnitude > 0) & (magnitude < np.finfo(np.float32).tiny)).any()
    assert (paths[0][255] == CANONICAL_NAN).all()
    for flat in range(0, 65536, 13):
        m, n = divmod(flat, 256)
        want = mma_step_k32_reference(a[m], b[n], scales[m, 0], scales[n, 0], c[m, n])
        assert paths[0][m, n] == want.view(np.uint32)


def test_cancellation():
    """``c`` is the negated product, off by a few last places: what is left is what truncation decided."""
    rng = np.random.default_rng(5)
    a, b = random_side(rng, 12, 64, "e4m3"), random_side(rng, 12, 64, "e2m1")
    found = mma_k32(a[0], a[1], pack_nibbles(b[0]), b[1])
    bits = found.view(np.int32) + rng.integers(-2, 3, found.shape).astype(np.int32)
    assert_all_paths_agree(*a, *b, -bits.astype(np.int32).view(np.float32))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 64), (5, 0, 64), (1, 1, 32), (130, 96, 256)])
def test_shapes_and_threads(m, n, k):
    rng = np.random.default_rng(6)
    a, b = random_side(rng, m, k, "e4m3"), random_side(rng, n, k, "e2m1")
    got = [mma_k32(a[0], a[1], pack_nibbles(b[0]), b[1], path=path) for path in ("numpy", "numba")]
    assert got[0].shape == (m, n)
    np.testing.assert_array_equal(got[0].view(np.uint32), got[1].view(np.uint32))


def test_inputs_may_be_read_only_and_stay_untouched():
    rng = np.random.default_rng(7)
    a, b = random_side(rng, 4, 64, "e4m3"), random_side(rng, 4, 64, "e2m1")
    arrays = [*a, pack_nibbles(b[0]), b[1], np.ones((4, 4), np.float32)]
    for array in arrays:
        array.flags.writeable = False
    kept = [array.copy() for array in arrays]
    mma_k32(*arrays)
    for array, before in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"elements": ("e3m2", "e2m1")}, "mma.element"),
        ({"a": np.zeros((2, 48), np.uint8)}, "mma.scales"),
        ({"a_scales": np.zeros((2, 1), np.uint8)}, "mma.scales"),
        ({"a": np.zeros((2, 64), np.int8)}, "mma.dtype"),
        ({"b": np.zeros((2, 16), np.uint8), "b_scales": np.zeros((2, 1), np.uint8)}, "mma.shape"),
        ({"c": np.zeros((2, 3), np.float32)}, "mma.accumulator"),
        ({"c": np.zeros((2, 2))}, "mma.accumulator"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, code):
    fitting = {
        "a": np.zeros((2, 64), np.uint8),
        "a_scales": np.zeros((2, 2), np.uint8),
        "b": np.zeros((2, 32), np.uint8),
        "b_scales": np.zeros((2, 2), np.uint8),
    }
    with pytest.raises(FormatError) as error:
        mma_k32(**{**fitting, **arguments})
    assert error.value.code == code


def test_a_step_of_the_wrong_size_is_refused():
    with pytest.raises(FormatError) as error:
        mma_step_k32_trace([0] * 31, [0] * 32, 127, 127, 0.0)
    assert error.value.code == "mma.step-size-k32"


@pytest.mark.parametrize(
    ("a", "b", "scale", "elements", "name"),
    [
        (0, 16, 127, ("e4m3", "e2m1"), "E2M1"),
        (-1, 0, 127, ("e2m1", "e4m3"), "E2M1"),
        (256, 0, 127, ("e4m3", "e2m1"), "E4M3"),
        (0, 256, 127, ("e4m3", "e5m2"), "E5M2"),
        (0, 0, 256, ("e4m3", "e2m1"), "UE8M0"),
    ],
)
def test_a_step_refuses_what_is_no_code_of_its_format(a, b, scale, elements, name):
    with pytest.raises(FormatError) as error:
        mma_step_k32_trace([a] * 32, [b] * 32, 127, scale, 0.0, elements)
    assert (error.value.code, error.value.params["format"]) == ("format.code-range", name)
