"""One token's logits through every router: whom each picks, and what decided it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe import routers
from nvfp4viz.moe.routers import Scored

Array = npt.NDArray[Any]
ROUTERS = ("softmax", "sigmoid", "grouped", "grouped_torch", "sqrtsoftplus", "hash", "gemma4")
"""``grouped`` is vLLM's kernel, ``grouped_torch`` the same router by torch's operations."""


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
        Kept groups (grouped routers).
    fell_back
        Whether a number that is not finite kept the router from choosing at all.
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
    fell_back: bool


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
    return {name: _picked(name, made[name](), groups) for name in ROUTERS}


def _picked(name: str, scored: Scored, groups: int) -> Picked:
    ids = scored.ids[0].tolist()
    compared, scores = scored.compared[0], scored.scores[0]
    weights = tuple(float(weight) for weight in scored.weights[0])
    size = len(compared) // groups
    # Each of these is the mark that the router itself leaves, and no second account of its rules.
    fell_back = (
        (name == "softmax" and not scores.any())
        or (name == "grouped" and not np.isfinite(compared[ids]).all())
        or (name == "grouped_torch" and np.isnan(compared[ids]).any())
        or (name == "gemma4" and np.isnan(weights).any())
    )
    left = ~np.isneginf(compared) if name == "grouped_torch" else np.isfinite(compared)
    kept = tuple(sorted({at // size for at in np.flatnonzero(left).tolist()}))
    others = [expert for expert in range(len(compared)) if expert not in ids]
    asked_table = name == "hash" and bool(np.isnan(compared).all())
    decided = not asked_table and not fell_back and bool(others)
    last = ids[-1] if decided else -1
    out = max(others, key=lambda expert: (compared[expert], -expert)) if decided else -1
    return Picked(
        name,
        tuple(ids),
        weights,
        scores,
        compared,
        last,
        out,
        decided and bool(compared[last] == compared[out]),
        kept if name.startswith("grouped") else (),
        bool(fell_back),
    )
