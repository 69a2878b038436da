"""How many slots a longer calibration will still leave unseen, predicted from a short recorded one.

The unit is the document.  For each (layer, expert) slot let ``y`` be the number of pilot documents, out of n, that
route a token there.  Slots with ``y = 0`` are unseen.  What rarely happened tells about what has not happened yet, as
in Good and Turing's estimate, so only slots with ``1 ≤ y ≤ K`` are looked at, K = n/8 and at least 3:

1. A rare slot is reached by a document with probability p, and p follows ``Beta(a, b)``.  The rare slots' own
   frequencies give a posterior over a grid of (a, b), flat in ``log a`` and ``log b``; values that would imply more
   reachable unseen slots than there are unseen slots are left out.
2. With ``f(y)`` the beta-binomial probability of y, ``F = f(1) + … + f(K)`` and S rare slots, the slots that will be
   reached first between document n and document m number ``S · (f(0) − f_m(0)) / F`` on average.
3. The interval takes draws: (a, b) from the posterior, S from ``Gamma(S + ½)``, and a Poisson number of closings.
   A document that reaches one new slot often reaches several, so closings come in groups of φ, the mean size of such a
   group as a slot meets it, counted in the pilot over slots that a single document reached.

Slots that the text can never reach stay unseen for good; nothing here assumes that all will be closed.  The method was
settled on documents of seed 3; the recording that is shipped, and that checks it, is of seed 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nvfp4viz.model.routing_log import RoutingLog

F64 = npt.NDArray[np.float64]
LEVEL = 0.9
DRAWS = 4000
_A = np.exp(np.linspace(np.log(0.02), np.log(4.0), 24))[:, None]
_B = np.exp(np.linspace(np.log(0.1), np.log(300.0), 28))[None, :]


@dataclass(frozen=True, slots=True)
class Plan:
    """One prediction.

    Attributes
    ----------
    pilot, documents
        Documents recorded, and documents predicted for.
    tokens
        Tokens of that many documents, at the pilot's mean length.
    unseen_now
        Slots that the pilot left without a token.
    rare, rare_up_to, together
        S, K and φ of the method.
    expected, low, high
        Slots still unseen: the mean, and the interval at `level`.
    """

    pilot: int
    documents: int
    tokens: int
    unseen_now: int
    rare: int
    rare_up_to: int
    together: float
    expected: float
    low: int
    high: int
    level: float

    def holds(self, actual: int) -> bool:
        """Whether the interval contains what came."""
        return self.low <= actual <= self.high


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A prediction and what its own continuation, which it never saw, really left unseen."""

    text: str
    run: int
    plan: Plan
    actual: int

    @property
    def held(self) -> bool:
        return self.plan.holds(self.actual)


def plan_unseen(pilot: RoutingLog, documents: Sequence[int], level: float = LEVEL, seed: int = 0) -> tuple[Plan, ...]:
    """Predict the unseen slots after each number of ``documents``, pilot included.

    Parameters
    ----------
    pilot
        At least one document.
    documents
        Each at least the pilot's own number.
    """
    n = pilot.documents
    reached = (pilot.counts > 0).reshape(n, -1)
    y = reached.sum(axis=0)
    unseen = int((y == 0).sum())
    up_to = min(n, max(3, n // 8))
    rare = int(((y >= 1) & (y <= up_to)).sum())
    f = _frequencies(n, up_to)
    total = f[1:].sum(axis=0)
    log_likelihood = sum(
        (float((y == at).sum()) * np.log(f[at] / total) for at in range(1, up_to + 1)), start=np.zeros(total.shape)
    )
    live = (rare + 0.5) * f[0] / total
    weights = np.exp(log_likelihood - log_likelihood.max()) * (live <= max(unseen, float(live.min())))
    weights /= weights.sum()
    together = _together(reached[:, y == 1])
    draw = np.random.default_rng(seed)
    chosen = draw.choice(weights.size, DRAWS, p=weights.ravel())
    count = draw.gamma(rare + 0.5, 1.0, DRAWS)
    made = []
    mean_tokens = float(pilot.tokens.mean(dtype=np.float64))
    closings = draw.bit_generator.state
    for m in documents:
        assert m >= n, "a plan looks ahead"
        # The same draws for each: a plan does not depend on which others are asked for.
        draw.bit_generator.state = closings
        closing = (f[0] - _never(m)) / total
        new = draw.poisson(count * closing.ravel()[chosen] / together) * together
        left = unseen - np.minimum(new, unseen)
        low, high = np.quantile(left, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
        ends = int(np.floor(low)), int(np.ceil(high))
        tokens = round(m * mean_tokens)
        made.append(Plan(n, m, tokens, unseen, rare, up_to, together, float(left.mean()), *ends, level))
    return tuple(made)


def _together(single: npt.NDArray[np.bool_]) -> float:
    """φ: how many slots that one document alone reached share their document, as such a slot finds it."""
    sizes = single.sum(axis=1)
    return float((sizes**2).sum() / sizes.sum()) if sizes.any() else 1.0


@lru_cache(maxsize=16)
def _frequencies(n: int, up_to: int) -> F64:
    """``f(0) … f(K)`` over the grid: (K+1, grid) of ``C(n, y) · B(a+y, b+n−y) / B(a, b)``."""
    none = _never(n)
    rows = [np.log(none)]
    for y in range(up_to):
        rows.append(rows[-1] + np.log((n - y) / (y + 1) * (_A + y) / (_B + n - y - 1)))
    # f(0) is taken as it is, not through its logarithm: between document n and itself exactly nothing closes.
    return np.stack([none, *np.exp(np.stack(rows[1:]))])


@lru_cache(maxsize=256)
def _never(m: int) -> F64:
    """``f_m(0) = B(a, b+m) / B(a, b)`` over the grid: m documents, none of which reaches the slot."""
    steps = np.arange(m)[:, None, None]
    return np.exp(np.log((_B + steps) / (_A + _B + steps)).sum(axis=0))


def check_planner(
    texts: dict[str, RoutingLog], pilot: int, documents: int, level: float = LEVEL, seed: int = 0
) -> tuple[HeldOut, ...]:
    """Cut every log into runs of ``documents``, predict each from its first ``pilot``, and look at the rest.

    Runs share no document, and a prediction sees no document of the part that it predicts.
    """
    made = []
    for text, log in texts.items():
        for run in range(log.documents // documents):
            whole = log.part(run * documents, (run + 1) * documents)
            (plan,) = plan_unseen(whole.part(0, pilot), [documents], level, seed)
            made.append(HeldOut(text, run, plan, int((whole.totals() == 0).sum())))
    return tuple(made)
