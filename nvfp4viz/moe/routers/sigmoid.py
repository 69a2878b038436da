"""Routers that score each expert for itself by a sigmoid: plain, and in groups (DeepSeek V3)."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from nvfp4viz.errors import InputError
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.moe.routers.choice import (
    F32,
    I32,
    NEVER,
    ONE,
    ZERO,
    Array,
    Scored,
    add,
    add_rows,
    best,
    best_nan_first,
    check_kernel,
    check_logits,
    choose,
    each,
    exp,
    finite_bias,
    take,
)
from nvfp4viz.moe.routing import top_k_stable

Kernel = Literal["fused", "torch"]
FUSED_MOST = 32
"""vLLM's kernel takes no more groups than this, and no larger k."""
HALF = np.float32(0.5)
GROUP_EPSILON = np.float32(1e-20)


def sigmoid(x: np.float32) -> np.float32:
    """``1 / (1 + exp(−x))``."""
    return np.float32(ONE / np.float32(ONE + exp(-x)))


def sigmoid_tanh(x: np.float32) -> np.float32:
    """``0.5·tanh(x/2) + 0.5``: the grouped kernel's sigmoid; its bits are not `sigmoid`'s."""
    tangent = np.float32(np.tanh(np.float64(np.float32(HALF * x))))
    return np.float32(np.float32(HALF * tangent) + HALF)


def _sigmoid_all(x: F32) -> F32:
    result: F32 = ONE / (ONE + np.exp(-x.astype(np.float64)).astype(np.float32))
    return result


def _sigmoid_tanh_all(x: F32) -> F32:
    result: F32 = HALF * np.tanh((HALF * x).astype(np.float64)).astype(np.float32) + HALF
    return result


def route_sigmoid(
    logits: F32,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    path: NumpyPath = "numpy",
) -> Scored:
    """Each expert for itself: the k largest ``sigmoid(l) + bias``, weighed by the sigmoid without bias.

    A NaN's score counts as 0, like everything that is not finite.

    >>> route_sigmoid(np.float32([[0, 0, 0]]), 1, bias=np.float32([0, 0.1, 0])).ids.tolist()
    [[1]]
    """
    check_logits(logits, top_k)
    extra = finite_bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        scores = each(logits, sigmoid) if by_reference(path) else _sigmoid_all(logits)
        scores = np.where(np.isfinite(scores), scores, ZERO)
        return choose(path, scores, scores + extra, top_k, renormalize, scaling)


def route_grouped(
    logits: F32,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    kernel: Kernel = "fused",
    path: NumpyPath = "numpy",
) -> Scored:
    """DeepSeek V3: the best groups first, then the k largest of their experts.

    A group counts as much as its two largest ``sigmoid + bias`` together, as its largest alone where there is no bias.

    Parameters
    ----------
    kernel
        ``"fused"``: vLLM's kernel, which it takes on CUDA for up to 32 groups and k up to 32 where there is a bias.
        The sigmoid is ``0.5·tanh(x/2) + 0.5``.  An expert whose number is not finite is out; if a group of the best
        `top_groups` is, the token falls back to experts 0 … k−1 with weight 1/k.  Renormalised weights are multiplied
        by ``scaling / (Σ + 1e-20)``.
        ``"torch"``: torch's operations, taken elsewhere.  The sigmoid is ``1 / (1 + exp(−x))``.  NaN sorts first: its
        group is kept, it is chosen, and renormalised weights become NaN.  Weights are divided by Σ without the
        epsilon, so that scores of 0 give NaN as well, and then multiplied by ``scaling``.  (Which of equals
        ``torch.topk`` takes is open; here the lower id.)

    Raises
    ------
    InputError
        ``router.groups``: groups of unequal size, or too few experts in those kept; ``router.kernel``; and those that
        all routers share.

    >>> routed = route_grouped(np.float32([[2, 0, 1, 1.5]]), 2, groups=2, top_groups=1, bias=np.zeros(4))
    >>> routed.ids.tolist(), routed.compared.tolist()
    ([[3, 2]], [[-inf, -inf, 0.7310585975646973, 0.8175745010375977]])
    >>> x = np.float32([[2, np.nan, 1, 1.5]])
    >>> ways = [route_grouped(x, 2, groups=2, top_groups=1, bias=np.zeros(4), kernel=k) for k in ("fused", "torch")]
    >>> [one.ids.tolist() for one in ways], ways[1].weights.tolist()
    ([[[3, 2]], [[1, 0]]], [[nan, nan]])
    """
    check_logits(logits, top_k)
    check_kernel(kernel, get_args(Kernel))
    experts = logits.shape[1]
    size = 0 if groups < 1 or experts % groups else experts // groups
    if not 0 < top_groups <= groups or top_groups * size < top_k or size < (1 if bias is None else 2):
        raise InputError("router.groups", experts=experts, groups=groups, kept=top_groups, top=top_k)
    extra, factor = finite_bias(bias, experts), np.float32(scaling)
    best_of = 1 if bias is None else 2
    one, whole = (sigmoid_tanh, _sigmoid_tanh_all) if kernel == "fused" else (sigmoid, _sigmoid_all)
    with np.errstate(all="ignore"):
        scores = each(logits, one) if by_reference(path) else whole(logits)
        compared = scores + extra
        if kernel == "fused":
            compared = np.where(np.isfinite(compared), compared, NEVER)
        if by_reference(path):
            return _row_by_row(compared, scores, top_k, groups, top_groups, best_of, renormalize, factor, kernel)
        worth, best_groups, kept, inside = _kept(compared, groups, top_groups, best_of)
        if kernel == "torch":
            ids = top_k_stable(kept, top_k)
            chosen = take(scores, ids)
            parts = chosen / add_rows(chosen)[:, None] if renormalize else chosen
            return Scored(ids, parts * factor, scores, kept)
        # Experts outside come after those inside that are out themselves: the queue never saw them.
        ids = _two_keys(kept, np.where(inside, np.float32(0), NEVER), top_k)
        chosen = take(scores, ids)
        weights = chosen * ((factor / (add_rows(chosen) + GROUP_EPSILON))[:, None] if renormalize else factor)
        lost = ~np.isfinite(take(worth, best_groups[:, -1:]))
        ids = np.where(lost, np.arange(top_k, dtype=np.int32), ids)
        return Scored(ids, np.where(lost, ONE / np.float32(top_k), weights), scores, kept)


