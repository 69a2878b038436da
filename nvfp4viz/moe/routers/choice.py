"""What all routers share: choosing the k best of a row, and making their weights.

The first half takes one token's numbers one by one, the second all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.moe.routing import Routing, top_k_stable

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

ZERO, ONE = np.float32(0), np.float32(1)
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
        What the choice was made by; −Inf where an expert was out, NaN where nothing was compared.
    """

    ids: I32
    weights: F32
    scores: F32
    compared: F32

    def routing(self, logits: F32) -> Routing:
        """As the experts take it."""
        return Routing(self.ids, self.weights, logits)


# ------------------------------------------------------------------ one number at a time


def exp(x: np.float32) -> np.float32:
    """The exponential in float64, rounded."""
    return np.float32(np.exp(np.float64(x)))


def best(compared: Sequence[np.float32], k: int) -> list[int]:
    """k times the largest, the first of equals; what was taken is out.

    >>> best([np.float32(v) for v in (1, 3, 3, 2)], 3)
    [1, 2, 3]
    """
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


def best_nan_first(compared: Sequence[np.float32], k: int) -> list[int]:
    """As torch sorts: NaN counts as the largest.

    >>> best_nan_first([np.float32(v) for v in (1, np.nan, 3)], 2)
    [1, 2]
    """
    nan = [e for e, value in enumerate(compared) if np.isnan(value)]
    numbers = [e for e, value in enumerate(compared) if not np.isnan(value)]
    ordered = best([compared[e] for e in numbers], min(k, len(numbers)))
    return (nan + [numbers[at] for at in ordered])[:k]


def add(values: Sequence[np.float32]) -> np.float32:
    """The f32 sum, first to last."""
    total = ZERO
    for value in values:
        total = np.float32(total + value)
    return total


def renormalised(chosen: Sequence[np.float32], renormalize: bool, scaling: np.float32) -> list[np.float32]:
    """Each weight times ``scaling / Σ``, times ``scaling`` where that sum is not positive."""
    factor = scaling
    if renormalize:
        total = add(chosen)
        factor = np.float32(scaling / (total if total > 0 else ONE))
    return [np.float32(weight * factor) for weight in chosen]


def each(values: F32, one: Callable[[np.float32], np.float32]) -> F32:
    """A function of one number, of all numbers of a matrix in turn."""
    return np.array([[one(value) for value in row] for row in values], np.float32).reshape(values.shape)


def choose_by_reference(scores: F32, compared: F32, k: int, renormalize: bool, scaling: float) -> Scored:
    """The k best of every row by ``compared``, weighed by ``scores``."""
    ids = np.zeros((len(scores), k), np.int32)
    weights = np.zeros((len(scores), k), np.float32)
    for token, (row, by) in enumerate(zip(scores, compared, strict=True)):
        ids[token] = best(list(by), k)
        weights[token] = renormalised([row[e] for e in ids[token]], renormalize, np.float32(scaling))
    return Scored(ids, weights, scores, compared)


# ------------------------------------------------------------------ all tokens at once


def add_rows(values: F32) -> F32:
    """f32 sum along axis 1 by rising index; NumPy's own sum would pair its terms."""
    total = np.zeros(len(values), np.float32)
    for j in range(values.shape[1]):
        total = total + values[:, j]
    return total


def take(values: F32, ids: I32) -> F32:
    """``values (…, E)`` at ``ids (…, k)``."""
    result: F32 = np.take_along_axis(values, ids.astype(np.int64), axis=-1)
    return result


def renormalised_rows(chosen: F32, renormalize: bool, scaling: np.float32) -> F32:
    """`renormalised` of every row of ``(T, k)``."""
    if not renormalize:
        return chosen * scaling
    total = add_rows(chosen)
    factor = scaling / np.where(total > 0, total, ONE)
    result: F32 = chosen * factor[:, None]
    return result


def choose_at_once(scores: F32, compared: F32, k: int, renormalize: bool, scaling: float) -> Scored:
    """`choose_by_reference`, all rows together."""
    ids = top_k_stable(compared, k)
    return Scored(ids, renormalised_rows(take(scores, ids), renormalize, np.float32(scaling)), scores, compared)


def choose(path: NumpyPath, scores: F32, compared: F32, k: int, renormalize: bool, scaling: float) -> Scored:
    """The k best by ``compared`` (no NaN among them), on either path."""
    way = choose_by_reference if by_reference(path) else choose_at_once
    return way(scores, compared, k, renormalize, scaling)


# ------------------------------------------------------------------ what a caller gave


def check_logits(logits: object, top_k: object) -> None:
    """Refuse what is no (T, E) float32, and a k that those experts cannot serve; every router asks first.

    Raises
    ------
    InputError
        ``router.logits``: another type, dtype or number of axes; ``router.top``: k is no whole number from 1 to E.
    """
    if not isinstance(logits, np.ndarray):
        raise InputError("router.logits", given=type(logits).__name__)
    if logits.dtype != np.float32 or logits.ndim != 2:
        raise InputError("router.logits", given=f"{logits.dtype}, {logits.shape}")
    whole = isinstance(top_k, int | np.integer) and not isinstance(top_k, bool)
    if not whole or not 1 <= int(top_k) <= logits.shape[1]:  # type: ignore[call-overload]
        raise InputError("router.top", top=repr(top_k)[:40], experts=logits.shape[1])


def check_kernel(kernel: str, among: tuple[str, ...]) -> None:
    """Refuse a name that is no kernel: taken for one of two, it would mix their rules.

    Raises
    ------
    InputError
        ``router.kernel``.
    """
    if kernel not in among:
        raise InputError("router.kernel", kernel=repr(kernel)[:40], kernels=", ".join(among))


def per_expert(name: str, values: Array | None, experts: int, absent: np.float32) -> F32:
    """One f32 for each expert, ``absent`` where there are none.

    Raises
    ------
    InputError
        ``router.per-expert``: another shape; one number would be broadcast to all.
    """
    if values is None:
        return np.full(experts, absent)
    given = np.asarray(values).astype(np.float32)
    if given.shape != (experts,):
        raise InputError("router.per-expert", name=name, shape=given.shape, experts=experts)
    return given


def finite_bias(bias: Array | None, experts: int) -> F32:
    """A correction bias (E,) float32, zeros where there is none.

    Raises
    ------
    InputError
        ``router.bias``: one of its numbers is not finite; ``router.per-expert``.
    """
    extra = per_expert("bias", bias, experts, ZERO)
    for expert in np.flatnonzero(~np.isfinite(extra)).tolist():
        raise InputError("router.bias", expert=expert, value=extra[expert])
    return extra
