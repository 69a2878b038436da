"""Gemma 4's router: order, ties, NaN, weights."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe.routing import product, rms_norm, route_gemma4, top_k_stable

BF16 = ml_dtypes.bfloat16


def test_ties_go_to_the_lower_id():
    assert top_k_stable(np.float32([[2, 5, 5, 5, 1]]), 3).tolist() == [[1, 2, 3]]


def test_nan_is_chosen_first_and_the_lower_id_before():
    assert top_k_stable(np.float32([[9, np.nan, 3, np.nan, np.inf]]), 4).tolist() == [[1, 3, 4, 0]]


def test_all_nan_gives_the_first_experts():
    assert top_k_stable(np.full((1, 64), np.nan, np.float32), 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_top_k_is_a_stable_descending_sort(seed):
    logits = np.random.default_rng(seed).integers(-3, 3, (50, 16)).astype(np.float32)
    expected = [sorted(range(16), key=lambda e, row=row: (-row[e], e))[:6] for row in logits]
    assert top_k_stable(logits, 6).tolist() == expected


def _router(rng, hidden=32, experts=8):
    return (
        rng.standard_normal((experts, hidden)).astype(BF16),
        np.ones(hidden, BF16),
        np.linspace(0.5, 1.5, experts).astype(BF16),
    )


def test_weights_are_a_softmax_of_the_chosen_times_the_experts_scale():
    rng = np.random.default_rng(1)
    proj, scale, per_expert = _router(rng)
    routing = route_gemma4(rng.standard_normal((20, 32)).astype(BF16), proj, scale, per_expert, 3)
    chosen = np.take_along_axis(routing.logits, routing.ids, axis=1).astype(np.float64)
    softmax = np.exp(chosen - chosen.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    # float32 against float64: three operations of half an ulp each
    np.testing.assert_allclose(routing.weights, softmax * per_expert.astype(np.float64)[routing.ids], rtol=1e-6)


def test_the_router_reads_the_residual_through_a_norm_without_weight():
    """Scaling the residual changes nothing but rounding: a power of two changes no bit."""
    rng = np.random.default_rng(2)
    residual = rng.standard_normal((4, 32)).astype(BF16)
    one, two = (
        route_gemma4((residual * f).astype(BF16), *_router(np.random.default_rng(3)), 2, eps=0.0) for f in (1, 4)
    )
    assert one.logits.tobytes() == two.logits.tobytes()


def test_nan_in_the_residual_gives_nan_weights():
    rng = np.random.default_rng(4)
    residual = rng.standard_normal((2, 32)).astype(BF16)
    residual[1, 3] = np.nan
    routing = route_gemma4(residual, *_router(rng), 2)
    assert not np.isnan(routing.weights[0]).any()
    assert np.isnan(routing.weights[1]).all()
    assert routing.ids[1].tolist() == [0, 1]


@pytest.mark.parametrize("k", [16, 128, 1024])
def test_products_do_not_depend_on_the_order_of_the_sum(k):
    rng = np.random.default_rng(k)
    x, w = (rng.standard_normal((9, k)).astype(BF16) for _ in range(2))
    order = rng.permutation(k)
    assert product(x, w).tobytes() == product(x[:, order], w[:, order]).tobytes()


def test_rms_norm_rounds_once_to_bf16():
    x = np.float32([[3, 4]]).astype(BF16)
    assert rms_norm(x, None, 0.0).astype(np.float32).tolist() == [[0.84765625, 1.1328125]]
    assert rms_norm(x, np.array([2, 1], BF16), 0.0).astype(np.float32).tolist() == [[1.6953125, 1.1328125]]
