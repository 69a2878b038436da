"""The routers: scalar and vectorised path in equal bits, ties, NaN, renormalisation, scaling."""

import numpy as np
import pytest

from nvfp4viz.moe import routers
from nvfp4viz.moe.routing import route_gemma4

EXPERTS, TOP = 16, 4
RNG = np.random.default_rng(7)
BIAS = RNG.normal(0, 0.3, EXPERTS).astype(np.float32)
TABLE = np.stack([RNG.permutation(EXPERTS)[:TOP] for _ in range(40)])
OWN = RNG.uniform(0.5, 1.5, EXPERTS).astype(np.float32)

ROUTERS = {
    "softmax": lambda x, path: routers.route_softmax(x, TOP, path=path),
    "softmax_plain": lambda x, path: routers.route_softmax(x, TOP, renormalize=False, scaling=2.5, path=path),
    "softmax_bias": lambda x, path: routers.route_softmax(x, TOP, bias=BIAS, scaling=2.5, path=path),
    "sigmoid": lambda x, path: routers.route_sigmoid(x, TOP, path=path),
    "sigmoid_bias": lambda x, path: routers.route_sigmoid(x, TOP, bias=BIAS, scaling=2.5, path=path),
    "grouped": lambda x, path: routers.route_grouped(x, TOP, groups=4, top_groups=2, path=path),
    "grouped_bias": lambda x, path: routers.route_grouped(
        x, TOP, groups=4, top_groups=2, bias=BIAS, scaling=2.5, path=path
    ),
    "grouped_whole": lambda x, path: routers.route_grouped(
        x, TOP, groups=4, top_groups=1, bias=BIAS, renormalize=False, path=path
    ),
    "sqrtsoftplus": lambda x, path: routers.route_sqrt_softplus(x, TOP, bias=BIAS, scaling=1.5, path=path),
    "sqrtsoftplus_read": lambda x, path: routers.route_sqrt_softplus(x, TOP, bias=BIAS, recover=False, path=path),
    "hash": lambda x, path: routers.route_hash(x, np.arange(len(x)) % 40, TABLE, scaling=1.5, path=path),
    "gemma4": lambda x, path: routers.route_gemma4_logits(x, TOP, OWN, path=path),
}

EDGES = np.float32(
    [np.nan, np.inf, -np.inf, 0, -0.0, 20, np.nextafter(np.float32(20), np.float32(30)), -200, 200, 1e38]
)


def _logits(kind: str) -> np.ndarray:
    rng = np.random.default_rng(11)
    if kind == "ordinary":
        return rng.normal(0, 3, (200, EXPERTS)).astype(np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, (200, EXPERTS)).astype(np.float32)
    if kind == "equal":
        return np.full((3, EXPERTS), np.float32(1.25))
    if kind == "all_nan":
        return np.full((2, EXPERTS), np.nan, np.float32)
    if kind == "edges":
        x = rng.normal(0, 3, (300, EXPERTS)).astype(np.float32)
        spots = rng.random(x.shape) < 0.4
        x[spots] = rng.choice(EDGES, int(spots.sum()))
        return x
    x = rng.normal(0, 3, (100, EXPERTS)).astype(np.float32)
    x[np.arange(100), rng.integers(0, EXPERTS, 100)] = np.nan
    return x


KINDS = ["ordinary", "ties", "equal", "one_nan", "all_nan", "edges"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTERS)
def test_both_paths_give_the_same_bits(name, kind):
    x = _logits(kind)
    before = x.copy()
    fast, slow = (ROUTERS[name](x, path) for path in ("numpy", "reference"))
    for field in ("ids", "weights", "scores", "compared"):
        a, b = getattr(fast, field), getattr(slow, field)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype == np.float32:  # a NaN has no sign or payload that anybody defines
            a, b = np.where(np.isnan(a), np.float32(np.nan), a), np.where(np.isnan(b), np.float32(np.nan), b)
        assert a.tobytes() == b.tobytes(), field
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "hash"])
def test_k_different_experts_are_chosen(name, kind):
    ids = ROUTERS[name](_logits(kind), "numpy").ids
    assert ids.min() >= 0
    assert ids.max() < EXPERTS
    assert all(len(set(row)) == TOP for row in ids.tolist())


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus_nobias", "grouped", "gemma4"])
@pytest.mark.parametrize("path", ["numpy", "reference"])
def test_ties_go_to_the_lower_id(name, path):
    made = ROUTERS | {"sqrtsoftplus_nobias": lambda x, path: routers.route_sqrt_softplus(x, TOP, path=path)}
    assert made[name](_logits("equal"), path).ids.tolist() == [[0, 1, 2, 3]] * 3


def test_softmax_against_float64():
    x = _logits("ordinary")
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    routed = routers.route_softmax(x, TOP, renormalize=False)
    # f32: the subtraction, the exponential, 16 additions, a reciprocal and a product
    np.testing.assert_allclose(routed.scores, exact, rtol=3e-6)
    assert routed.weights.tobytes() == np.take_along_axis(routed.scores, routed.ids.astype(int), 1).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_logit_silences_a_softmax(bad):
    x = _logits("ordinary")[:1]
    x[0, 9] = bad
    routed = routers.route_softmax(x, TOP)
    assert routed.ids.tolist() == [[0, 1, 2, 3]]
    assert routed.weights.tolist() == [[0, 0, 0, 0]]


def test_minus_inf_is_an_ordinary_never_for_a_softmax():
    routed = routers.route_softmax(np.float32([[0, -np.inf, 0, -np.inf]]), 2)
    assert routed.ids.tolist() == [[0, 2]]
    assert routed.scores.tolist() == [[0.5, 0, 0.5, 0]]


