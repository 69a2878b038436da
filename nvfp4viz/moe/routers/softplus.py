"""DeepSeek V4's routers: the k largest ``√softplus + bias``, or a table that knows the experts of a token id.

In a model that sees, the places of an image carry five ids of their own, one after the other from
``image_sentinel_lo`` on.  No table says anything about them: they are routed by their scores and a bias for images.
That there are five, and from where, was read in vLLM's ``csrc/moe/topk_softplus_sqrt_kernels.cu`` at 0f5257e24511,
newer than the 0.33.0 of the rest.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.moe.routers.choice import (
    F32,
    I32,
    ONE,
    ZERO,
    Array,
    Scored,
    check_kernel,
    check_logits,
    choose,
    each,
    exp,
    finite_bias,
    renormalised,
    renormalised_rows,
    take,
)

Kernel = Literal["general", "triton"]
SOFTPLUS_LINEAR = np.float32(20)
"""Above this ``softplus(x)`` is x."""
NAN_COMPARES_AS = np.float32(-1e30)
"""In the Triton kernel: less than any score, more than what was chosen already."""
IMAGE_SENTINELS = 5
"""Token ids that stand for an image's places, from ``image_sentinel_lo`` on."""


def sqrt_softplus(x: np.float32) -> np.float32:
    """``√(log(1 + exp x))``, ``√x`` above 20."""
    if x > SOFTPLUS_LINEAR:
        return np.float32(np.sqrt(x))
    return np.float32(np.sqrt(np.float32(np.log(np.float64(np.float32(ONE + exp(x)))))))


def _sqrt_softplus_all(x: F32) -> F32:
    soft = np.log((ONE + np.exp(x.astype(np.float64)).astype(np.float32)).astype(np.float64)).astype(np.float32)
    result: F32 = np.sqrt(np.where(x > SOFTPLUS_LINEAR, x, soft))
    return result


def _scores(logits: F32, path: NumpyPath) -> F32:
    return each(logits, sqrt_softplus) if by_reference(path) else _sqrt_softplus_all(logits)


def route_sqrt_softplus(
    logits: F32,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    kernel: Kernel = "general",
    path: NumpyPath = "numpy",
) -> Scored:
    """DeepSeek V4: the k largest ``√softplus(l) + bias``.

    Parameters
    ----------
    kernel
        ``"general"``: vLLM's CUDA kernel.  A NaN score counts as 0; the weight is ``(score + bias) − bias``, which
        rounds twice.  ``"triton"``: the one it takes for 256 or 384 experts, k = 6, f32 logits, a bias and
        renormalised weights.  The weight is the score itself; a NaN is compared as −1e30, so it is chosen only where
        numbers run out, and then its weight is NaN and the others are not divided by the sum.

    Raises
    ------
    InputError
        ``router.kernel``, and those that all routers share.

    >>> routed = route_sqrt_softplus(np.float32([[3, 25, np.nan]]), 2)
    >>> routed.ids.tolist(), routed.scores.tolist()
    ([[1, 0]], [[1.7460204362869263, 5.0, 0.0]])
    >>> route_sqrt_softplus(np.float32([[3, np.nan, np.nan]]), 2, kernel="triton").weights.tolist()
    [[1.7460204362869263, nan]]
    """
    check_logits(logits, top_k)
    check_kernel(kernel, get_args(Kernel))
    extra = finite_bias(bias, logits.shape[1])
    with np.errstate(all="ignore"):
        scores = _scores(logits, path)
        if kernel == "triton":
            compared = scores + extra
            compared = np.where(np.isnan(compared), NAN_COMPARES_AS, compared)
            return choose(path, scores, compared, top_k, renormalize, scaling)
        scores = np.where(np.isnan(scores), ZERO, scores)
        compared = scores + extra
        return choose(path, compared - extra, compared, top_k, renormalize, scaling)


def is_image(token_ids: Array, image_sentinel_lo: int) -> npt.NDArray[np.bool_]:
    """Which token ids stand for places of an image; 0 as the first sentinel says that there are none.

    >>> is_image(np.array([6, 7, 11, 12]), 7).tolist(), is_image(np.array([0, 1]), 0).tolist()
    ([False, True, True, False], [False, False])
    """
    ids = np.asarray(token_ids)
    return (image_sentinel_lo > 0) & (ids >= image_sentinel_lo) & (ids < image_sentinel_lo + IMAGE_SENTINELS)


