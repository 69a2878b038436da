"""How routed tokens travel through a grouped GEMM and back: the bookkeeping of the vLLM CUTLASS path.

A mixture-of-experts layer multiplies every token with the matrices of its own few experts.  A grouped GEMM wants the
rows of one expert side by side, so a dispatcher counts the rows, gives each expert a range, and writes two maps:
``a_map`` says which token a permuted row copies, ``c_map`` where a route's result will lie.  Source:
`serving-vllm.md` section 6, steps 1 to 3 and 8 (``get_cutlass_moe_mm_data``, ``shuffle_rows``).

The kernel fills the maps with atomics, so the order of rows *inside* an expert changes from run to run there.  A row's
values do not depend on its place; here the order is by token, then by rank among the token's experts.

The functions that end in ``_reference`` go route by route and number by number; equal bits (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_bits_scalar, widen_bf16_scalar

SCALE_ROW_TILE = 128
"""Block scales are stored in tiles of 128 rows, so each expert's scale rows start at a multiple of this."""

CANONICAL_BF16_NAN = 0x7FFF

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where each route goes and comes back from.

    With T tokens, k experts a token and E local experts:

    Attributes
    ----------
    ids : (T, k) int32
        Chosen experts as the router numbers them.
    local_ids : (T, k) int32
        The same after the expert map of this rank; −1 for an expert that lives elsewhere.
    counts : (E,) int32
        Rows of each expert.
    problem_sizes1, problem_sizes2 : (E, 3) int32
        ``(M, N, K)`` of each expert's two GEMMs.
    expert_offsets : (E+1,) int32
        First row of each expert in the permuted order.
    blockscale_offsets : (E+1,) int32
        First row of each expert's block scales, in padded rows.
    a_map : (T*k,) int32
        Token of each permuted row; −1 behind the last valid row.
    c_map : (T*k,) int32
        Permuted row of each route, in the order of `ids`; T*k for a route that is not local.
    row_expert : (R,) int32
        Expert of each valid permuted row, R = ``expert_offsets[-1]``.
    """

    ids: I32
    local_ids: I32
    counts: I32
    problem_sizes1: I32
    problem_sizes2: I32
    expert_offsets: I32
    blockscale_offsets: I32
    a_map: I32
    c_map: I32
    row_expert: I32

    @property
    def rows(self) -> int:
        """Valid permuted rows."""
        return int(self.expert_offsets[-1])


def plan_dispatch(ids: Array, experts: int, *, n1: int, n: int, k: int, expert_map: Array | None = None) -> Dispatch:
    """Count, offset and order the routes of one layer.

    Parameters
    ----------
    ids : (T, top_k) integers
        Chosen experts; with `expert_map` global ids, else local ones.
    experts
        Local experts E.
    n1, n, k
        Columns of the first GEMM (2·I when gated), intermediate size I, hidden size H.
    expert_map : (E_global,) integers, optional
        Local id of each global expert, −1 where it lives on another rank.

    >>> plan = plan_dispatch(np.array([[2, 0], [2, 1]]), 3, n1=8, n=4, k=16)
    >>> plan.a_map.tolist(), plan.c_map.tolist(), plan.expert_offsets.tolist(), plan.blockscale_offsets.tolist()
    ([0, 1, 0, 1], [2, 0, 3, 1], [0, 1, 2, 4], [0, 128, 256, 384])
    """
    ids = np.ascontiguousarray(ids, np.int32)
    local = ids if expert_map is None else np.asarray(expert_map, np.int32)[ids]
    flat = local.ravel()
    top_k = ids.shape[1] if ids.ndim == 2 else 1
    assert flat.size == 0 or int(flat.max()) < experts, "the router chose an expert that does not exist"
    valid = flat >= 0
    counts = np.bincount(flat[valid], minlength=experts).astype(np.int32)

    # A stable sort keeps routes of one expert in order of token; non-local routes sort behind all others.
    order = np.argsort(np.where(valid, flat, experts), kind="stable")
    rows = int(counts.sum())
    a_map = np.full(flat.size, -1, np.int32)
    a_map[:rows] = order[:rows] // top_k
    c_map = np.full(flat.size, flat.size, np.int32)
    c_map[order[:rows]] = np.arange(rows, dtype=np.int32)

    padded = -(-counts // SCALE_ROW_TILE) * SCALE_ROW_TILE
    ones = np.ones(experts, np.int32)
    return Dispatch(
        ids=ids,
        local_ids=local,
        counts=counts,
        problem_sizes1=np.stack([counts, n1 * ones, k * ones], axis=1),
        problem_sizes2=np.stack([counts, k * ones, n * ones], axis=1),
        expert_offsets=_prefix_sum(counts),
        blockscale_offsets=_prefix_sum(padded),
        a_map=a_map,
        c_map=c_map,
        row_expert=flat[order[:rows]],
    )


def _prefix_sum(counts: I32) -> I32:
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def shuffle_rows(x: Array, row_map: Array) -> Array:
    """``x[row_map]``, with a zero row where the map points outside.

    >>> shuffle_rows(np.array([[1.0], [2.0]]), np.array([1, -1, 0, 2])).ravel().tolist()
    [2.0, 0.0, 1.0, 0.0]
    """
    inside = (row_map >= 0) & (row_map < len(x))
    if inside.all():
        return x[row_map]
    out = np.zeros((len(row_map), *x.shape[1:]), x.dtype)
    out[inside] = x[row_map[inside]]
    return out


def round_bf16(x: Array) -> Array:
    """f32 to BF16 as CUDA's conversion does: round to nearest even, every NaN becomes ``0x7FFF``."""
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = x.astype(ml_dtypes.bfloat16)
    nan = np.isnan(x)
    if nan.any():
        rounded.view(np.uint16)[nan] = CANONICAL_BF16_NAN
    return rounded