def test_a_bias_takes_part_in_the_choice_and_not_in_the_weight():
    x, bias = np.float32([[1, 0, 0, 0]]), np.float32([0, 0, 0, 10])
    for route in (routers.route_softmax, routers.route_sigmoid):
        routed = route(x, 2, bias=bias, renormalize=False)
        assert routed.ids.tolist() == [[3, 0]]
        assert routed.weights[0, 0] == routed.scores[0, 3] < routed.weights[0, 1]


def test_one_nan_is_no_more_than_a_low_score_for_a_sigmoid():
    x = np.float32([[2, np.nan, 1, 0.5]])
    routed = routers.route_sigmoid(x, 2)
    assert routed.ids.tolist() == [[0, 2]]
    assert routed.scores[0, 1] == 0
    assert routers.route_sigmoid(x, 2, bias=np.float32([0, 5, 0, 0])).ids.tolist() == [[1, 0]]


def test_renormalised_weights_sum_to_the_scaling_factor():
    for name, total in (("softmax", 1), ("softmax_bias", 2.5), ("sigmoid_bias", 2.5), ("grouped_bias", 2.5),
                        ("sqrtsoftplus", 1.5), ("hash", 1.5)):  # fmt: skip
        weights = ROUTERS[name](_logits("ordinary"), "numpy").weights
        # four products with one rounded factor
        np.testing.assert_allclose(weights.sum(1), total, rtol=1e-6)


def test_the_grouped_kernel_has_its_own_sigmoid():
    x = _logits("ordinary")
    one, two = routers.route_sigmoid(x, TOP), routers.route_grouped(x, TOP, groups=1, top_groups=1)
    np.testing.assert_allclose(one.scores, two.scores, rtol=0, atol=2.0**-22)  # three roundings each, of 2^-25 or 2^-24
    assert one.scores.tobytes() != two.scores.tobytes()


def test_two_good_experts_beat_the_best_one_where_there_is_a_bias():
    x = np.float32([[4, -9, -9, -9, 3, 3, -9, -9]])
    assert routers.route_grouped(x, 2, groups=2, top_groups=1).ids.tolist() == [[0, 1]]
    assert routers.route_grouped(x, 2, groups=2, top_groups=1, bias=np.zeros(8)).ids.tolist() == [[4, 5]]


def test_experts_outside_the_kept_groups_are_never_chosen():
    routed = ROUTERS["grouped_bias"](_logits("ordinary"), "numpy")
    assert (np.take_along_axis(routed.compared, routed.ids.astype(int), 1) > -np.inf).all()
    kept = np.isfinite(routed.compared).reshape(200, 4, 4)
    assert (kept.all(2).sum(1) == 2).all()
    assert (kept.any(2).sum(1) == 2).all()


def test_too_few_whole_groups_give_equal_weights():
    x = np.full((1, 8), np.nan, np.float32)
    x[0, 4:] = 1
    routed = routers.route_grouped(x, 4, groups=2, top_groups=2, bias=np.zeros(8), scaling=2.5)
    assert routed.ids.tolist() == [[0, 1, 2, 3]]
    assert routed.weights.tolist() == [[0.25] * 4]
    assert routers.route_grouped(x, 4, groups=2, top_groups=1, bias=np.zeros(8)).ids.tolist() == [[4, 5, 6, 7]]


def test_softplus_goes_over_to_its_argument():
    twenty, next_up = np.float32(20), np.nextafter(np.float32(20), np.float32(30))
    assert routers.sqrt_softplus(next_up) == np.sqrt(next_up)
    assert routers.sqrt_softplus(np.float32(200)) == np.sqrt(np.float32(200))
    assert routers.sqrt_softplus(twenty) == np.float32(np.sqrt(np.float32(np.log(np.exp(20.0) + 1))))


def test_a_weight_recovered_from_its_biased_score_is_rounded_twice():
    x, bias = _logits("ordinary"), np.full(EXPERTS, np.float32(4096.1))
    got, read = (routers.route_sqrt_softplus(x, TOP, bias=bias, renormalize=False, recover=r) for r in (True, False))
    same = np.take_along_axis(read.scores, got.ids.astype(int), 1)
    assert (got.weights != same).any()
    assert np.abs(got.weights - same).max() <= 2.0**-12  # half an ulp at 4096
    assert (read.weights == np.take_along_axis(read.scores, read.ids.astype(int), 1)).all()


def test_a_hash_router_asks_the_table_alone():
    x = _logits("ordinary")
    tokens = np.arange(200) % 40
    routed = routers.route_hash(x, tokens, TABLE)
    assert (routed.ids == TABLE[tokens]).all()
    assert (routers.route_hash(-x, tokens, TABLE).ids == routed.ids).all()
    assert (routers.route_hash(-x, tokens, TABLE).weights != routed.weights).any()


def test_gemma4_from_logits_is_the_model_s_router():
    import ml_dtypes

    rng = np.random.default_rng(3)
    residual = rng.standard_normal((50, 32)).astype(ml_dtypes.bfloat16)
    proj = rng.standard_normal((EXPERTS, 32)).astype(ml_dtypes.bfloat16)
    own = OWN.astype(ml_dtypes.bfloat16)
    whole = route_gemma4(residual, proj, np.ones(32, ml_dtypes.bfloat16), own, TOP)
    routed = routers.route_gemma4_logits(whole.logits, TOP, own)
    assert routed.ids.tobytes() == whole.ids.tobytes()
    assert routed.weights.tobytes() == whole.weights.tobytes()


def test_gemma4_lets_a_nan_through():
    routed = routers.route_gemma4_logits(np.float32([[1, 5, np.nan, 3]]), 3)
    assert routed.ids.tolist() == [[2, 1, 3]]
    assert np.isnan(routed.weights).all()
