"""Routes there and back on the GPU against `nvfp4viz.moe.dataflow`: same rows, same order, same bits."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz.moe import combine_routes, plan_dispatch, shuffle_rows
from tests.kernels.gemm_cases import BFLOAT16, bits


@pytest.fixture(scope="module")
def ops():
    from nvfp4viz.device import ops

    return ops


def cuda(array):
    from nvfp4viz.device.dispatch import to_cuda

    return to_cuda(array)


def numpy_bf16(tensor):
    from nvfp4viz.device.dispatch import to_numpy_bf16

    return to_numpy_bf16(tensor)


def routed(tokens: int, experts: int, top_k: int) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


CASES = [(1, 8, 2, 64), (64, 128, 8, 2816), (513, 128, 8, 264), (4096, 128, 8, 64), (9000, 16, 8, 8)]


@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden"), CASES)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_there_and_back(ops, tokens, experts, top_k, hidden, elsewhere):
    rng = np.random.default_rng(1)
    ids = routed(tokens, experts, top_k)
    expert_map, local = None, experts
    if elsewhere:  # three of four experts live on other ranks
        expert_map = np.where(np.arange(experts) % 4 == 0, np.arange(experts) // 4, -1).astype(np.int32)
        local = experts // 4
    plan = plan_dispatch(ids, local, n1=8, n=4, k=16, expert_map=expert_map)
    x = rng.standard_normal((tokens, hidden)).astype(BFLOAT16)
    permuted = ops.permute(cuda(x), cuda(ids), local, None if expert_map is None else cuda(expert_map))
    np.testing.assert_array_equal(permuted.offsets.cpu().numpy(), plan.expert_offsets)
    np.testing.assert_array_equal(permuted.counts.cpu().numpy(), plan.counts)
    np.testing.assert_array_equal(permuted.source.cpu().numpy(), plan.a_map)
    np.testing.assert_array_equal(permuted.target.cpu().numpy().ravel(), plan.c_map)
    np.testing.assert_array_equal(bits(numpy_bf16(permuted.rows)), bits(shuffle_rows(x, plan.a_map)))

    y = (rng.standard_normal((plan.a_map.size, hidden)) * 10).astype(BFLOAT16)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    y[0, :4] = [np.nan, np.inf, -np.inf, 3e38]
    y[-1, :4] = [-np.inf, -np.inf, np.inf, 3e38]
    weights[tokens // 2, 0] = np.nan
    with np.errstate(all="ignore"):
        wanted = combine_routes(shuffle_rows(y, plan.c_map).reshape(tokens, top_k, hidden), weights)
    np.testing.assert_array_equal(bits(numpy_bf16(ops.unpermute(cuda(y), permuted, cuda(weights)))), bits(wanted))


def test_float32_rows_travel_too(ops):
    ids = routed(37, 8, 2)
    plan = plan_dispatch(ids, 8, n1=8, n=4, k=16)
    x = np.random.default_rng(2).standard_normal((37, 20)).astype(np.float32)
    rows = ops.permute(cuda(x), cuda(ids), 8).rows.cpu().numpy()
    np.testing.assert_array_equal(bits(rows), bits(x[plan.a_map]))
