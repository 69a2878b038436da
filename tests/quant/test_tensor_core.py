"""The tensor-core product: a scalar that follows the seven rules, int64 arrays, and a Numba kernel agree to the bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from nvfp4viz.errors import FormatError
from nvfp4viz.quant.tensor_core import mma_grouped, mma_matmul
from nvfp4viz.quant.tensor_core_step import (
    BLOCK_SIZE,
    E2M1_DOUBLED,
    mma_step_reference,
    mma_step_trace,
    split_f32,
    split_ue4m3,
    split_ue8m0,
    truncate_to_f32,
)

KINDS = ("nvfp4", "mxfp4")
ONE = {"nvfp4": 0x38, "mxfp4": 127}
CANONICAL_NAN = 0x7FFFFFFF


def f32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def pack(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def scalar_product(a, sa, b, sb, c, kind: str) -> np.ndarray:
    """Bits of ``c + A @ B.T`` by the scalar step alone: codes ``(M, K)`` and ``(N, K)``, padded here to whole steps."""
    block = BLOCK_SIZE[kind]
    pad = -a.shape[1] % 64
    a, b = (np.pad(codes, ((0, 0), (0, pad))) for codes in (a, b))
    sa, sb = (np.pad(scales, ((0, 0), (0, pad // block))) for scales in (sa, sb))
    out = np.empty((len(a), len(b)), np.uint32)
    for m in range(len(a)):
        for n in range(len(b)):
            acc = c[m, n]
            for k in range(0, a.shape[1], 64):
                scales = slice(k // block, (k + 64) // block)
                step = slice(k, k + 64)
                acc = mma_step_reference(
                    a[m, step].tolist(), b[n, step].tolist(), sa[m, scales].tolist(), sb[n, scales].tolist(), acc, kind
                )
            out[m, n] = acc.view(np.uint32)
    return out


def assert_all_paths_agree(a, sa, b, sb, c=None, kind="nvfp4") -> np.ndarray:
    """Scalar, NumPy and Numba give the same bits; returns them."""
    start = np.zeros((len(a), len(b)), np.float32) if c is None else c
    expected = scalar_product(a, sa, b, sb, start, kind)
    for path in ("numpy", "numba"):
        got = mma_matmul(pack(a), sa, pack(b), sb, c, kind, path=path).view(np.uint32)
        np.testing.assert_array_equal(got, expected, err_msg=path)
    return expected


def random_operand(rng, rows: int, k: int, kind: str, low: int, high: int):
    codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
    return codes, rng.integers(low, high, (rows, k // BLOCK_SIZE[kind])).astype(np.uint8)


def constant(rows: int, k: int, kind: str, code: int, scale: int):
    return np.full((rows, k), code, np.uint8), np.full((rows, k // BLOCK_SIZE[kind]), scale, np.uint8)


# ------------------------------------------------------------------------------------------ the pieces of the scalar


def test_doubled_codes_are_twice_the_values_of_e2m1():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [d / 2 for d in E2M1_DOUBLED] == values + [-v for v in values]


def test_splitting_keeps_the_value():
    import ml_dtypes

    ue4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for byte in range(256):
        parts = split_ue4m3(byte)
        assert (parts is None) == np.isnan(ue4m3[byte])
        if parts is not None:
            assert parts[0] * Fraction(2) ** parts[1] == Fraction(abs(ue4m3[byte]))
        parts = split_ue8m0(byte)
        assert (parts is None) == (byte == 255)
        assert parts is None or parts[0] * Fraction(2) ** parts[1] == Fraction(2) ** (byte - 127)
    for bits in (0x00000001, 0x007FFFFF, 0x00800000, 0xFF7FFFFF, 0x3F800001, 0x80000003):
        significand, exponent = split_f32(bits)
        assert significand * Fraction(2) ** exponent == Fraction(float(f32(bits)[0]))


def test_truncation_to_f32_drops_toward_zero():
    assert truncate_to_f32((1 << 24) + 1, 0) == 0x4B800000
    assert truncate_to_f32(-((1 << 26) - 1), 0) == 0xCC7FFFFF
    assert truncate_to_f32(1, -149) == 1
    assert truncate_to_f32(1, -150) == 0
    assert truncate_to_f32((1 << 24) - 1, -150) == 0x007FFFFF  # just below the normals: a subnormal, cut off
    assert truncate_to_f32(1, 127) == 0x7F000000
    assert truncate_to_f32(-1, 128) == 0xFF800000
    assert truncate_to_f32(0, 5) == 0


# ------------------------------------------------------------------------------------------ rules, one by one


def test_rule_1_a_nan_scale_or_accumulator_gives_the_canonical_nan():
    a, sa = constant(1, 64, "nvfp4", 2, 0x38)
    for byte in (0x7F, 0xFF):
        for group in range(4):
            bad = sa.copy()
            bad[0, group] = byte
            assert assert_all_paths_agree(a, bad, a, sa) == CANONICAL_NAN
            assert assert_all_paths_agree(a, sa, a, bad) == CANONICAL_NAN
            assert assert_all_paths_agree(np.zeros_like(a), bad, np.zeros_like(a), sa) == CANONICAL_NAN  # codes 0 too
    for nan in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        assert assert_all_paths_agree(a, sa, a, sa, f32(nan)[None]) == CANONICAL_NAN
    b, sb = constant(1, 64, "mxfp4", 2, 255)
    assert assert_all_paths_agree(b, sb, b, sb, kind="mxfp4") == CANONICAL_NAN
    b, sb = constant(1, 64, "mxfp4", 2, 0x7F)  # 0x7F is 1.0 in UE8M0
    assert assert_all_paths_agree(b, sb, b, sb, kind="mxfp4") == f32(0x42800000).view(np.uint32)


def test_rule_1_outranks_an_infinite_accumulator_and_holds_for_later_steps():
    a, sa = constant(1, 192, "nvfp4", 2, 0x38)
    sa[0, 5] = 0x7F
    for c in (0.0, np.inf, -np.inf):
        assert assert_all_paths_agree(a, sa, a, np.full_like(sa, 0x38), np.full((1, 1), c, np.float32)) == CANONICAL_NAN


def test_rule_2_the_sign_of_a_scale_is_ignored():
    rng = np.random.default_rng(1)
    a, sa = random_operand(rng, 3, 64, "nvfp4", 0, 0x7F)
    b, sb = random_operand(rng, 3, 64, "nvfp4", 0, 0x7F)
    plain = assert_all_paths_agree(a, sa, b, sb)
    np.testing.assert_array_equal(assert_all_paths_agree(a, sa | 0x80, b, sb), plain)
    np.testing.assert_array_equal(assert_all_paths_agree(a, sa, b, sb | 0x80), plain)


def test_rule_3_mxfp4_still_sums_dots_of_sixteen():
    """Two dots that share a scale are half a unit each and are cut off; one dot of 32 would be a whole unit."""
    a, sa = constant(1, 64, "mxfp4", 0, 0)
    b, sb = constant(1, 64, "mxfp4", 0, 0)
    a[0, [0, 16]] = b[0, [0, 16]] = 1  # 0.25 in the first dot and 0.25 in the second
    sa[0, 0] = sb[0, 0] = 127 - 17
    c = np.full((1, 1), -1.0, np.float32)
    assert assert_all_paths_agree(a, sa, b, sb, c, "mxfp4") == 0xBF800000
    trace = mma_step_trace(a[0], b[0], sa[0], sb[0], -1.0, "mxfp4")
    assert [term.exponent for term in trace.terms] == [-34, -34, -254, -254, 0]
    assert [term.aligned for term in trace.terms] == [0, 0, 0, 0, -(1 << 35)]
    a[0, 1] = b[0, 1] = 1  # both quarters in one dot: -1 + 2^-35, truncated toward zero
    a[0, 16] = 0
    assert assert_all_paths_agree(a, sa, b, sb, c, "mxfp4") == 0xBF7FFFFF


def test_rule_4_a_zero_dot_keeps_its_scales_exponents():
    """A group of zeros under the largest scales pushes the accumulator's low bits out."""
    a, sa = constant(1, 64, "nvfp4", 0, 0x7E)
    c = f32(0x3F800001)[None] * np.float32(2.0**-10)
    got = f32(int(assert_all_paths_agree(a, sa, a, sa, c)[0, 0]))[0]
    assert got == np.floor(np.float64(c[0, 0]) * 2.0**19) / 2.0**19  # cut at 35 bits below 2^16
    assert got != c[0, 0]


