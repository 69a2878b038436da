"""Routes to permuted rows and back: counts, offsets, maps, and where the weighted sum rounds."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import combine_routes, plan_dispatch, round_bf16, shuffle_rows

RNG = np.random.default_rng(11)


def plan_by_loops(ids, experts):
    """The dispatch of `serving-vllm.md` section 6, said with lists."""
    per_expert = [[] for _ in range(experts)]
    for token, chosen in enumerate(ids):
        for rank, expert in enumerate(chosen):
            if expert >= 0:
                per_expert[expert].append((token, rank))
    order = [route for routes in per_expert for route in routes]
    top_k = len(ids[0])
    c_map = [len(ids) * top_k] * (len(ids) * top_k)
    for position, (token, rank) in enumerate(order):
        c_map[token * top_k + rank] = position
    return [len(routes) for routes in per_expert], [token for token, _ in order], c_map


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 4, 64), (7, 2, 3), (60, 4, 64), (300, 1, 2)])
def test_a_plan_is_what_the_loops_say(tokens, top_k, experts):
    ids = np.stack([RNG.permutation(experts)[:top_k] for _ in range(tokens)])
    plan = plan_dispatch(ids, experts, n1=128, n=64, k=96)
    counts, a_map, c_map = plan_by_loops(ids.tolist(), experts)
    assert plan.counts.tolist() == counts
    assert plan.a_map.tolist() == a_map
    assert plan.c_map.tolist() == c_map
    assert plan.problem_sizes1.tolist() == [[m, 128, 96] for m in counts]
    assert plan.problem_sizes2.tolist() == [[m, 96, 64] for m in counts]
    assert plan.expert_offsets.tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    padded = [(m + 127) // 128 * 128 for m in counts]
    assert plan.blockscale_offsets.tolist() == [sum(padded[:e]) for e in range(experts + 1)]
    assert plan.row_expert.tolist() == [e for e, m in enumerate(counts) for _ in range(m)]


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
    for t in range(50):
        for h in range(32):
            total = np.float32(0)
            for j in range(4):
                w = np.float32(ml_dtypes.bfloat16(weights[t, j]))
                total = np.float32(total + np.float32(ml_dtypes.bfloat16(np.float32(routes[t, j, h]) * w)))
            assert out[t, h] == ml_dtypes.bfloat16(total)
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