def combine_routes(routes: Array, weights: Array) -> Array:
    """Weighted sum of each token's expert outputs, rounded where vLLM rounds.

    Routing weights are cast to BF16 first, each product is rounded to BF16, the sum over the token's experts runs in
    f32 (here in the order of the routes) and is rounded to BF16 once.

    Parameters
    ----------
    routes : (T, k, H) bfloat16
    weights : (T, k) float32

    Returns
    -------
    (T, H) bfloat16
    """
    w = round_bf16(np.asarray(weights, np.float32)).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        products = round_bf16(routes.astype(np.float32) * w[:, :, None])
    return sum_routes(products)


def sum_routes(products: Array) -> Array:
    """f32 sum over axis 1 in index order, one rounding to BF16: ``(T, k, H)`` to ``(T, H)``."""
    total = np.zeros((products.shape[0], products.shape[2]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for j in range(products.shape[1]):
            total = total + products[:, j].astype(np.float32)
    return round_bf16(total)


def nan_rows(x: Array) -> npt.NDArray[np.bool_]:
    """Which rows of a BF16 matrix hold a NaN."""
    return np.asarray(((x.view(np.uint16) & 0x7FFF) > 0x7F80).any(axis=1))


# ------------------------------------------------------------------ one route at a time


def plan_dispatch_reference(
    ids: Array, experts: int, *, n1: int, n: int, k: int, expert_map: Array | None = None
) -> Dispatch:
    """`plan_dispatch`: every expert gathers its routes in a list, and the lists lie one behind the other."""
    tokens, top_k = ids.shape
    local = [[int(e) if expert_map is None else int(expert_map[e]) for e in row] for row in ids]
    routes_of: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for token, row in enumerate(local):
        for rank, expert in enumerate(row):
            if expert >= 0:
                routes_of[expert].append((token, rank))
    a_map, c_map = [-1] * (tokens * top_k), [tokens * top_k] * (tokens * top_k)
    expert_offsets, blockscale_offsets, row_expert = [0], [0], []
    for expert, routes in enumerate(routes_of):
        for token, rank in routes:
            a_map[len(row_expert)] = token
            c_map[token * top_k + rank] = len(row_expert)
            row_expert.append(expert)
        expert_offsets.append(len(row_expert))
        tiles = (len(routes) + SCALE_ROW_TILE - 1) // SCALE_ROW_TILE
        blockscale_offsets.append(blockscale_offsets[-1] + tiles * SCALE_ROW_TILE)
    counts = [len(routes) for routes in routes_of]

    def i32(values: list[Any], *shape: int) -> I32:
        return np.array(values, np.int32).reshape(shape or (len(values),))

    return Dispatch(
        ids=i32(ids.tolist(), tokens, top_k),
        local_ids=i32(local, tokens, top_k),
        counts=i32(counts),
        problem_sizes1=i32([(m, n1, k) for m in counts], experts, 3),
        problem_sizes2=i32([(m, k, n) for m in counts], experts, 3),
        expert_offsets=i32(expert_offsets),
        blockscale_offsets=i32(blockscale_offsets),
        a_map=i32(a_map),
        c_map=i32(c_map),
        row_expert=i32(row_expert),
    )


def shuffle_rows_reference(x: Array, row_map: Array) -> Array:
    """`shuffle_rows`, row by row."""
    out = np.zeros((len(row_map), *x.shape[1:]), x.dtype)
    for row, source in enumerate(row_map.tolist()):
        if 0 <= source < len(x):
            out[row] = x[source]
    return out


def round_bf16_scalar(x: np.float32) -> int:
    """`round_bf16` of one number, as bits.

    >>> [hex(round_bf16_scalar(np.float32(x))) for x in (1.00390625, -np.nan)]
    ['0x3f80', '0x7fff']
    """
    return CANONICAL_BF16_NAN if np.isnan(x) else bf16_bits_scalar(float(x))


def sum_routes_scalar(products: list[int]) -> int:
    """`sum_routes` of one output, from bits to bits."""
    total = np.float32(0)
    for bits in products:
        total = np.float32(total + widen_bf16_scalar(bits))
    return round_bf16_scalar(total)


def weighed_scalar(route: int, weight: np.float32) -> int:
    """A route's output times its routing weight: the weight rounded to BF16, and the product again; bits to bits."""
    w = widen_bf16_scalar(round_bf16_scalar(weight))
    return round_bf16_scalar(np.float32(widen_bf16_scalar(route) * w))


def combine_routes_reference(routes: Array, weights: Array) -> Array:
    """`combine_routes`, output by output."""
    bits, w = routes.view(np.uint16), np.asarray(weights, np.float32)
    out = np.zeros((routes.shape[0], routes.shape[2]), np.uint16)
    with np.errstate(all="ignore"):
        for token, h in np.ndindex(out.shape):
            products = [weighed_scalar(int(bits[token, j, h]), w[token, j]) for j in range(routes.shape[1])]
            out[token, h] = sum_routes_scalar(products)
    return out.view(ml_dtypes.bfloat16)