def test_rule_4_a_zero_scale_has_exponent_minus_126():
    a, sa = constant(1, 64, "nvfp4", 7, 0x00)
    _, sb = constant(1, 64, "nvfp4", 7, 0x7E)
    trace = mma_step_trace(a[0], a[0], sa[0], sb[0], 0.0)
    assert [term.exponent for term in trace.terms] == [-118] * 4 + [-126]
    for bits in (1, 3, 0x80000001, 0x007FFFFF, 0x00800001):  # even the smallest accumulator passes unharmed
        assert assert_all_paths_agree(a, sa, a, sb, f32(bits)[None]) == bits


def test_rule_6_cuts_each_term_at_35_bits_toward_zero():
    """Terms below the last bit vanish one by one, although together they would count; no sign rounds down."""
    a, sa = constant(1, 64, "nvfp4", 0, 0x08)  # 2^-6
    b, sb = constant(1, 64, "nvfp4", 0, 0x08)
    a[0, ::16] = 1
    b[0, ::16] = np.array([1, 1, 1, 9])
    c = np.full((1, 1), 2.0**22, np.float32)  # one unit is 2^-13, each term 2^-14
    trace = mma_step_trace(a[0], b[0], sa[0], sb[0], c[0, 0])
    assert [term.aligned for term in trace.terms] == [0, 0, 0, 0, 1 << 35]
    assert trace.terms[3].lost == -Fraction(1, 1 << 14)
    assert trace.exact - Fraction(float(trace.result)) == Fraction(1, 1 << 13)
    assert assert_all_paths_agree(a, sa, b, sb, c) == f32(0x4A800000).view(np.uint32)


