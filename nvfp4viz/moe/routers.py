"""The routers of today's mixture-of-experts models, from logits to experts and weights.

Source: `serving-vllm.md` section 9 (vLLM 0.33).  Five ways, and they differ where it matters: what is compared, what is
weighed, and what a NaN does.

========================  =====================  ===========================  ==========================================
router                    compares               weighs                       a NaN logit
========================  =====================  ===========================  ==========================================
``softmax``               softmax (+ bias)       softmax over all experts     experts 0 … k−1, every weight 0
``sigmoid``               sigmoid + bias         sigmoid                      that score counts as 0
``grouped``               sigmoid + bias, in     sigmoid                      that expert is out; too few groups left:
                          the best groups                                     experts 0 … k−1, every weight 1/k
``sqrtsoftplus``          √softplus + bias       the sum, less the bias       that score counts as 0
``hash``                  nothing: a table       √softplus                    that score counts as 0
``gemma4``                the logits             softmax over the chosen      chosen first, every weight NaN
========================  =====================  ===========================  ==========================================

Ties go to the lower id in all of them.  A correction bias holds finite numbers.  Every function has two paths,
``"reference"``, which goes through one token's experts one by one, and ``"numpy"``; their bits are equal.

Exponentials, logarithms and tangents are taken in float64 and rounded, and sums over experts run in f32 by rising id,
or by rank where they run over the chosen: a definition that every machine repeats.  A GPU's ``expf`` and the order in
which a warp adds may differ from it by units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.routing import LOG2_E, Routing, top_k_stable

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Path = Literal["numpy", "reference"]

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
SOFTPLUS_LINEAR = np.float32(20)
"""Above this ``softplus(x)`` is x."""
GROUP_EPSILON = np.float32(1e-20)
NEVER = np.float32(-np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A routing with the numbers behind it.

    Attributes
    ----------
    ids, weights
        As in `Routing`: (T, k), best first.
    scores : (T, E) float32
        What weights are taken from.
    compared : (T, E) float32
        What the choice was made by; −Inf where an expert was out.
    """

    ids: I32
    weights: F32
    scores: F32
    compared: F32

    def routing(self, logits: F32) -> Routing:
        """As the experts take it."""
        return Routing(self.ids, self.weights, logits)


# ------------------------------------------------------------------ one number at a time


def _exp(x: np.float32) -> np.float32:
    return np.float32(np.exp(np.float64(x)))


def sigmoid(x: np.float32) -> np.float32:
    """``1 / (1 + exp(−x))``."""
    return np.float32(ONE / np.float32(ONE + _exp(-x)))


def sigmoid_tanh(x: np.float32) -> np.float32:
    """``0.5·tanh(x/2) + 0.5``: the grouped kernel's sigmoid; its bits are not `sigmoid`'s."""
    tangent = np.float32(np.tanh(np.float64(np.float32(HALF * x))))
    return np.float32(np.float32(HALF * tangent) + HALF)


def sqrt_softplus(x: np.float32) -> np.float32:
    """``√(log(1 + exp x))``, ``√x`` above 20."""
    if x > SOFTPLUS_LINEAR:
        return np.float32(np.sqrt(x))
    return np.float32(np.sqrt(np.float32(np.log(np.float64(np.float32(ONE + _exp(x)))))))


def _best(compared: list[np.float32], k: int) -> list[int]:
    """k times the largest, the first of equals; what was taken is out."""
    left = list(range(len(compared)))
    chosen: list[int] = []
    for _ in range(k):
        at = left[0]
        for expert in left[1:]:
            if compared[expert] > compared[at]:
                at = expert
        chosen.append(at)
        left.remove(at)
    return chosen


def _sum(values: list[np.float32]) -> np.float32:
    total = ZERO
    for value in values:
        total = np.float32(total + value)
    return total


def _renormalised(chosen: list[np.float32], renormalize: bool, scaling: np.float32) -> list[np.float32]:
    factor = scaling
    if renormalize:
        total = _sum(chosen)
        factor = np.float32(scaling / (total if total > 0 else ONE))
    return [np.float32(weight * factor) for weight in chosen]


# ------------------------------------------------------------------ all tokens at once


def _rows(values: F32, one: Callable[[np.float32], np.float32]) -> F32:
    return np.array([[one(value) for value in row] for row in values], np.float32).reshape(values.shape)


