"""Scales per token by version; `numerics-vllm.md` section 8."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import NvError
from nvfp4viz.moe import per_token_scales, quantize_rows
from nvfp4viz.quant import quantize
from nvfp4viz.quant.per_token import BASE, TINY, VERSIONS, quantize_tokens, token_cases
from tests.equal_bits import same_fields

FB28D, NEW, IEEE, MEGA = VERSIONS


def rows(seed=0, shape=(7, 64)):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def test_the_base_scale_is_one_over_2688():
    assert np.float32(1 / 2688) == BASE
    assert float(BASE) * 2688 == pytest.approx(1, abs=2**-24)


def test_0_7_4_is_what_our_experts_run():
    x = np.concatenate([rows(), np.zeros((1, 64), ml_dtypes.bfloat16), token_cases(64).astype(ml_dtypes.bfloat16)])
    encode, decode = per_token_scales(x)
    packed, scales = quantize_rows(x, encode)
    made = quantize_tokens(x, NEW)
    assert made.encode.tobytes() == encode.tobytes()
    assert made.decode.tobytes() == decode.tobytes()
    assert (made.scales == scales).all()
    assert (made.codes[:, ::2] | made.codes[:, 1::2] << 4 == packed).all()


@pytest.mark.parametrize("seed", range(4))
def test_both_fast_versions_agree_on_rows_without_small_blocks(seed):
    old, new = quantize_tokens(rows(seed), FB28D), quantize_tokens(rows(seed), NEW)
    assert (old.scales == new.scales).all()
    assert (old.codes == new.codes).all()


def test_ieee_mode_is_the_ieee_recipe_with_a_scale_a_row():
    x = rows(3)
    made = quantize_tokens(x, IEEE)
    for k, row in enumerate(x):
        q = quantize(row, recipe="ieee", global_scale=made.encode[k])
        assert (q.scales == made.scales[k]).all()
        assert (q.codes() == made.codes[k]).all()


def test_a_row_of_zeros():
    made = {version: quantize_tokens(np.zeros((1, 32), np.float32), version) for version in VERSIONS}
    assert {v: set(one.scales.ravel().tolist()) for v, one in made.items()} == {
        FB28D: {0x7F}, NEW: {0x7F}, IEEE: {0}, MEGA: {1},
    }  # fmt: skip
    assert {v: set(one.codes.ravel().tolist()) for v, one in made.items()} == {
        FB28D: {0},
        NEW: {7},
        IEEE: {0},
        MEGA: {0},
    }
    assert [one.nan_rows for one in made.values()] == [1, 1, 0, 0]
    assert np.isinf(made[FB28D].encode).all()
    assert made[IEEE].encode[0] == np.finfo(np.float32).max


def test_a_block_too_small_for_its_row():
    cases = token_cases()
    assert np.abs(cases[1, 16:]).max() <= TINY
    old, new, ieee, mega = (quantize_tokens(cases, version) for version in VERSIONS)
    assert old.scales[1, 1] == new.scales[1, 1] == ieee.scales[1, 1] == 0
    # The test on the maximum lets an infinite factor through: the largest code, under a scale of zero.
    assert set((old.codes[1, 16:] & 7).tolist()) == {7}
    assert set((new.codes[1, 16:] & 7).tolist()) == {0}
    assert (old.decoded[1, 16:] == 0).all()
    assert mega.scales[1, 1] == 1  # 2^-9, the floor
    assert 8 not in mega.codes[1, 16:]  # it clears the sign of a zero


def test_one_token_s_scale_does_not_depend_on_another_s():
    x = rows(5)
    for version in VERSIONS:
        alone = quantize_tokens(x[2:3], version)
        assert (alone.codes[0] == quantize_tokens(x, version).codes[2]).all()


EDGES = np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1e-38, 3.4e38, 2.0**-126, 2688, 1e-12])


def same_rows(fast, slow):
    same_fields(fast, slow, ("decode", "encode", "scales", "codes", "decoded"))


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(VERSIONS), st.integers(0, 3), st.integers(0, 4), st.integers(0, 60), st.integers(0, 2**32))
def test_both_paths_give_the_same_rows(version, count, blocks, spread, seed):
    rng = np.random.default_rng(seed)
    shape = (count, 16 * blocks)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x = np.where(rng.random(shape) < rng.choice([0, 0.02, 0.3]), rng.choice(EDGES, shape), x).astype(np.float32)
    for values in (x, x.astype(ml_dtypes.bfloat16)):
        same_rows(quantize_tokens(values, version), quantize_tokens(values, version, "reference"))


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_that_tell_the_versions_apart_are_the_same_on_both_paths(version):
    for tiny in (TINY, 2.0**-30, 2.0**-140):
        same_rows(
            quantize_tokens(token_cases(64, tiny), version),
            quantize_tokens(token_cases(64, tiny), version, "reference"),
        )
    for edge in EDGES:
        alone, whole = np.zeros((1, 32), np.float32), np.full((1, 32), edge)
        alone[0, 5] = edge
        for row in (alone, whole):
            same_rows(quantize_tokens(row, version), quantize_tokens(row, version, "reference"))


def test_refusals():
    for call, code in (
        (lambda: quantize_tokens(rows(), "flashinfer"), "online.version"),
        (lambda: quantize_tokens(rows(shape=(2, 24)), NEW), "quantize.block"),
    ):
        with pytest.raises(NvError) as caught:
            call()
        assert caught.value.code == code