def _kept(compared: F32, groups: int, top_groups: int, best_of: int) -> tuple[F32, I32, F32, Array]:
    """What each group counts as (T, G), the best groups, what is left to compare (T, E), and whose group was kept."""
    parted = compared.reshape(len(compared), groups, compared.shape[1] // groups)
    largest = take(parted, top_k_stable(parted, best_of))
    worth = largest[:, :, 0] if best_of == 1 else largest[:, :, 0] + largest[:, :, 1]
    best_groups = top_k_stable(worth, top_groups)
    inside = np.zeros(worth.shape, bool)
    np.put_along_axis(inside, best_groups.astype(np.int64), True, axis=1)
    of_experts = np.repeat(inside, parted.shape[2], axis=1)
    return worth, best_groups, np.where(of_experts, compared, NEVER), of_experts


def _two_keys(first: F32, second: F32, k: int) -> I32:
    order = np.lexsort((-second, -first), axis=-1)
    return order[:, :k].astype(np.int32)


# ------------------------------------------------------------------ one token at a time


def _row_by_row(
    compared: F32, scores: F32, k: int, groups: int, top_groups: int, best_of: int, renormalize: bool,
    scaling: np.float32, kernel: Kernel,
) -> Scored:  # fmt: skip
    ids, weights = np.zeros((len(scores), k), np.int32), np.zeros((len(scores), k), np.float32)
    kept = np.full(scores.shape, NEVER, np.float32)
    weigh = _torch_weights if kernel == "torch" else _fused_weights
    order = best_nan_first if kernel == "torch" else best
    size = scores.shape[1] // groups
    for token, (by, score) in enumerate(zip(compared, scores, strict=True)):
        worth = []
        for group in range(groups):
            members = list(by[group * size : (group + 1) * size])
            two = [members[at] for at in order(members, best_of)]
            worth.append(two[0] if best_of == 1 else np.float32(two[0] + two[1]))
        best_groups = order(worth, top_groups)
        candidates = [e for e in range(len(by)) if e // size in best_groups]
        kept[token, candidates] = by[candidates]
        if kernel == "fused" and not np.isfinite(worth[best_groups[-1]]):
            ids[token], weights[token] = range(k), np.float32(ONE / np.float32(k))
            continue
        ids[token] = [candidates[at] for at in order([by[e] for e in candidates], k)]
        weights[token] = weigh([score[e] for e in ids[token]], renormalize, scaling)
    return Scored(ids, weights, scores, kept)


def _fused_weights(chosen: list[np.float32], renormalize: bool, scaling: np.float32) -> list[np.float32]:
    factor = np.float32(scaling / np.float32(add(chosen) + GROUP_EPSILON)) if renormalize else scaling
    return [np.float32(weight * factor) for weight in chosen]


def _torch_weights(chosen: list[np.float32], renormalize: bool, scaling: np.float32) -> list[np.float32]:
    total = add(chosen) if renormalize else ONE
    return [np.float32(np.float32(weight / total) * scaling) for weight in chosen]