def _sigmoid_all(x: F32) -> F32:
    result: F32 = ONE / (ONE + np.exp(-x.astype(np.float64)).astype(np.float32))
    return result


def _sigmoid_tanh_all(x: F32) -> F32:
    result: F32 = HALF * np.tanh((HALF * x).astype(np.float64)).astype(np.float32) + HALF
    return result


def _sqrt_softplus_all(x: F32) -> F32:
    soft = np.log((ONE + np.exp(x.astype(np.float64)).astype(np.float32)).astype(np.float64)).astype(np.float32)
    result: F32 = np.sqrt(np.where(x > SOFTPLUS_LINEAR, x, soft))
    return result


def _sum_rows(values: F32) -> F32:
    """f32 sum along axis 1 by rising index; NumPy's own sum would pair its terms."""
    total = np.zeros(len(values), np.float32)
    for j in range(values.shape[1]):
        total = total + values[:, j]
    return total


def _take(values: F32, ids: I32) -> F32:
    result: F32 = np.take_along_axis(values, ids.astype(np.int64), axis=1)
    return result


def _scaled(chosen: F32, renormalize: bool, scaling: np.float32) -> F32:
    if not renormalize:
        return chosen * scaling
    total = _sum_rows(chosen)
    factor = scaling / np.where(total > 0, total, ONE)
    result: F32 = chosen * factor[:, None]
    return result


def _bias(bias: Array | None, experts: int) -> F32:
    extra = np.zeros(experts, np.float32) if bias is None else np.asarray(bias, np.float32)
    assert np.isfinite(extra).all(), "a correction bias is finite"
    return extra


# ------------------------------------------------------------------ the routers


