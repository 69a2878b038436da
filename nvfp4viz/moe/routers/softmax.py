"""Routers that take a softmax: over all experts before the choice, or over the chosen after it (Gemma 4)."""

from __future__ import annotations

import numpy as np

from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.moe.routers.choice import (
    F32,
    ONE,
    ZERO,
    Array,
    Scored,
    add,
    add_rows,
    best_nan_first,
    check_logits,
    choose,
    exp,
    finite_bias,
    per_expert,
    take,
)
from nvfp4viz.moe.routing import LOG2_E, top_k_stable


def route_softmax(
    logits: F32,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    bias: Array | None = None,
    path: NumpyPath = "numpy",
) -> Scored:
    """Softmax over all experts, then the k largest (Mixtral, Qwen3-MoE).

    ``exp(l − max) · (1/Σ)`` in f32; what is not finite becomes 0, so that one NaN or +Inf, or nothing but −Inf, leaves
    all scores 0: experts 0 … k−1 with weight 0.  ``bias`` takes part in the choice alone.  Renormalised weights are
    multiplied by ``scaling / Σ`` of the chosen, by ``scaling`` where that sum is not positive.

    >>> routed = route_softmax(np.float32([[0, 2, 2, 1]]), 2)
    >>> routed.ids.tolist(), routed.weights.tolist()                  # not 0.5: the factor 1/Σ is rounded first
    ([[1, 2]], [[0.4999999701976776, 0.4999999701976776]])
    >>> route_softmax(np.float32([[0, np.nan, 2, 1]]), 2).ids.tolist()
    [[0, 1]]
    """
    check_logits(logits, top_k)
    extra = finite_bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        if by_reference(path):
            scores = np.array([_softmax_row(row) for row in logits], np.float32).reshape(logits.shape)
        else:
            top = np.fmax.reduce(logits, axis=1, keepdims=True)
            parts = np.exp((logits - top).astype(np.float64)).astype(np.float32)
            scores = parts * (ONE / add_rows(parts))[:, None]
            scores = np.where(np.isfinite(scores), scores, ZERO)
        return choose(path, scores, scores + extra, top_k, renormalize, scaling)


def _softmax_row(row: F32) -> list[np.float32]:
    top = np.float32(-np.inf)
    for value in row:
        top = value if value > top else top
    parts = [exp(np.float32(value - top)) for value in row]
    inverse = np.float32(ONE / add(parts))
    scores = [np.float32(part * inverse) for part in parts]
    return [score if np.isfinite(score) else ZERO for score in scores]


def route_gemma4_logits(
    logits: F32, top_k: int, per_expert_scale: Array | None = None, *, path: NumpyPath = "numpy"
) -> Scored:
    """The second half of `nvfp4viz.moe.route_gemma4`, from the logits on: a stable sort, then a softmax of the chosen.

    ``exp2((l − max)·log2 e) / Σ`` over the k chosen, times the expert's own scale.  A NaN sorts first and stays.

    >>> route_gemma4_logits(np.float32([[1, np.nan, 3]]), 2).ids.tolist()
    [[1, 2]]
    """
    check_logits(logits, top_k)
    scale = per_expert("per_expert_scale", per_expert_scale, logits.shape[1], ONE)
    with np.errstate(all="ignore"):
        if not by_reference(path):
            ids = top_k_stable(logits, top_k)
            chosen = take(logits, ids)
            parts = np.exp2(((chosen - chosen[:, :1]) * LOG2_E).astype(np.float64)).astype(np.float32)
            weights = parts / add_rows(parts)[:, None] * scale[ids]
        else:
            rows = [_gemma4_row(row, top_k, scale) for row in logits]
            ids = np.array([row[0] for row in rows], np.int32).reshape(-1, top_k)
            weights = np.array([row[1] for row in rows], np.float32).reshape(-1, top_k)
    return Scored(ids, weights, logits, logits)


def _gemma4_row(row: F32, k: int, scale: F32) -> tuple[list[int], list[np.float32]]:
    ids = best_nan_first(list(row), k)
    parts = []
    for expert in ids:
        exponent = np.float32(np.float32(row[expert] - row[ids[0]]) * LOG2_E)
        parts.append(np.float32(np.exp2(np.float64(exponent))))
    total = add(parts)
    return ids, [np.float32(np.float32(part / total) * scale[e]) for part, e in zip(parts, ids, strict=True)]