def test_rule_7_truncates_instead_of_rounding():
    a, sa = constant(1, 64, "nvfp4", 0, 0x38)
    a[0, :2] = 2
    for codes, c, result in (
        ((2, 4), 2.0**24, 2.0**24 + 2),  # + 3: a round to nearest even would give 2^24 + 4
        ((10, 12), -(2.0**24), -(2.0**24) - 2),
        ((10, 0), 2.0**24, 2.0**24 - 1),  # a number of 24 bits stays
    ):
        b, sb = constant(1, 64, "nvfp4", 0, 0x38)
        b[0, :2] = codes
        bits = assert_all_paths_agree(a, sa, b, sb, np.full((1, 1), c, np.float32))
        assert bits.view(np.float32) == result


def test_rule_7_an_exact_zero_sum_is_plus_zero():
    a, sa = constant(1, 64, "nvfp4", 2, 0x38)
    b, sb = constant(1, 64, "nvfp4", 10, 0x38)
    assert assert_all_paths_agree(a, sa, b, sb, np.full((1, 1), 64, np.float32)) == 0
    zero, _ = constant(1, 64, "nvfp4", 8, 0x38)  # codes -0
    for c in (0x00000000, 0x80000000):
        assert assert_all_paths_agree(a, sa, zero, sb, f32(c)[None]) == 0
        assert assert_all_paths_agree(zero, sa, zero, sb, f32(c)[None]) == 0


def test_an_infinite_accumulator_stays_infinite():
    rng = np.random.default_rng(2)
    for kind in KINDS:
        a, sa = random_operand(rng, 2, 128, kind, 0, 127)
        c = np.array([[np.inf, -np.inf], [-np.inf, np.inf]], np.float32)
        np.testing.assert_array_equal(assert_all_paths_agree(a, sa, a, sa, c, kind), c.view(np.uint32))


# ------------------------------------------------------------------------------------------ equal bits, in bulk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 64, 96, 160, 256])
def test_random_data(kind, k):
    rng = np.random.default_rng(k)
    middle = ONE[kind]
    a = random_operand(rng, 6, k, kind, middle - 8, middle + 24)
    b = random_operand(rng, 70, k, kind, middle - 8, middle + 24)  # 70 columns: one whole tile and a rest
    assert_all_paths_agree(*a, *b, kind=kind)


