"""The calibration planner: its arithmetic, and whether its interval holds what it promises."""

from math import comb, exp, lgamma

import numpy as np
import pytest

from nvfp4viz.model import corpus, planner
from nvfp4viz.model.routing_log import RoutingLog, joined
from sample_checkpoints import ROUTING


@pytest.fixture(scope="module")
def logs():
    made = {name: RoutingLog.read(ROUTING, name) for name in corpus.DOMAINS}
    return made | {"all": joined(list(made.values())).part(0, 2048)}


def _least(of: int, level: float = planner.LEVEL, chance: float = 0.01) -> int:
    """So few hits would have a true coverage of ``level`` one time in a hundred."""
    below, hits = 0.0, -1
    while below < chance:
        hits += 1
        below += comb(of, hits) * level**hits * (1 - level) ** (of - hits)
    return hits


@pytest.mark.parametrize(("pilot", "documents"), [(32, 256), (64, 256), (64, 512), (128, 512), (128, 1024)])
def test_the_interval_holds_on_held_out_runs(logs, pilot, documents):
    checks = planner.check_planner(logs, pilot, documents)
    assert len(checks) == 7 * (2048 // documents)
    assert sum(check.held for check in checks) >= _least(len(checks))
    # and says something: it spans a small part of the slots that are still open
    widths = [check.plan.high - check.plan.low for check in checks]
    assert np.mean(widths) < 0.25 * np.mean([check.plan.unseen_now for check in checks])


def test_a_narrow_interval_fails_the_same_test(logs):
    checks = planner.check_planner(logs, 64, 256, level=0.3)
    assert sum(check.held for check in checks) < _least(len(checks))


def test_one_text_repeated_is_not_many_texts(logs):
    """Told 64 times what one document reached, a plan expects nothing new, and is wrong: documents must differ."""
    one = logs["news"].part(0, 1)
    repeated = RoutingLog(np.repeat(one.tokens, 64), np.repeat(one.counts, 64, axis=0))
    (sure,) = planner.plan_unseen(repeated, [256])
    actual = int(logs["news"].holes_after()[256])
    assert not sure.holds(actual)


def test_a_plan_sees_nothing_of_what_it_predicts(logs):
    log = logs["code"].part(0, 256)
    changed = RoutingLog(log.tokens, log.counts.copy())
    changed.counts[64:] = 1
    one, two = (planner.check_planner({"x": each}, 64, 256)[0] for each in (log, changed))
    assert one.plan == two.plan
    assert one.actual != two.actual == 0


def test_equal_pilots_give_equal_plans(logs):
    pilot = logs["json"].part(0, 32)
    assert planner.plan_unseen(pilot, [64, 256]) == planner.plan_unseen(pilot, [64, 256])
    assert planner.plan_unseen(pilot, [256]) != planner.plan_unseen(pilot, [256], seed=1)


def test_a_plan_does_not_depend_on_which_others_are_asked_for(logs):
    pilot = next(iter(logs.values())).part(0, 32)
    together = planner.plan_unseen(pilot, [32, 64, 128, 512, 1024])
    assert together == tuple(planner.plan_unseen(pilot, [plan.documents])[0] for plan in together)


def test_more_text_never_opens_a_hole(logs):
    for name, log in logs.items():
        plans = planner.plan_unseen(log.part(0, 64), [64, 96, 128, 256, 1024])
        now = int((log.totals(64) == 0).sum())
        assert (plans[0].low, plans[0].expected, plans[0].high) == (now, now, now), name
        assert all(0 <= plan.low <= plan.high <= now for plan in plans)
        assert [plan.expected for plan in plans] == sorted((plan.expected for plan in plans), reverse=True)


@pytest.mark.parametrize("pilot", [1, 2, 16, 32, 64, 100, 128, 129])
def test_a_plan_for_the_pilot_itself_is_what_the_pilot_saw(logs, pilot):
    """Whatever the rounding: a plan for no further document must not ask for less than nothing."""
    for name, log in logs.items():
        (plan,) = planner.plan_unseen(log.part(0, pilot), [pilot])
        now = int((log.totals(pilot) == 0).sum())
        assert (plan.low, plan.expected, plan.high) == (now, now, now), name


def test_nothing_unseen_stays_so():
    seen = RoutingLog(np.full(20, 9), np.ones((20, 2, 4), int))
    (plan,) = planner.plan_unseen(seen, [500])
    assert (plan.unseen_now, plan.low, plan.high) == (0, 0, 0)


def test_frequencies_are_the_beta_binomial():
    n, up_to = 20, 20
    f = planner._frequencies(n, up_to)
    np.testing.assert_allclose(f.sum(axis=0), 1, rtol=1e-9)  # float64: 21 terms of up to 20 factors each
    for i, j in ((0, 0), (12, 20), (23, 27)):
        a, b = planner._A[i, 0], planner._B[0, j]
        for y in (0, 1, 7, 20):
            log_beta = [lgamma(p) + lgamma(q) - lgamma(p + q) for p, q in ((a + y, b + n - y), (a, b))]
            np.testing.assert_allclose(f[y, i, j], comb(n, y) * exp(log_beta[0] - log_beta[1]), rtol=1e-9)


def test_new_slots_that_come_together_widen_the_interval():
    rng = np.random.default_rng(5)
    counts = (rng.random((64, 1, 200)) < 0.004).astype(int)
    counts[:, :, :20] = 1
    alone = RoutingLog(np.full(64, 10), counts)
    grouped = counts.copy()
    single = np.flatnonzero((counts[:, 0] > 0).sum(0) == 1)
    grouped[:, :, single] = 0
    for at, slot in enumerate(single):
        grouped[at // 5, 0, slot] = 1
    (one,), (five,) = (planner.plan_unseen(RoutingLog(alone.tokens, c), [256]) for c in (counts, grouped))
    assert (one.rare, one.unseen_now) == (five.rare, five.unseen_now)
    assert one.together < 2 < five.together
    assert five.high - five.low > one.high - one.low


def test_it_looks_ahead_only(logs):
    with pytest.raises(AssertionError, match="ahead"):
        planner.plan_unseen(logs["news"].part(0, 16), [8])
