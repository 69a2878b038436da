"""``rcp.approx.ftz.f32`` as an H200 computes it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from nvfp4viz.formats import decode_e4m3
from nvfp4viz.quant.rcp import rcp_approx_ftz, rcp_approx_ftz_scalar, rcp_table


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def from_bits(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint32).view(np.float32)


def test_one_sixth_is_the_correctly_rounded_one() -> None:
    """The reciprocal that every block passes through."""
    assert bits(rcp_approx_ftz(np.float32(6))) == 0x3E2AAAAB


def test_all_126_positive_e4m3_values_are_exact() -> None:
    """So the second reciprocal of the kernel is exact where the global scale is 1."""
    values = decode_e4m3(np.arange(1, 127, dtype=np.uint8))
    assert len(values) == 126
    assert np.array_equal(bits(rcp_approx_ftz(values)), bits(np.float32(1) / values))


@pytest.mark.parametrize(
    ("x", "result"),
    [(0x00000000, 0x7F800000), (0x80000000, 0xFF800000),  # ±0 → ±Inf
     (0x00000001, 0x7F800000), (0x807FFFFF, 0xFF800000),  # subnormals count as zero
     (0x00800000, 0x7E800000),                            # 2^-126 → 2^126
     (0x7F800000, 0x00000000), (0xFF800000, 0x80000000),  # ±Inf → ±0
     (0x7E800000, 0x00800000),                            # 2^126 → 2^-126, the smallest normal result
     (0x7E800001, 0x00000000), (0xFE800001, 0x80000000),  # just above: the result would be subnormal
     (0x7F7FFFFF, 0x00000000),
     (0x7FC00000, 0x7FFFFFFF), (0xFF800001, 0x7FFFFFFF),  # every NaN → the canonical one
     (0x3F800000, 0x3F800000), (0xBF800000, 0xBF800000)],
)  # fmt: skip
def test_flush_rules(x: int, result: int) -> None:
    assert int(bits(rcp_approx_ftz(from_bits(x)))[0]) == result
    assert int(rcp_approx_ftz_scalar(from_bits(x)[0]).view(np.uint32)) == result


def test_scalar_and_array_agree_at_every_exponent() -> None:
    rng = np.random.default_rng(0)
    patterns = (
        (np.arange(512, dtype=np.uint32) << 23)[:, None] | rng.integers(0, 1 << 23, (512, 12), np.uint32)
    ).ravel()
    x = patterns.view(np.float32)
    assert np.array_equal(bits(rcp_approx_ftz(x)), [int(rcp_approx_ftz_scalar(v).view(np.uint32)) for v in x])


def test_the_deviation_is_at_most_one_ulp_and_as_frequent_as_measured() -> None:
    """4.5 % of significands are one ulp low and 8.7 % one high: figures of the measurement, recomputed."""
    table = rcp_table()
    assert table.shape == (1 << 23,)
    assert set(np.unique(table)) == {-1, 0, 1}
    assert round(float((table == -1).mean()) * 100, 1) == 4.5
    assert round(float((table == 1).mean()) * 100, 1) == 8.7


def test_the_table_is_the_measured_one() -> None:
    assert hashlib.sha256(rcp_table().tobytes()).hexdigest() == TABLE_SHA256


def test_another_exponent_shifts_the_same_significand() -> None:
    x = np.linspace(1, 2, 1000, endpoint=False, dtype=np.float32)
    for power in (-100, -1, 5, 100):
        assert np.array_equal(rcp_approx_ftz(np.ldexp(x, power)), np.ldexp(rcp_approx_ftz(x), -power))


def test_shapes_and_the_input_are_kept() -> None:
    x = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    assert rcp_approx_ftz(x[:, ::2]).shape == (3, 2)
    assert rcp_approx_ftz(3.0).shape == ()
    assert x[0, 0] == 1


TABLE_SHA256 = "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"