def test_k_of_sixteen_and_forty_eight():
    rng = np.random.default_rng(3)
    for k in (16, 48, 80):
        a = random_operand(rng, 3, k, "nvfp4", 0, 0x7F)
        assert_all_paths_agree(*a, *random_operand(rng, 5, k, "nvfp4", 0, 0x7F))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """K short of a whole step equals K filled up with any finite-free zero groups: code 0, scale byte 0."""
    rng = np.random.default_rng(4)
    a, sa = random_operand(rng, 8, 96, kind, 0, 127)
    c = (rng.standard_normal((8, 8)) * 1e-38).astype(np.float32)
    pad = (0, 32 // BLOCK_SIZE[kind])
    padded = np.pad(a, ((0, 0), (0, 32))), np.pad(sa, ((0, 0), pad))
    short = mma_matmul(pack(a), sa, pack(a), sa, c, kind)
    whole = mma_matmul(pack(padded[0]), padded[1], pack(padded[0]), padded[1], c, kind)
    np.testing.assert_array_equal(short.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_all_pairs_of_codes(kind):
    codes = np.arange(16, dtype=np.uint8)
    everywhere = np.repeat(codes[:, None], 64, axis=1)
    scales = np.full((16, 64 // BLOCK_SIZE[kind]), ONE[kind], np.uint8)
    bits = assert_all_paths_agree(everywhere, scales, everywhere, scales, kind=kind)
    values = np.array(E2M1_DOUBLED) / 2
    np.testing.assert_array_equal(bits.view(np.float32), 64 * values[:, None] * values)
    once = np.zeros((16, 64), np.uint8)
    once[:, 37] = codes
    bits = assert_all_paths_agree(once, scales, everywhere, scales, kind=kind)
    np.testing.assert_array_equal(bits.view(np.float32), values[:, None] * values)


def test_all_pairs_of_ue4m3_bytes():
    """254 finite bytes against 254, four pairs a step, with an accumulator of any size; then the two NaN bytes."""
    rng = np.random.default_rng(5)
    finite = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    a = rng.integers(0, 16, (254, 64), dtype=np.uint8)
    sa = np.repeat(finite[:, None], 4, axis=1)
    b = rng.integers(0, 16, (64, 64), dtype=np.uint8)
    sb = np.resize(finite, 256).reshape(64, 4)
    c = (rng.standard_normal((254, 64)) * 2.0 ** rng.integers(-40, 40, (254, 64))).astype(np.float32)
    bits = assert_all_paths_agree(a, sa, b, sb, c)
    assert not np.isnan(bits.view(np.float32)).any()
    nan = np.tile(np.array([[0x7F], [0xFF]], np.uint8), (1, 4))
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)
    codes = np.zeros((256, 64), np.uint8)
    for path in ("numpy", "numba"):
        for got in (
            mma_matmul(pack(codes[:2]), nan, pack(codes), every, path=path),
            mma_matmul(pack(codes), every, pack(codes[:2]), nan, path=path),
        ):
            assert (got.view(np.uint32) == CANONICAL_NAN).all()


def test_all_pairs_of_ue8m0_bytes_on_the_array_paths():
    """All 256 x 256, results from 0 over f32 subnormals to infinity; the scalar joins on every seventeenth pair."""
    rng = np.random.default_rng(6)
    a = rng.integers(0, 16, (256, 64), dtype=np.uint8)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2, axis=1)
    c = rng.standard_normal((256, 256)).astype(np.float32)
    c[::3] = 0
    paths = [
        mma_matmul(pack(a), scales, pack(a), scales, c, "mxfp4", path=p).view(np.uint32) for p in ("numpy", "numba")
    ]
    np.testing.assert_array_equal(*paths)
    magnitude = np.abs(paths[0].view(np.float32))
    assert np.isinf(magnitude).any()
    assert ((magnitude > 0) & (magnitude < np.finfo(np.float32).tiny)).any()
    for flat in range(0, 65536, 17):
        m, n = divmod(flat, 256)
        want = mma_step_reference(a[m].tolist(), a[n].tolist(), scales[m], scales[n], c[m, n], "mxfp4")
        assert paths[0][m, n] == want.view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_and_zero_scales(kind):
    rng = np.random.default_rng(7)
    small = [0, 1, 2, 3, 7, 8, 0x80, 0x81, 0x87] if kind == "nvfp4" else [0, 1, 2, 40, 54, 63]
    a, sa = random_operand(rng, 16, 128, kind, 0, 1)
    sa = rng.choice(np.array(small, np.uint8), sa.shape)
    c = f32(0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x3F800000)[None]
    bits = assert_all_paths_agree(a, sa, a[:8], sa[:8], np.repeat(c, 16, axis=0), kind)
    if kind == "mxfp4":
        magnitude = np.abs(bits.view(np.float32))
        assert ((magnitude > 0) & (magnitude < np.finfo(np.float32).tiny)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_any_accumulator_bits(kind):
    """Random f32 patterns, so huge and tiny ones, NaN and infinities, over two steps."""
    rng = np.random.default_rng(8)
    a = random_operand(rng, 20, 128, kind, 0, 255)
    b = random_operand(rng, 20, 128, kind, 0, 255)
    c = rng.integers(0, 1 << 32, (20, 20), dtype=np.uint32).view(np.float32)
    c[0, :4] = f32(0x00000000, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF)
    assert_all_paths_agree(*a, *b, c, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cancellation(kind):
    """``c`` is the negated product, off by a few last places: what is left is what truncation decided."""
    rng = np.random.default_rng(9)
    middle = ONE[kind]
    a = random_operand(rng, 12, 64, kind, middle - 20, middle + 24)
    product = mma_matmul(pack(a[0]), a[1], pack(a[0]), a[1], None, kind)
    bits = product.view(np.int32) + rng.integers(-3, 4, product.shape).astype(np.int32)
    bits = assert_all_paths_agree(*a, *a, -bits.astype(np.int32).view(np.float32), kind)
    assert (bits == 0).any()


@pytest.mark.slow
def test_many_random_steps():
    rng = np.random.default_rng(10)
    for kind in KINDS:
        for low, high in ((0, 255), (ONE[kind] - 6, ONE[kind] + 6)):
            a = random_operand(rng, 120, 64, kind, low, high)
            b = random_operand(rng, 120, 64, kind, low, high)
            scale = 2.0 ** rng.integers(-30, 30, (120, 120))
            assert_all_paths_agree(*a, *b, (rng.standard_normal((120, 120)) * scale).astype(np.float32), kind)


# ------------------------------------------------------------------------------------------ whole matrices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 64), (5, 0, 64), (1, 1, 32), (300, 130, 512), (3, 700, 1024)])
def test_shapes_and_threads(kind, m, n, k):
    rng = np.random.default_rng(11)
    a, sa = random_operand(rng, m, k, kind, ONE[kind] - 8, ONE[kind] + 24)
    b, sb = random_operand(rng, n, k, kind, ONE[kind] - 8, ONE[kind] + 24)
    got = [mma_matmul(pack(a), sa, pack(b), sb, kind=kind, path=path) for path in ("numpy", "numba")]
    assert got[0].shape == (m, n)
    np.testing.assert_array_equal(got[0].view(np.uint32), got[1].view(np.uint32))


def test_inputs_may_be_read_only_strided_and_stay_untouched():
    rng = np.random.default_rng(12)
    a, sa = random_operand(rng, 8, 128, "nvfp4", 0x30, 0x50)
    packed = pack(a)
    want = mma_matmul(packed, sa, packed, sa)
    frozen = packed.copy(), sa.copy()
    for array in frozen:
        array.flags.writeable = False
    np.testing.assert_array_equal(mma_matmul(*frozen, *frozen), want)
    wide = np.repeat(packed, 2, axis=0)[::2], np.repeat(sa, 2, axis=0)[::2]
    np.testing.assert_array_equal(mma_matmul(*wide, *wide), want)
    c = np.ones((8, 8), np.float32)
    mma_matmul(packed, sa, packed, sa, c)
    assert (c == 1).all()


@pytest.mark.parametrize("path", ["numpy", "numba"])
def test_grouped_equals_one_product_per_row(path):
    rng = np.random.default_rng(13)
    experts = [random_operand(rng, 70, 96, "nvfp4", 0, 0x7F) for _ in range(5)]
    weights, scales = pack(np.stack([w for w, _ in experts])), np.stack([s for _, s in experts])
    a, sa = random_operand(rng, 17, 96, "nvfp4", 0, 0x7F)
    sa[3, 2] = 0x7F
    scales[4, 69, 5] = 0xFF
    chosen = rng.integers(0, 5, 17)  # some experts may get no row
    chosen[chosen == 2] = 4
    got = mma_grouped(pack(a), sa, chosen, weights, scales, path=path)
    for row, expert in enumerate(chosen):
        want = mma_matmul(pack(a[row : row + 1]), sa[row : row + 1], weights[expert], scales[expert], path="numpy")
        np.testing.assert_array_equal(got[row].view(np.uint32), want[0].view(np.uint32))
    assert np.isnan(got[3]).all()
    assert np.isnan(got[chosen == 4, 69]).all()
    assert mma_grouped(pack(a[:0]), sa[:0], chosen[:0], weights, scales, path=path).shape == (0, 70)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"kind": "fp4"}, "mma.kind"),
        ({"a_scales": np.zeros((2, 3), np.uint8)}, "mma.scales"),
        ({"b_packed": np.zeros((2, 64), np.uint8), "b_scales": np.zeros((2, 8), np.uint8)}, "mma.shape"),
        ({"a_packed": np.zeros((2, 32), np.int8)}, "mma.dtype"),
        ({"c": np.zeros((2, 2))}, "mma.accumulator"),
        ({"c": np.zeros((3, 2), np.float32)}, "mma.accumulator"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(change, code):
    good = {
        "a_packed": np.zeros((2, 32), np.uint8),
        "a_scales": np.zeros((2, 4), np.uint8),
        "b_packed": np.zeros((2, 32), np.uint8),
        "b_scales": np.zeros((2, 4), np.uint8),
    }
    mma_matmul(**good)
    with pytest.raises(FormatError) as caught:
        mma_matmul(**{**good, **change})
    assert caught.value.code == code


def test_wrong_experts_and_steps_say_what_is_wrong():
    packed, scales = np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8)
    for chosen, code in (([0, 3], "mma.expert"), ([-1, 0], "mma.expert"), ([0], "mma.row-expert")):
        with pytest.raises(FormatError) as caught:
            mma_grouped(packed, scales, np.array(chosen), packed[None], scales[None])
        assert caught.value.code == code
    with pytest.raises(FormatError) as caught:
        mma_step_reference([0] * 32, [0] * 64, [0] * 4, [0] * 4, 0.0)
    assert caught.value.code == "mma.step-size"
    with pytest.raises(FormatError) as caught:
        mma_step_reference([0] * 64, [0] * 64, [0] * 2, [0] * 4, 0.0)
    assert caught.value.code == "mma.step-scales"


@pytest.mark.parametrize("bad", [16, -1, 255])
@pytest.mark.parametrize("side", [0, 1])
def test_a_step_refuses_what_is_no_e2m1_code(side, bad):
    """-1 would be the table's last value, -6."""
    codes = [[0] * 64, [0] * 64]
    codes[side][40] = bad
    with pytest.raises(FormatError) as caught:
        mma_step_reference(*codes, [0] * 4, [0] * 4, 0.0)
    assert (caught.value.code, caught.value.params["limit"]) == ("format.code-range", 15)


@pytest.mark.parametrize(("kind", "scales", "name"), [("nvfp4", 4, "UE4M3"), ("mxfp4", 2, "UE8M0")])
@pytest.mark.parametrize("bad", [256, -1])
def test_a_step_refuses_what_is_no_scale_byte(kind, scales, name, bad):
    """Taken bit by bit, 256 would be a scale of 0."""
    with pytest.raises(FormatError) as caught:
        mma_step_reference([0] * 64, [0] * 64, [0] * scales, [0] * (scales - 1) + [bad], 0.0, kind)
    assert (caught.value.code, caught.value.params["format"]) == ("format.code-range", name)
