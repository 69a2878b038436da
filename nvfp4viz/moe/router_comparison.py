"""One token's logits through every router: whom each picks, and what decided it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe import routers
from nvfp4viz.moe.routers import Scored

Array = npt.NDArray[Any]
ROUTERS = ("softmax", "sigmoid", "grouped", "grouped_torch", "sqrtsoftplus", "hash", "gemma4")
"""``grouped`` is vLLM's kernel, ``grouped_torch`` the same router by torch's operations."""


Lost = Literal["", "scores", "groups", "nan", "above", "below", "infinite", "zero"]
"""Why a choice or its weights no longer follow the logits:

``scores``    softmax: the sum is not finite, every score counts as 0
``groups``    grouped: too few groups have two finite numbers, experts 0 … k−1 with equal weights
``nan``       Gemma 4 and grouped in torch: a NaN sorts first, and all weights become NaN
``above``     Gemma 4: +Inf comes first, and ∞ − ∞ makes all weights NaN
``below``     Gemma 4: even the largest is −Inf, and its distance to itself is NaN
``infinite``  √softplus and hash: a chosen score is infinite; over their sum it is NaN, and the others are 0
``zero``      grouped in torch: all chosen scores are 0, and 0 / 0 is NaN
"""


@dataclass(frozen=True, slots=True)
class Picked:
    """What one router did with the token.

    Attributes
    ----------
    ids, weights
        The chosen experts, best first, and their weights.
    scores, compared : (E,) float32
        As in `Scored`; ``compared`` is NaN throughout where a table was asked (hash).
    last_in, first_out
        The chosen expert that came in last, and the best of the others; −1 where no comparison decided.
    tied
        Whether these two were equal, so that the lower id decided.
    groups
        Kept groups (grouped routers); those that have two finite numbers where the kernel finds too few of them.
    lost
        Why choice or weights no longer follow the logits; empty where they do.
    """

    router: str
    ids: tuple[int, ...]
    weights: tuple[float, ...]
    scores: npt.NDArray[np.float32] = field(repr=False)
    compared: npt.NDArray[np.float32] = field(repr=False)
    last_in: int
    first_out: int
    tied: bool
    groups: tuple[int, ...]
    lost: Lost


def compare_routers(
    logits: Sequence[float] | Array,
    top_k: int,
    *,
    bias: Sequence[float] | Array,
    token: int,
    table: Array,
    groups: int,
    top_groups: int,
    scaling: float = 1.0,
    image_sentinel_lo: int = 0,
) -> dict[str, Picked]:
    """The same logits ``(E,)`` through every router; the bias goes to those that have one.

    Parameters
    ----------
    token, table
        The token's id and the hash router's table ``(vocabulary, k)``.
    scaling
        ``routed_scaling_factor`` of all routers but Gemma 4's, which has none.
    image_sentinel_lo
        First of five token ids that stand for places of an image and ask no table but the scores, with the same bias;
        0: none do.
    """
    x = np.asarray(logits, np.float32)[None]
    b = np.asarray(bias, np.float32)
    in_groups: dict[str, Any] = {"groups": groups, "top_groups": top_groups, "bias": b, "scaling": scaling}
    made: dict[str, Callable[[], Scored]] = {
        "softmax": lambda: routers.route_softmax(x, top_k, scaling=scaling),
        "sigmoid": lambda: routers.route_sigmoid(x, top_k, bias=b, scaling=scaling),
        "grouped": lambda: routers.route_grouped(x, top_k, **in_groups),
        "grouped_torch": lambda: routers.route_grouped(x, top_k, **in_groups, kernel="torch"),
        "sqrtsoftplus": lambda: routers.route_sqrt_softplus(x, top_k, bias=b, scaling=scaling),
        "hash": lambda: routers.route_hash(
            x, np.array([token]), table, scaling=scaling, bias_vl=b, image_sentinel_lo=image_sentinel_lo
        ),
        "gemma4": lambda: routers.route_gemma4_logits(x, top_k),
    }
    return {name: _picked(name, made[name](), groups, top_groups) for name in ROUTERS}


def _picked(name: str, scored: Scored, groups: int, top_groups: int) -> Picked:
    ids = scored.ids[0].tolist()
    compared, scores = scored.compared[0], scored.scores[0]
    kept = _kept_groups(name, compared, groups)
    lost = _lost(name, scored, len(kept) < top_groups)
    others = [expert for expert in range(len(compared)) if expert not in ids]
    asked_table = name == "hash" and bool(np.isnan(compared).all())
    # Where numbers were compared the choice has a reason, whatever became of the weights.
    decided = not asked_table and lost not in ("scores", "groups", "nan") and bool(others)
    last = ids[-1] if decided else -1
    out = max(others, key=lambda expert: (compared[expert], -expert)) if decided else -1
    return Picked(
        name,
        tuple(ids),
        tuple(float(weight) for weight in scored.weights[0]),
        scores,
        compared,
        last,
        out,
        decided and bool(compared[last] == compared[out]),
        kept,
        lost,
    )


def _kept_groups(name: str, compared: Array, groups: int) -> tuple[int, ...]:
    """Groups that the choice was made in: both routers leave −Inf everywhere else."""
    if name not in ("grouped", "grouped_torch"):
        return ()
    parted = compared.reshape(groups, -1)
    # The kernel keeps a group for its two largest numbers; torch keeps one with a NaN as well.
    inside = np.isfinite(parted).sum(axis=1) >= 2 if name == "grouped" else ~np.isneginf(parted).all(axis=1)
    return tuple(np.flatnonzero(inside).tolist())


def _lost(name: str, scored: Scored, few_groups: bool) -> Lost:
    """Each of these is the mark that the router itself leaves, and no second account of its rules."""
    compared, scores, ids = scored.compared[0], scored.scores[0], scored.ids[0]
    if name == "softmax" and not scores.any():
        return "scores"
    if name == "grouped" and few_groups:
        return "groups"
    if not np.isnan(scored.weights).any():
        return ""
    if name in ("sqrtsoftplus", "hash"):
        return "infinite"
    first = compared[ids[0]]
    if np.isnan(first):
        return "nan"
    if name == "grouped_torch":
        return "zero"
    return "above" if first > 0 else "below"