def route_hash(
    logits: F32,
    token_ids: Array,
    table: Array,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    bias_vl: Array | None = None,
    image_sentinel_lo: int = 0,
    path: NumpyPath = "numpy",
) -> Scored:
    """Hash MoE (DeepSeek V4's first layers): a table says which experts a token id goes to, whatever its logits.

    The weights still come from the logits: ``√softplus``, renormalised.  A place of an image goes to the k largest
    ``√softplus(l) + bias_vl`` instead, as `route_sqrt_softplus` does it.  (vLLM's own kernel for 256 or 384 experts and
    k = 6 weighs such a place by the score itself; the general one, which is meant here, by ``(score + bias) − bias``.)

    Parameters
    ----------
    token_ids : (T,) integers
    table : (vocabulary, k) integers
        ``tid2eid``.
    bias_vl : (E,) float32, optional
        The bias of images; without it all ids ask the table.
    image_sentinel_lo
        First of the five ids of an image's places; 0 if there are none.

    Raises
    ------
    InputError
        ``router.table``: no rows of whole numbers; ``router.token-ids``: not one whole number for every row of logits;
        ``router.token``: an id that has no row and is no image's place; ``router.table-expert``: its row names an
        expert that there is not; and those that all routers share.

    >>> x, table = np.float32([[0, 1, 2]] * 2), np.array([[0], [0], [1]])
    >>> route_hash(x, [1, 2], table, bias_vl=np.zeros(3), image_sentinel_lo=2).ids.tolist()
    [[0], [2]]
    """
    tokens, table = np.asarray(token_ids), np.asarray(table)
    if table.ndim != 2 or table.dtype.kind not in "iu" or not len(table):
        raise InputError("router.table", given=f"{table.dtype}, {table.shape}")
    check_logits(logits, table.shape[1])
    image = is_image(tokens, 0 if bias_vl is None else image_sentinel_lo)
    ids = _looked_up(tokens, table, image, logits)
    factor = np.float32(scaling)
    with np.errstate(all="ignore"):
        scores = _scores(logits, path)
        scores = np.where(np.isnan(scores), ZERO, scores)
        compared = np.full(scores.shape, np.nan, np.float32)
        if by_reference(path):
            weights = np.zeros(ids.shape, np.float32)
            for token, chosen in enumerate(ids):
                weights[token] = renormalised([scores[token, e] for e in chosen], renormalize, factor)
        else:
            weights = renormalised_rows(take(scores, ids), renormalize, factor)
    if image.any():
        options: dict[str, Any] = {"renormalize": renormalize, "scaling": scaling, "path": path}
        seen = route_sqrt_softplus(logits[image], table.shape[1], bias=bias_vl, **options)
        ids[image], weights[image], compared[image] = seen.ids, seen.weights, seen.compared
    return Scored(ids, weights, scores, compared)


def _looked_up(tokens: Array, table: Array, image: Array, logits: F32) -> I32:
    """The table's rows (T, k), zeros for the places of an image."""
    if tokens.shape != (len(logits),) or (tokens.size and tokens.dtype.kind not in "iu"):
        raise InputError("router.token-ids", given=f"{tokens.dtype}, {tokens.shape}", tokens=len(logits))
    # NumPy would take an id below 0 from the table's end.
    for token in tokens[~image & ((tokens < 0) | (tokens >= len(table)))].tolist():
        raise InputError("router.token", token=token, last=len(table) - 1)
    rows = np.where(image, 0, tokens).astype(np.int64)
    ids, experts = table[rows], logits.shape[1]
    for at, place in np.argwhere(((ids < 0) | (ids >= experts)) & ~image[:, None]).tolist():
        raise InputError("router.table-expert", token=rows[at], expert=ids[at, place], last=experts - 1)
    looked_up: I32 = np.where(image[:, None], 0, ids).astype(np.int32)
    return looked_up
