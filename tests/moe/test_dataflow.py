"""Routes to permuted rows and back: counts, offsets, maps, and where the weighted sum rounds."""

from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.moe import Dispatch, combine_routes, dataflow, plan_dispatch, round_bf16, shuffle_rows

RNG = np.random.default_rng(11)


def same_plan(ids, experts, expert_map=None):
    sizes = {"n1": 128, "n": 64, "k": 96, "expert_map": expert_map}
    fast, slow = plan_dispatch(ids, experts, **sizes), dataflow.plan_dispatch_reference(ids, experts, **sizes)
    for field in fields(Dispatch):
        a, b = getattr(fast, field.name), getattr(slow, field.name)
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b, field.name, strict=True)
    return fast


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 4, 64), (7, 2, 3), (60, 4, 64), (300, 1, 2), (0, 4, 8)])
def test_a_plan_is_what_the_lists_say(tokens, top_k, experts):
    ids = np.array([RNG.permutation(experts)[:top_k] for _ in range(tokens)], int).reshape(tokens, top_k)
    plan = same_plan(ids, experts)
    assert sorted(plan.c_map.tolist()) == list(range(tokens * top_k))
    assert (ids.ravel()[np.argsort(plan.c_map, kind="stable")] == plan.row_expert).all()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32))
def test_plans_of_one_rank_of_several(tokens, top_k, experts, seed):
    """Some experts elsewhere, a token's experts perhaps the same: whatever a caller gives."""
    rng = np.random.default_rng(seed)
    here = rng.permutation(experts)[: rng.integers(1, experts + 1)]
    expert_map = np.full(experts, -1)
    expert_map[here] = np.arange(len(here))
    same_plan(rng.integers(0, experts, (tokens, top_k)), len(here), expert_map)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 6), st.integers(0, 4), st.lists(st.integers(-3, 8), max_size=9))
def test_rows_move_alike_on_both_paths(rows, columns, row_map):
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
    row_map = np.array(row_map, np.int32)
    np.testing.assert_array_equal(
        shuffle_rows(x, row_map).view(np.uint16), dataflow.shuffle_rows_reference(x, row_map).view(np.uint16)
    )


EDGES = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F7F, 1, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**32))
def test_sums_are_the_same_bits_on_both_paths(tokens, top_k, hidden, share, seed):
    rng = np.random.default_rng(seed)
    shape = (tokens, top_k, hidden)
    routes = (rng.standard_normal(shape) * 2.0 ** rng.integers(-130, 120, shape)).astype(ml_dtypes.bfloat16)
    spots = rng.random(shape) < share / 3
    routes[spots] = rng.choice(EDGES, int(spots.sum()))
    weights = np.where(rng.random(shape[:2]) < share / 3, rng.choice(EDGES, shape[:2]), rng.random(shape[:2]))
    weights = weights.astype(np.float32)
    fast, slow = combine_routes(routes, weights), dataflow.combine_routes_reference(routes, weights)
    assert fast.dtype == slow.dtype
    np.testing.assert_array_equal(fast.view(np.uint16), slow.view(np.uint16), strict=True)


def test_experts_of_another_rank_leave_zero_rows():
    """Expert parallelism: global experts 2 and 3 live here as 0 and 1."""
    plan = plan_dispatch(np.array([[0, 3], [2, 1]]), 2, n1=8, n=4, k=4, expert_map=np.array([-1, -1, 0, 1]))
    assert plan.local_ids.tolist() == [[-1, 1], [0, -1]]
    assert plan.counts.tolist() == [1, 1]
    assert plan.a_map.tolist() == [1, 0, -1, -1]
    assert plan.c_map.tolist() == [4, 1, 0, 4]
    rows = shuffle_rows(np.float32([[5, 5, 5, 5], [7, 7, 7, 7]]), plan.a_map)
    assert rows[:, 0].tolist() == [7, 5, 0, 0]


def test_there_and_back_again():
    ids = np.stack([RNG.permutation(8)[:3] for _ in range(20)])
    x = RNG.standard_normal((20, 16)).astype(ml_dtypes.bfloat16)
    plan = plan_dispatch(ids, 8, n1=8, n=4, k=16)
    back = shuffle_rows(shuffle_rows(x, plan.a_map), plan.c_map).reshape(20, 3, 16)
    assert (back.view(np.uint16) == x[:, None].view(np.uint16)).all()


def test_no_tokens_no_rows():
    plan = plan_dispatch(np.zeros((0, 4), int), 64, n1=8, n=4, k=4)
    assert plan.rows == 0
    assert plan.expert_offsets.tolist() == [0] * 65


def test_the_weighted_sum_rounds_three_times():
    """Weights to BF16, products to BF16, the f32 sum once more; fewer roundings give other numbers."""
    routes = RNG.standard_normal((50, 4, 32)).astype(ml_dtypes.bfloat16)
    weights = RNG.random((50, 4)).astype(np.float32)
    out = combine_routes(routes, weights)
    assert out.tobytes() == dataflow.combine_routes_reference(routes, weights).tobytes()
    once = np.einsum("tkh,tk->th", routes.astype(np.float64), weights.astype(np.float64))
    assert (out != once.astype(ml_dtypes.bfloat16)).any()


def test_a_nan_route_reaches_the_token_even_at_weight_zero():
    routes = np.ones((2, 2, 4), ml_dtypes.bfloat16)
    routes[1, 0, 2] = np.nan
    out = combine_routes(routes, np.float32([[0.5, 0.5], [0.0, 1.0]]))
    assert np.isnan(out.astype(np.float32)).tolist() == [[False] * 4, [False, False, True, False]]


def test_bf16_nan_is_canonical():
    """CUDA's conversion gives 0x7FFF for every NaN; x86 would keep the sign of Inf·0."""
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (round_bf16(nans).view(np.uint16) == 0x7FFF).all()
    assert round_bf16(np.float32([1.00390625, 1.01171875])).tolist() == [1.0, 1.015625]  # ties to even