def route_softmax(
    logits: F32,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    bias: Array | None = None,
    path: Path = "numpy",
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
    extra = _bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        if path == "reference":
            scores = np.array([_softmax_row(row) for row in logits], np.float32).reshape(logits.shape)
            return _scalar(scores, scores + extra, top_k, renormalize, scaling)
        top = np.fmax.reduce(logits, axis=1, keepdims=True)
        parts = np.exp((logits - top).astype(np.float64)).astype(np.float32)
        scores = parts * (ONE / _sum_rows(parts))[:, None]
        scores = np.where(np.isfinite(scores), scores, ZERO)
        return _vector(scores, scores + extra, top_k, renormalize, scaling)


def _softmax_row(row: F32) -> list[np.float32]:
    top = np.float32(-np.inf)
    for value in row:
        top = value if value > top else top
    parts = [_exp(np.float32(value - top)) for value in row]
    inverse = np.float32(ONE / _sum(parts))
    scores = [np.float32(part * inverse) for part in parts]
    return [score if np.isfinite(score) else ZERO for score in scores]


def route_sigmoid(
    logits: F32,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    path: Path = "numpy",
) -> Scored:
    """Each expert for itself: the k largest ``sigmoid(l) + bias``, weighed by the sigmoid without bias.

    A NaN's score counts as 0, like everything that is not finite.

    >>> route_sigmoid(np.float32([[0, 0, 0]]), 1, bias=np.float32([0, 0.1, 0])).ids.tolist()
    [[1]]
    """
    extra = _bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        scores = _rows(logits, sigmoid) if path == "reference" else _sigmoid_all(logits)
        scores = np.where(np.isfinite(scores), scores, ZERO)
        choose = _scalar if path == "reference" else _vector
        return choose(scores, scores + extra, top_k, renormalize, scaling)


def route_sqrt_softplus(
    logits: F32,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    recover: bool = True,
    path: Path = "numpy",
) -> Scored:
    """DeepSeek V4: the k largest ``√softplus(l) + bias``.

    Parameters
    ----------
    recover
        As vLLM's general CUDA kernel: the weight is ``(score + bias) − bias``, which rounds twice.  False reads the
        score itself, as its Triton kernel for 256 or 384 experts does.

    >>> routed = route_sqrt_softplus(np.float32([[3, 25, np.nan]]), 2)
    >>> routed.ids.tolist(), routed.scores.tolist()
    ([[1, 0]], [[1.7460204362869263, 5.0, 0.0]])
    """
    extra = _bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        scores = _softplus_scores(logits, path)
        compared = scores + extra
        weighed = compared - extra if recover else scores
        choose = _scalar if path == "reference" else _vector
        return choose(weighed, compared, top_k, renormalize, scaling)


def route_hash(
    logits: F32,
    token_ids: Array,
    table: Array,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    path: Path = "numpy",
) -> Scored:
    """Hash MoE (DeepSeek V4's first layers): a table says which experts a token id goes to, whatever its logits.

    The weights still come from the logits: ``√softplus``, renormalised.

    Parameters
    ----------
    token_ids : (T,) integers
    table : (vocabulary, k) integers
        ``tid2eid``.
    """
    ids = np.asarray(table)[np.asarray(token_ids)].astype(np.int32)
    factor = np.float32(scaling)
    with np.errstate(all="ignore"):
        scores = _softplus_scores(logits, path)
        if path == "reference":
            rows = zip(scores, ids, strict=True)
            weights = [_renormalised([row[e] for e in chosen], renormalize, factor) for row, chosen in rows]
            made = np.array(weights, np.float32).reshape(ids.shape)
        else:
            made = _scaled(_take(scores, ids), renormalize, factor)
    return Scored(ids, made, scores, np.full(scores.shape, np.nan, np.float32))


def _softplus_scores(logits: F32, path: Path) -> F32:
    scores = _rows(logits, sqrt_softplus) if path == "reference" else _sqrt_softplus_all(logits)
    return np.where(np.isnan(scores), ZERO, scores)


def route_grouped(
    logits: F32,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    path: Path = "numpy",
) -> Scored:
    """DeepSeek V3: the best groups first, then the k largest of their experts.

    A group counts as much as its two largest ``sigmoid + bias`` together, as its largest alone where there is no bias.
    An expert whose number is not finite is out; if a group of the best `top_groups` is, the token falls back to experts
    0 … k−1 with weight 1/k.  Renormalised weights are multiplied by ``scaling / (Σ + 1e-20)``.  The sigmoid is the
    fused kernel's, ``0.5·tanh(x/2) + 0.5``; vLLM takes that kernel on CUDA for up to 32 groups and k up to 32 where
    there is a bias, and elsewhere torch's operations, which divide without the epsilon and are not modelled.

    >>> routed = route_grouped(np.float32([[2, 0, 1, 1.5]]), 2, groups=2, top_groups=1, bias=np.zeros(4))
    >>> routed.ids.tolist(), routed.compared.tolist()
    ([[3, 2]], [[-inf, -inf, 0.7310585975646973, 0.8175745010375977]])
    """
    experts = logits.shape[1]
    assert experts % groups == 0, "groups must be of equal size"
    assert top_groups * (experts // groups) >= top_k, "the kept groups have fewer than k experts"
    assert bias is None or experts > groups, "with a bias a group counts as its two largest: it needs two experts"
    extra, factor = _bias(bias, experts), np.float32(scaling)
    best_of = 1 if bias is None else 2
    with np.errstate(all="ignore"):
        scores = _rows(logits, sigmoid_tanh) if path == "reference" else _sigmoid_tanh_all(logits)
        compared = scores + extra
        compared = np.where(np.isfinite(compared), compared, NEVER)
        if path == "reference":
            rows = [
                _grouped_row(row, list(score), top_k, groups, top_groups, best_of, renormalize, factor)
                for row, score in zip(compared, scores, strict=True)
            ]
            ids = np.array([row[0] for row in rows], np.int32).reshape(-1, top_k)
            weights = np.array([row[1] for row in rows], np.float32).reshape(-1, top_k)
            kept = np.array([row[2] for row in rows], np.float32).reshape(logits.shape)
            return Scored(ids, weights, scores, kept)
        parted = compared.reshape(len(logits), groups, -1)
        largest = -np.sort(-parted, axis=2)[:, :, :best_of]
        worth = largest[:, :, 0] if best_of == 1 else largest[:, :, 0] + largest[:, :, 1]
        best = top_k_stable(worth, top_groups)
        inside = np.zeros(worth.shape, bool)
        np.put_along_axis(inside, best.astype(np.int64), True, axis=1)
        kept = np.where(inside[:, :, None], parted, NEVER).reshape(logits.shape)
        # Experts outside come after those inside that are out themselves: the queue never saw them.
        key = np.where(np.repeat(inside, experts // groups, axis=1), np.float32(0), NEVER)
        ids = _two_keys(kept, key, top_k)
        chosen = _take(scores, ids)
        weights = chosen * ((factor / (_sum_rows(chosen) + GROUP_EPSILON))[:, None] if renormalize else factor)
        lost = ~np.isfinite(_take(worth, best[:, -1:]))
        ids = np.where(lost, np.arange(top_k, dtype=np.int32), ids)
        return Scored(ids, np.where(lost, ONE / np.float32(top_k), weights), scores, kept)


def _two_keys(first: F32, second: F32, k: int) -> I32:
    order = np.lexsort((-second, -first), axis=-1)
    return order[:, :k].astype(np.int32)


def _grouped_row(
    compared: F32,
    scores: list[np.float32],
    top_k: int,
    groups: int,
    top_groups: int,
    best_of: int,
    renormalize: bool,
    scaling: np.float32,
) -> tuple[list[int], list[np.float32], list[np.float32]]:
    size = len(compared) // groups
    worth = []
    for group in range(groups):
        members = list(compared[group * size : (group + 1) * size])
        two = [members[at] for at in _best(members, best_of)]
        worth.append(two[0] if best_of == 1 else np.float32(two[0] + two[1]))
    best = _best(worth, top_groups)
    candidates = [e for e in range(len(compared)) if e // size in best]
    kept = [compared[e] if e in candidates else NEVER for e in range(len(compared))]
    if not np.isfinite(worth[best[-1]]):
        return list(range(top_k)), [np.float32(ONE / np.float32(top_k))] * top_k, kept
    ids = [candidates[at] for at in _best([compared[e] for e in candidates], top_k)]
    chosen = [scores[e] for e in ids]
    factor = np.float32(scaling / np.float32(_sum(chosen) + GROUP_EPSILON)) if renormalize else scaling
    return ids, [np.float32(weight * factor) for weight in chosen], kept


def route_gemma4_logits(
    logits: F32, top_k: int, per_expert_scale: Array | None = None, *, path: Path = "numpy"
) -> Scored:
    """The second half of `nvfp4viz.moe.route_gemma4`, from the logits on: a stable sort, then a softmax of the chosen.

    ``exp2((l − max)·log2 e) / Σ`` over the k chosen, times the expert's own scale.  A NaN sorts first and stays.

    >>> route_gemma4_logits(np.float32([[1, np.nan, 3]]), 2).ids.tolist()
    [[1, 2]]
    """
    scale = np.ones(logits.shape[1], np.float32) if per_expert_scale is None else per_expert_scale.astype(np.float32)
    with np.errstate(all="ignore"):
        if path == "numpy":
            ids = top_k_stable(logits, top_k)
            chosen = _take(logits, ids)
            parts = np.exp2(((chosen - chosen[:, :1]) * LOG2_E).astype(np.float64)).astype(np.float32)
            weights = parts / _sum_rows(parts)[:, None] * scale[ids]
        else:
            rows = [_gemma4_row(row, top_k, scale) for row in logits]
            ids = np.array([row[0] for row in rows], np.int32).reshape(-1, top_k)
            weights = np.array([row[1] for row in rows], np.float32).reshape(-1, top_k)
    return Scored(ids, weights, logits, logits)


def _gemma4_row(row: F32, k: int, scale: F32) -> tuple[list[int], list[np.float32]]:
    nan = [e for e in range(len(row)) if np.isnan(row[e])]
    numbers = [e for e in range(len(row)) if not np.isnan(row[e])]
    ordered = [numbers[at] for at in _best([row[e] for e in numbers], min(k, len(numbers)))]
    ids = (nan + ordered)[:k]
    parts = []
    for expert in ids:
        exponent = np.float32(np.float32(row[expert] - row[ids[0]]) * LOG2_E)
        parts.append(np.float32(np.exp2(np.float64(exponent))))
    total = _sum(parts)
    return ids, [np.float32(np.float32(part / total) * scale[e]) for part, e in zip(parts, ids, strict=True)]


# ------------------------------------------------------------------ choosing


def _scalar(scores: F32, compared: F32, k: int, renormalize: bool, scaling: float) -> Scored:
    ids, weights = [], []
    for row, by in zip(scores, compared, strict=True):
        chosen = _best(list(by), k)
        ids.append(chosen)
        weights.append(_renormalised([row[e] for e in chosen], renormalize, np.float32(scaling)))
    return Scored(
        np.array(ids, np.int32).reshape(-1, k), np.array(weights, np.float32).reshape(-1, k), scores, compared
    )


def _vector(scores: F32, compared: F32, k: int, renormalize: bool, scaling: float) -> Scored:
    ids = top_k_stable(compared, k)
    return Scored(ids, _scaled(_take(scores, ids), renormalize, np.float32(scaling)), scores, compared)
