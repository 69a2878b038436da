"""Quantising routed rows: one encode scale a row, three paths, equal bits."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import per_token_scales, quantize_rows

SPECIAL_SCALES = np.float32(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-38, -1e-38, 1e-45, 1e38, -1e38, 8.5e37, 2.0**126, 3.4e38, 448, 2688]
)


def assert_equal_bits(a, b):
    assert (a[0] == b[0]).all()
    assert (a[1] == b[1]).all()


def test_every_bf16_value_under_every_kind_of_scale():
    """All 65,536 patterns (NaNs, subnormals, ±0, ±Inf), shuffled into blocks, times special and ordinary scales."""
    rng = np.random.default_rng(5)
    rows = rng.permutation(np.arange(65536, dtype=np.uint16)).view(ml_dtypes.bfloat16).reshape(512, 128)
    for scale in [*SPECIAL_SCALES, *rng.lognormal(0, 6, 8).astype(np.float32)]:
        g = np.full(512, scale, np.float32)
        assert_equal_bits(quantize_rows(rows, g, path="numba"), quantize_rows(rows, g, path="numpy"))


def test_activations_with_a_scale_for_each_row():
    rng = np.random.default_rng(6)
    rows = (rng.standard_normal((2000, 64)) * rng.lognormal(0, 3, (2000, 1))).astype(ml_dtypes.bfloat16)
    rows[::7, 16:32] = 0
    rows[::11, :16] = np.nan
    rows[::13, 5] = np.nan
    g = rng.lognormal(5, 4, 2000).astype(np.float32)
    g[::17] = rng.choice(SPECIAL_SCALES, len(g[::17]))
    assert_equal_bits(quantize_rows(rows, g, path="numba"), quantize_rows(rows, g, path="numpy"))


def test_the_reference_agrees():
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((len(SPECIAL_SCALES), 32)).astype(ml_dtypes.bfloat16)
    rows[:, 16:] *= np.array(rng.integers(0, 2, (len(rows), 1)), ml_dtypes.bfloat16)
    assert_equal_bits(
        quantize_rows(rows, SPECIAL_SCALES, path="numba"), quantize_rows(rows, SPECIAL_SCALES, path="reference")
    )


@pytest.mark.parametrize("path", ["auto", "numpy"])
def test_the_block_that_starts_it_all(path):
    """Infinite encode scale: an all-zero block gets a NaN scale byte, any other block 448 (edge table 1.4)."""
    rows = np.zeros((2, 16), ml_dtypes.bfloat16)
    rows[1, 3] = -2
    packed, scales = quantize_rows(rows, np.float32([np.inf, np.inf]), path=path)
    assert scales.ravel().tolist() == [0x7F, 0x7E]
    assert packed[0].tolist() == [0x77] * 8
    assert packed[1].tolist() == [0x77, 0xF7, *[0x77] * 6]


@pytest.mark.parametrize("path", ["auto", "numpy", "reference"])
def test_no_rows(path):
    packed, scales = quantize_rows(np.zeros((0, 32), ml_dtypes.bfloat16), np.zeros(0, np.float32), path)
    assert packed.shape == (0, 16)
    assert scales.shape == (0, 2)


def test_per_token_scales_follow_each_row():
    rng = np.random.default_rng(8)
    rows = (rng.standard_normal((50, 64)) * 10.0 ** rng.integers(-6, 6, (50, 1))).astype(ml_dtypes.bfloat16)
    encode, decode = per_token_scales(rows)
    _, scales = quantize_rows(rows, encode)
    assert (decode == np.abs(rows.astype(np.float32)).max(axis=1) * np.float32(1 / 2688)).all()
    assert (scales.max(axis=1) == 0x7E).all(), "each row's largest block lands on 448"
