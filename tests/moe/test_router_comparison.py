"""One token through every router: who is picked, and what is said to have decided it."""

import numpy as np
import pytest

from nvfp4viz.moe.router_comparison import ROUTERS, compare_routers

TABLE = np.array([[5, 1, 0], [2, 3, 4]])
LOGITS = [2.0, -1.0, 0.5, 1.5, -0.5, 1.0, 0.0, -2.0]
BIAS = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.75, 0.0]


def _compare(logits=LOGITS, bias=BIAS, token=0, **more):
    return compare_routers(logits, 3, bias=bias, token=token, table=TABLE, groups=4, top_groups=2, **more)


def test_every_router_answers():
    picked = _compare()
    assert tuple(picked) == ROUTERS
    assert picked["softmax"].ids == picked["gemma4"].ids == (0, 3, 5)
    assert picked["sigmoid"].ids == (6, 0, 3)
    assert picked["grouped"].groups == (1, 3)
    assert set(picked["grouped"].ids) <= {2, 3, 6, 7}
    assert picked["grouped_torch"].groups == (1, 3)
    assert picked["grouped_torch"].ids == picked["grouped"].ids
    assert picked["hash"].ids == (5, 1, 0)
    assert _compare(token=1)["hash"].ids == (2, 3, 4)


def test_what_decided_is_named():
    picked = _compare()
    for name, one in picked.items():
        if name == "hash":
            assert (one.last_in, one.first_out) == (-1, -1)
            continue
        assert one.last_in == one.ids[-1]
        assert one.first_out not in one.ids
        assert one.compared[one.last_in] >= one.compared[one.first_out]
        assert not any(one.compared[e] > one.compared[one.first_out] for e in range(8) if e not in one.ids)
        assert not one.tied
    tied = _compare([1.0] * 8, [0.0] * 8)
    assert all(one.tied for name, one in tied.items() if name != "hash")
    assert tied["softmax"].first_out == 3


def test_a_place_of_an_image_is_routed_by_its_scores():
    picked = _compare(token=1, image_sentinel_lo=1)
    assert picked["hash"].ids == picked["sqrtsoftplus"].ids != _compare(token=1)["hash"].ids
    assert picked["hash"].weights == picked["sqrtsoftplus"].weights
    assert (picked["hash"].last_in, picked["hash"].first_out) == (
        picked["sqrtsoftplus"].last_in, picked["sqrtsoftplus"].first_out,
    )  # fmt: skip


def test_a_nan_is_out_in_the_kernel_and_first_in_torch():
    logits = list(LOGITS)
    logits[4] = float("nan")
    picked = _compare(logits)
    assert not picked["grouped"].lost
    assert 4 not in picked["grouped"].ids
    assert picked["grouped_torch"].lost == "nan"
    assert picked["grouped_torch"].ids[0] == 4
    assert 2 in picked["grouped_torch"].groups
    assert np.isnan(picked["grouped_torch"].weights).all()


def test_a_softmax_of_all_and_a_softmax_of_the_chosen_agree_after_renormalising():
    picked = _compare()
    np.testing.assert_allclose(picked["softmax"].weights, picked["gemma4"].weights, rtol=1e-6)  # a few ulps each


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_is_told_apart(bad):
    logits = list(LOGITS)
    logits[4] = bad
    picked = _compare(logits)
    assert picked["softmax"].lost == "scores"
    assert picked["softmax"].ids == (0, 1, 2)
    assert picked["gemma4"].ids[0] == 4
    assert picked["gemma4"].lost == ("nan" if np.isnan(bad) else "above")
    assert not picked["sigmoid"].lost
    assert not picked["hash"].lost


def test_too_few_whole_groups_are_a_fall_back():
    logits = [float("nan")] * 5 + [1.0, 2.0, 0.0]
    picked = _compare(logits)
    assert picked["grouped"].lost == "groups"
    assert picked["grouped"].ids == (0, 1, 2)


INF = float("inf")


def test_an_infinite_logit_spoils_weights_for_its_own_reasons():
    """The reader's case: expert 2 +Inf, expert 3 −Inf, and no NaN among the logits."""
    picked = compare_routers(
        [30, -30, INF, -INF, 0, 0, 0, 0], 3, bias=BIAS, token=0, table=np.array([[2, 1, 0]]), groups=4, top_groups=2
    )
    assert {name: one.lost for name, one in picked.items()} == {
        "softmax": "scores", "sigmoid": "", "grouped": "", "grouped_torch": "",
        "sqrtsoftplus": "infinite", "hash": "infinite", "gemma4": "above",
    }  # fmt: skip
    assert picked["sqrtsoftplus"].ids[0] == 2
    for name in ("sqrtsoftplus", "hash"):
        np.testing.assert_equal(picked[name].weights, (np.nan, 0, 0))
    # The choice itself was made by comparing, so what decided it is still told.
    assert picked["gemma4"].last_in == picked["gemma4"].ids[-1]
    assert picked["softmax"].last_in == -1


@pytest.mark.parametrize(
    ("logits", "gemma4", "torch"), [([-INF] * 8, "below", "zero"), ([-200.0] * 8, "", "zero"), ([0.0] * 8, "", "")]
)
def test_zeros_and_minus_infinities_are_told_from_nan(logits, gemma4, torch):
    picked = _compare(logits, [0.0] * 8)
    assert (picked["gemma4"].lost, picked["grouped_torch"].lost) == (gemma4, torch)
    assert np.isnan(picked["gemma4"].weights).all() == bool(gemma4)
    assert np.isnan(picked["grouped_torch"].weights).all() == bool(torch)


@pytest.mark.parametrize(("bad", "whole"), [((3, 4, 6), (0,)), ((1, 3, 4, 6), ()), ((4, 6), (0, 1))])
def test_groups_are_whole_with_two_finite_numbers(bad, whole):
    """Experts 0, 1 and 2 are finite in the first case, and even so they are a fall-back: weights say so."""
    logits = [float("nan") if expert in bad else 1.0 for expert in range(8)]
    one = _compare(logits, [0.0] * 8)["grouped"]
    assert one.groups == whole
    assert one.lost == ("groups" if len(whole) < 2 else "")


def test_scaling_multiplies_all_but_gemma4():
    one, two = _compare(), _compare(scaling=2.5)
    for name in ROUTERS:
        factor = 1.0 if name == "gemma4" else 2.5
        np.testing.assert_allclose(two[name].weights, np.multiply(one[name].weights, factor), rtol=1e-6)  # ulps
