"""The routers: scalar and vectorised path in equal bits, ties, NaN, renormalisation, scaling."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import InputError
from nvfp4viz.moe import routers
from nvfp4viz.moe.routing import route_gemma4
from tests.equal_bits import same_fields

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
    "sqrtsoftplus_plain": lambda x, path: routers.route_sqrt_softplus(x, TOP, renormalize=False, path=path),
    "sqrtsoftplus_triton": lambda x, path: routers.route_sqrt_softplus(
        x, TOP, bias=BIAS, scaling=1.5, kernel="triton", path=path
    ),
    "grouped_torch": lambda x, path: routers.route_grouped(
        x, TOP, groups=4, top_groups=2, kernel="torch", scaling=2.5, path=path
    ),
    "grouped_torch_bias": lambda x, path: routers.route_grouped(
        x, TOP, groups=4, top_groups=2, bias=BIAS, kernel="torch", path=path
    ),
    "grouped_torch_whole": lambda x, path: routers.route_grouped(
        x, TOP, groups=4, top_groups=1, bias=BIAS, renormalize=False, scaling=2.5, kernel="torch", path=path
    ),
    "hash": lambda x, path: routers.route_hash(x, np.arange(len(x)) % 40, TABLE, scaling=1.5, path=path),
    "hash_plain": lambda x, path: routers.route_hash(
        x, np.arange(len(x)) % 40, TABLE, renormalize=False, scaling=1.5, path=path
    ),
    "hash_images": lambda x, path: routers.route_hash(
        x, np.arange(len(x)) % 43, TABLE, scaling=1.5, bias_vl=BIAS, image_sentinel_lo=38, path=path
    ),
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
    if kind == "none":
        return np.zeros((0, EXPERTS), np.float32)
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


KINDS = ["ordinary", "ties", "equal", "one_nan", "all_nan", "edges", "none"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTERS)
def test_both_paths_give_the_same_bits(name, kind):
    x = _logits(kind)
    before = x.copy()
    _same_bits(*(ROUTERS[name](x, path) for path in ("numpy", "reference")))
    assert x.tobytes() == before.tobytes()


def _same_bits(fast, slow):
    same_fields(fast, slow, ("ids", "weights", "scores", "compared"))


SPECIAL = [0.0, -0.0, 20.0, 1.0, 1.0, -200.0, 200.0, float("nan"), float("inf"), float("-inf"), 1e-45, 3.4e38]
ROW = st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=EXPERTS, max_size=EXPERTS)


@settings(deadline=None, max_examples=150)
@given(st.lists(ROW, min_size=1, max_size=4), st.sampled_from(sorted(ROUTERS)))
def test_any_logits_give_the_same_bits_on_both_paths(rows, name):
    x = np.float32(rows)
    _same_bits(*(ROUTERS[name](x, path) for path in ("numpy", "reference")))


@settings(deadline=None, max_examples=150)
@given(ROW, ROW, st.sampled_from(["softmax", "sigmoid", "grouped", "sqrtsoftplus", "hash"]), st.integers(0, 2**32))
def test_any_bias_shape_and_scaling_give_the_same_bits_on_both_paths(row, spare, name, seed):
    rng = np.random.default_rng(seed)
    x = np.float32([row, spare])
    bias = np.where(np.isfinite(np.float32(spare)), np.float32(spare), 0) * np.float32(0.5)  # finite, sums too
    top_k = int(rng.integers(1, 9))
    more = {"renormalize": bool(rng.integers(2)), "scaling": float(rng.choice([1.0, 2.5, 0.0, 1e30]))}
    if name == "grouped":
        groups = int(rng.choice([1, 2, 4, 8]))
        most = min(groups, -(-top_k // (EXPERTS // groups)))
        more |= {"groups": groups, "top_groups": int(rng.integers(most, groups + 1))}
        more |= {"bias": bias if rng.integers(2) else None, "kernel": str(rng.choice(["fused", "torch"]))}
    if name == "sqrtsoftplus":
        more["kernel"] = str(rng.choice(["general", "triton"]))
    if name == "hash":
        more |= {"bias_vl": bias, "image_sentinel_lo": int(rng.choice([0, 3]))}
        table = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(10)])
        tokens = rng.integers(0, 10, 2)
        _same_bits(*(routers.route_hash(x, tokens, table, **more, path=path) for path in ("numpy", "reference")))
        return
    route = {"softmax": routers.route_softmax, "sigmoid": routers.route_sigmoid, "grouped": routers.route_grouped,
             "sqrtsoftplus": routers.route_sqrt_softplus}[name]  # fmt: skip
    _same_bits(*(route(x, top_k, **({"bias": bias} | more), path=path) for path in ("numpy", "reference")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in ROUTERS if not name.startswith("hash")])
def test_k_different_experts_are_chosen(name, kind):
    ids = ROUTERS[name](_logits(kind), "numpy").ids
    assert ids.shape == (len(_logits(kind)), TOP)
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == TOP for row in ids.tolist())


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus_plain", "grouped", "grouped_torch", "gemma4"])
@pytest.mark.parametrize("path", ["numpy", "reference"])
def test_ties_go_to_the_lower_id(name, path):
    assert ROUTERS[name](_logits("equal"), path).ids.tolist() == [[0, 1, 2, 3]] * 3


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
                        ("sqrtsoftplus", 1.5), ("sqrtsoftplus_triton", 1.5), ("grouped_torch", 2.5), ("hash", 1.5),
                        ("hash_images", 1.5)):  # fmt: skip
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


@pytest.mark.parametrize(
    ("groups", "kept", "top", "bias"),
    [(3, 1, 1, None), (0, 0, 1, None), (2, 3, 4, None), (4, 1, 5, None), (16, 4, 4, BIAS)],
    ids=["unequal", "none", "more kept than there are", "too few experts", "one expert has no two largest"],
)
def test_groups_that_cannot_serve_a_token_are_refused(groups, kept, top, bias):
    with pytest.raises(InputError) as error:
        routers.route_grouped(_logits("ordinary"), top, groups=groups, top_groups=kept, bias=bias)
    assert error.value.code == "router.groups"
    routers.route_grouped(_logits("ordinary"), 4, groups=16, top_groups=4)  # without a bias one is enough


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("route", [routers.route_softmax, routers.route_sigmoid, routers.route_sqrt_softplus])
def test_a_bias_that_is_not_finite_is_refused(route, bad):
    bias = BIAS.copy()
    bias[5] = bad
    with pytest.raises(InputError) as error:
        route(_logits("ordinary"), TOP, bias=bias)
    assert (error.value.code, error.value.params["expert"]) == ("router.bias", 5)


ONE_EACH = {
    "softmax": lambda x, k, **more: routers.route_softmax(x, k, **more),
    "sigmoid": lambda x, k, **more: routers.route_sigmoid(x, k, **more),
    "grouped": lambda x, k, **more: routers.route_grouped(x, k, groups=4, top_groups=2, **more),
    "sqrtsoftplus": lambda x, k, **more: routers.route_sqrt_softplus(x, k, **more),
    "hash": lambda x, k, **more: routers.route_hash(x, [0] * len(x), np.zeros((2, int(k)), int), **more),
    "gemma4": lambda x, k, **more: routers.route_gemma4_logits(x, k, **more),
}


def refused(call):
    with pytest.raises(InputError) as error:
        call()
    assert error.value.text("zh")["what"] != error.value.what
    return error.value.code


@pytest.mark.parametrize("path", ["numpy", "reference"])
@pytest.mark.parametrize("name", ONE_EACH)
def test_what_is_no_logits_is_refused_by_every_router(name, path):
    x = _logits("ordinary")[:2]
    for bad in (x[0], x.tolist(), x[None], x.astype(np.float64), x.astype(np.int32)):
        assert refused(lambda bad=bad: ONE_EACH[name](bad, 2, path=path)) == "router.logits"


@pytest.mark.parametrize("path", ["numpy", "reference"])
@pytest.mark.parametrize("name", ONE_EACH)
def test_no_router_chooses_none_or_more_experts_than_there_are(name, path):
    x = _logits("ordinary")[:2]
    for bad in (0, EXPERTS + 1):
        assert refused(lambda bad=bad: ONE_EACH[name](x, bad, path=path)) == "router.top"
    if name != "hash":  # its k is a shape
        for bad in (-1, 2.0, True, None):
            assert refused(lambda bad=bad: ONE_EACH[name](x, bad, path=path)) == "router.top"
    if name != "grouped":  # two of its four groups hold no more than eight
        assert ONE_EACH[name](x, np.int64(EXPERTS), path=path).ids.shape == (2, EXPERTS)


@pytest.mark.parametrize("kernel", ["zz", "", None, "Fused"])
def test_an_unknown_kernel_is_refused(kernel):
    x = _logits("ordinary")
    for name in ("grouped", "sqrtsoftplus"):
        assert refused(lambda name=name: ONE_EACH[name](x, TOP, kernel=kernel)) == "router.kernel"


@pytest.mark.parametrize("name", [name for name in ONE_EACH if name != "hash"])
def test_numbers_that_are_not_one_an_expert_are_refused(name):
    x = _logits("ordinary")
    of = "per_expert_scale" if name == "gemma4" else "bias"
    for bad in (BIAS[:1], BIAS[:-1], BIAS[None]):
        assert refused(lambda bad=bad: ONE_EACH[name](x, TOP, **{of: bad})) == "router.per-expert"


@pytest.mark.parametrize("path", ["numpy", "reference"])
@pytest.mark.parametrize("token", [-1, 40, 10**6])
def test_a_token_without_a_row_in_the_table_is_refused(token, path):
    x = _logits("ordinary")[:2]
    assert refused(lambda: routers.route_hash(x, [3, token], TABLE, path=path)) == "router.token"
    # An image's ids are five; the next one asks the table again.
    seen = {"bias_vl": BIAS, "image_sentinel_lo": 100, "path": path}
    assert refused(lambda: routers.route_hash(x, [100, 105], TABLE, **seen)) == "router.token"


def test_tables_and_token_ids_that_cannot_be_asked_are_refused():
    x = _logits("ordinary")[:2]
    for tokens in ([1], [[1, 2]], [1.0, 2.0], 1, [True, False]):
        assert refused(lambda tokens=tokens: routers.route_hash(x, tokens, TABLE)) == "router.token-ids"
    for table in (TABLE[0], TABLE.astype(float), TABLE[:0]):
        assert refused(lambda table=table: routers.route_hash(x, [0, 1], table)) == "router.table"
    for expert in (-1, EXPERTS):
        assert refused(lambda e=expert: routers.route_hash(x, [0, 1], [[0], [e], [0]])) == "router.table-expert"
    assert routers.route_hash(x, [0, 2], [[0], [EXPERTS], [1]]).ids.tolist() == [[0], [1]]  # rows nobody asks


def test_softplus_goes_over_to_its_argument():
    twenty, next_up = np.float32(20), np.nextafter(np.float32(20), np.float32(30))
    assert routers.sqrt_softplus(next_up) == np.sqrt(next_up)
    assert routers.sqrt_softplus(np.float32(200)) == np.sqrt(np.float32(200))
    assert routers.sqrt_softplus(twenty) == np.float32(np.sqrt(np.float32(np.log(np.exp(20.0) + 1))))


def test_a_weight_recovered_from_its_biased_score_is_rounded_twice():
    x, bias = _logits("ordinary"), np.full(EXPERTS, np.float32(4096.1))
    got, read = (
        routers.route_sqrt_softplus(x, TOP, bias=bias, renormalize=False, kernel=kernel)
        for kernel in ("general", "triton")
    )
    same = np.take_along_axis(read.scores, got.ids.astype(int), 1)
    assert (got.weights != same).any()
    assert np.abs(got.weights - same).max() <= 2.0**-12  # half an ulp at 4096
    assert (read.weights == np.take_along_axis(read.scores, read.ids.astype(int), 1)).all()


def test_triton_compares_a_nan_as_less_than_any_number():
    """Four numbers are enough for four experts; with three the first NaN comes in, and no sum divides the others."""
    x = np.full((1, EXPERTS), np.nan, np.float32)
    x[0, [3, 7, 9, 12]] = [-100, 1, 2, 3]
    routed = ROUTERS["sqrtsoftplus_triton"](x, "numpy")
    assert set(routed.ids[0].tolist()) == {3, 7, 9, 12}
    assert np.isfinite(routed.weights).all()
    assert (routed.compared[0, [0, 1, 2]] == np.float32(-1e30)).all()
    x[0, 9] = np.nan
    short = ROUTERS["sqrtsoftplus_triton"](x, "numpy")
    assert short.ids[0, -1] == 0
    assert np.isnan(short.weights).tolist() == [[False, False, False, True]]
    assert (short.weights[0, :3] == np.float32(1.5) * short.scores[0, short.ids[0, :3]]).all()
    assert np.isfinite(ROUTERS["sqrtsoftplus"](x, "numpy").weights).all()


def _torch_grouped(x, bias, renormalize, scaling):
    """vLLM's operations where it does not take the fused kernel, by torch itself."""
    import torch

    scores = torch.from_numpy(x).sigmoid()
    compared = scores if bias is None else scores + torch.from_numpy(bias)
    parted = compared.view(len(x), 4, -1)
    worth = parted.max(dim=-1).values if bias is None else parted.topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(worth).scatter_(1, worth.topk(2, dim=-1)[1], 1)
    mask = mask.unsqueeze(-1).expand(len(x), 4, parted.shape[2]).reshape(len(x), -1)
    ids = compared.masked_fill(~mask.bool(), float("-inf")).topk(TOP, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.numpy(), (weights * scaling).numpy()


@pytest.mark.parametrize("bias", [None, BIAS], ids=["largest alone", "two largest"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_torch_kernel_is_what_torch_does(bias, renormalize):
    x = np.concatenate([_logits("ordinary"), _logits("one_nan")])  # no ties: which of equals torch takes is open
    routed = routers.route_grouped(
        x, TOP, groups=4, top_groups=2, bias=bias, renormalize=renormalize, scaling=2.5, kernel="torch"
    )
    ids, weights = _torch_grouped(x, bias, renormalize, 2.5)
    np.testing.assert_array_equal(routed.ids, ids)
    # torch's vectorised exponential and its order of summing: a few units in the last place
    np.testing.assert_allclose(routed.weights, weights, rtol=2e-6)
    assert np.isnan(routed.weights).any()


def test_one_nan_is_out_in_the_fused_kernel_and_first_in_torch():
    x = np.float32([[2, 1, np.nan, 0, 1.5, 0.5, -1, -2]])
    fused, torch = (
        routers.route_grouped(x, 2, groups=4, top_groups=2, bias=np.zeros(8), kernel=kernel)
        for kernel in ("fused", "torch")
    )
    assert fused.ids.tolist() == [[0, 4]]
    assert np.isfinite(fused.weights).all()
    assert torch.ids.tolist() == [[2, 0]]
    assert np.isnan(torch.weights).all()
    plain = routers.route_grouped(x, 2, groups=4, top_groups=2, bias=np.zeros(8), kernel="torch", renormalize=False)
    assert np.isnan(plain.weights).tolist() == [[True, False]]


def test_the_epsilon_decides_about_scores_of_zero():
    x = np.full((1, 8), -np.inf, np.float32)
    made = {
        k: routers.route_grouped(x, 2, groups=2, top_groups=1, bias=np.zeros(8), kernel=k) for k in ("fused", "torch")
    }
    assert made["fused"].weights.tolist() == [[0, 0]]
    assert np.isnan(made["torch"].weights).all()


def test_places_of_an_image_ask_their_bias_and_not_the_table():
    x = _logits("ordinary")[:12]
    tokens = np.arange(12)
    table = np.tile([0, 1, 2, 3], (20, 1))
    images = routers.route_hash(x, tokens, table, bias_vl=BIAS, image_sentinel_lo=4, scaling=1.5)
    inside = np.isin(tokens, [4, 5, 6, 7, 8])
    assert (routers.is_image(tokens, 4) == inside).all()
    assert (images.ids[~inside] == [0, 1, 2, 3]).all()
    like = routers.route_sqrt_softplus(x[inside], 4, bias=BIAS, scaling=1.5)
    for field in ("ids", "weights", "compared"):
        assert getattr(images, field)[inside].tobytes() == getattr(like, field).tobytes()
    assert np.isnan(images.compared[~inside]).all()
    for off in ({"bias_vl": None, "image_sentinel_lo": 4}, {"bias_vl": BIAS, "image_sentinel_lo": 0}):
        assert (routers.route_hash(x, tokens, table, **off).ids == table[tokens]).all()


def test_an_image_s_ids_need_no_row_of_the_table():
    routed = routers.route_hash(_logits("ordinary")[:1], [100], TABLE, bias_vl=BIAS, image_sentinel_lo=100)
    assert len(set(routed.ids[0].tolist())) == TOP


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
