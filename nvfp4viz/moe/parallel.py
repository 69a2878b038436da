"""Expert parallelism: which rank holds which expert, what the all-to-all carries, and how uneven the ranks' work is.

Every rank owns a share of the batch and a share of the experts.  Before the experts, a **dispatch** carries each token
to the ranks of its experts; after them, a **combine** carries the results home.  What a router calls expert 17 is a
*logical* expert; where its weights lie is a *physical slot*, and EPLB (`nvfp4viz.moe.eplb`) may give a logical expert
several slots.  Sources: `serving-vllm.md` section 9 for the placement after EPLB and the choice of a replica;
``expert_placement_strategy`` of vLLM (``linear``, ``round_robin``).

==========  ==========================================================  ==============================================
way         dispatch                                                    combine
==========  ==========================================================  ==============================================
``routes``  a copy for each of the token's k experts                    every expert's row; summed at home
``tokens``  one copy for each rank that holds some of them              one partial sum a rank; summed again at home
``gather``  every token to every rank (all-gather)                      one partial sum a rank (reduce-scatter)
==========  ==========================================================  ==============================================

Only ``routes`` keeps the bits of one process: the home rank adds the k rows in the order of the token's own experts, as
`combine_routes` does, whatever rank they came from.  A partial sum is rounded to BF16 on its way (`combine_by_rank`).

The functions that end in ``_reference`` count and add one by one; equal results (tested).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError
from nvfp4viz.moe.dataflow import combine_routes, round_bf16, sum_routes, sum_routes_scalar, weighed_scalar
from nvfp4viz.moe.experts import W4A4Experts

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Way = Literal["routes", "tokens", "gather"]
STRATEGIES = ("linear", "round_robin")
WAYS: tuple[Way, ...] = ("routes", "tokens", "gather")
PAYLOADS = ("bf16", "nvfp4")

KNUTH = 2654435769
"""2^32 over the golden ratio: what vLLM 0.33 multiplies a token's index by before it chooses a replica."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which logical expert lies in each physical slot; a rank holds ``slots / ranks`` neighbouring slots.

    Attributes
    ----------
    slots : (P,) int32
        Logical expert of each slot.
    ranks
        Number of ranks R, a divisor of P.
    experts
        Number of logical experts E.
    """

    slots: I32
    ranks: int
    experts: int

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots) // self.ranks

    @property
    def rank_of(self) -> I32:
        """(P,) int32: the rank of each slot."""
        return (np.arange(len(self.slots)) // self.slots_per_rank).astype(np.int32)

    @property
    def replicas(self) -> I64:
        """(E,) int64: slots of each logical expert."""
        return np.bincount(self.slots, minlength=self.experts)

    def table(self) -> I32:
        """(E, most) int32: slots of each logical expert in ascending order, −1 behind the last."""
        counts = self.replicas
        found = np.full((self.experts, int(counts.max())), -1, np.int32)
        order = np.argsort(self.slots, kind="stable")
        first = np.cumsum(counts) - counts
        owner = self.slots[order]
        found[owner, np.arange(len(order)) - first[owner]] = order
        return found

    def on(self, rank: int) -> I32:
        """Logical experts of one rank, in the order of its slots."""
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def expert_map(self, rank: int) -> I32:
        """(P,) int32: a rank's local id of each slot, −1 where it lies elsewhere, as `plan_dispatch` takes it."""
        local = np.arange(len(self.slots), dtype=np.int32) - np.int32(rank * self.slots_per_rank)
        return np.where((local >= 0) & (local < self.slots_per_rank), local, np.int32(-1))


def place(experts: int, ranks: int, strategy: str = "linear", redundant: int = 0) -> Placement:
    """The placement that a server starts with.

    ``linear`` gives rank 0 the first experts, rank 1 the next; ``round_robin`` deals them out.  Redundant slots hold
    experts 0, 1, … again, behind all others, until EPLB has counted.

    Raises
    ------
    InputError
        ``parallel.uneven``: experts and redundant slots do not divide by the ranks; ``parallel.strategy``.

    >>> place(4, 2).slots.tolist(), place(4, 2, "round_robin").slots.tolist(), place(4, 2, redundant=2).slots.tolist()
    ([0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3, 0, 1])
    """
    if strategy not in STRATEGIES:
        raise InputError("parallel.strategy", name=strategy[:40], known=", ".join(STRATEGIES))
    if ranks < 1 or experts < 1 or redundant < 0 or (experts + redundant) % ranks:
        raise InputError("parallel.uneven", experts=experts, redundant=redundant, ranks=ranks)
    slots = np.arange(experts + redundant, dtype=np.int32)
    if strategy == "round_robin":
        slots = slots.reshape(-1, ranks).T.reshape(-1)
    return Placement(slots % np.int32(experts), ranks, experts)


def replica_of(token: int, count: int) -> int:
    """Which of an expert's `count` replicas a token takes: ``(token · 2654435769 mod 2^32) mod count``.

    >>> [replica_of(token, 2) for token in range(4)], [replica_of(token, 3) for token in range(4)]
    ([0, 1, 0, 1], [0, 0, 2, 2])
    """
    return (token * KNUTH % 2**32) % count


def choose_slots(ids: Array, placement: Placement, first: int = 0) -> I32:
    """Physical slots of routed tokens: ``(T, k)`` logical ids to ``(T, k)`` int32.

    Parameters
    ----------
    ids : (T, k) integers
    first
        Index of the first of these tokens in its rank's batch; a replica is chosen by a token's index alone.
    """
    ids = np.asarray(ids, np.int64)
    hashed = (np.arange(first, first + len(ids), dtype=np.uint64) * np.uint64(KNUTH)) % np.uint64(2**32)
    replica = hashed[:, None] % placement.replicas[ids].astype(np.uint64)
    return placement.table()[ids, replica.astype(np.int64)]


def choose_slots_reference(ids: Array, placement: Placement, first: int = 0) -> I32:
    """`choose_slots`, one route at a time."""
    slots = np.zeros(ids.shape, np.int32)
    for (token, rank), expert in np.ndenumerate(ids):
        mine = [slot for slot, held in enumerate(placement.slots.tolist()) if held == expert]
        slots[token, rank] = mine[replica_of(first + token, len(mine))]
    return slots


def home_ranks(tokens: int, ranks: int) -> I32:
    """(T,) int32: the rank that owns each token; neighbouring tokens share a rank, sizes differ by one at most.

    >>> home_ranks(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    sizes = [len(part) for part in np.array_split(np.arange(tokens), ranks)]
    return np.repeat(np.arange(ranks, dtype=np.int32), sizes)


def choose_slots_at_home(ids: Array, placement: Placement) -> I32:
    """As `choose_slots`, each rank counting its own tokens from 0: what ranks do that see only their own share."""
    parts = np.array_split(np.asarray(ids), placement.ranks)
    return np.concatenate([choose_slots(part, placement) for part in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What one layer's all-to-all has to carry, from home ranks (first axis) to experts' ranks (second axis).

    Attributes
    ----------
    routes : (R, R) int64
        Pairs of a token and one of its experts.
    copies : (R, R) int64
        Tokens with at least one expert there.
    tokens : (R,) int64
        Tokens of each home rank.
    slot_rows : (P,) int64
        Rows that each physical slot computes.
    """

    routes: I64
    copies: I64
    tokens: I64
    slot_rows: I64

    @property
    def rank_rows(self) -> I64:
        """(R,) int64: rows that each rank's experts compute."""
        return self.routes.sum(axis=0)

    @property
    def active_slots(self) -> I64:
        """(R,) int64: slots of each rank that got a row, whose weights it must therefore read."""
        return (self.slot_rows > 0).reshape(len(self.tokens), -1).sum(axis=1)

    def units(self, way: Way) -> I64:
        """(R, R) int64: rows that cross from home to expert's rank; as many come back.  The diagonal stays in place."""
        if way == "routes":
            return self.routes
        if way == "tokens":
            return self.copies
        return np.repeat(self.tokens[:, None], len(self.tokens), axis=1)

    def dispatch_bytes(self, hidden: int, payload: str = "bf16", way: Way = "tokens") -> I64:
        """(R, R) int64: bytes from home ranks to experts' ranks; nothing on the diagonal."""
        return _crossing(self.units(way)) * row_bytes(hidden, payload)

    def combine_bytes(self, hidden: int, way: Way = "routes") -> I64:
        """(R, R) int64: bytes from experts' ranks (first axis) home.  Results travel in BF16."""
        return _crossing(self.units(way).T) * row_bytes(hidden, "bf16")


def _crossing(units: I64) -> I64:
    found: I64 = units.copy()
    np.fill_diagonal(found, 0)
    return found


def exchange(slots: Array, placement: Placement, home: Array | None = None) -> Exchange:
    """Count what `slots` ``(T, k)`` of a batch need; `home` ``(T,)`` is `home_ranks` unless given.

    >>> layer = exchange(np.array([[0, 1], [0, 3]]), place(4, 2))
    >>> layer.routes.tolist(), layer.copies.tolist(), layer.rank_rows.tolist()
    ([[2, 0], [1, 1]], [[1, 0], [1, 1]], [3, 1])
    """
    ranks, slots = placement.ranks, np.asarray(slots)
    home = home_ranks(len(slots), ranks) if home is None else np.asarray(home)
    there = placement.rank_of[slots]
    meets = np.zeros((len(slots), ranks), np.int64)
    meets[np.arange(len(slots))[:, None], there] = 1
    copies = np.zeros((ranks, ranks), np.int64)
    np.add.at(copies, home, meets)
    pairs = home.astype(np.int64)[:, None] * ranks + there
    routes = np.bincount(pairs.ravel(), minlength=ranks * ranks).reshape(ranks, ranks)
    tokens = np.bincount(home, minlength=ranks)
    return Exchange(routes, copies, tokens, np.bincount(slots.ravel(), minlength=len(placement.slots)))


def exchange_reference(slots: Array, placement: Placement, home: Array) -> Exchange:
    """`exchange`, one route at a time."""
    ranks = placement.ranks
    routes, copies = np.zeros((ranks, ranks), np.int64), np.zeros((ranks, ranks), np.int64)
    tokens, slot_rows = np.zeros(ranks, np.int64), np.zeros(len(placement.slots), np.int64)
    for at, chosen in zip(home.tolist(), slots.tolist(), strict=True):
        tokens[at] += 1
        for slot in chosen:
            routes[at, slot // placement.slots_per_rank] += 1
            slot_rows[slot] += 1
        for there in {slot // placement.slots_per_rank for slot in chosen}:
            copies[at, there] += 1
    return Exchange(routes, copies, tokens, slot_rows)


def row_bytes(hidden: int, payload: str) -> int:
    """Bytes of one token on the wire: BF16, or NVFP4 codes with their block scales.

    Quantising before the dispatch needs one activation scale for all experts of a layer (the FlashInfer backends'
    global maximum); a scale per expert is known only where the expert lies.

    >>> row_bytes(4096, "bf16"), row_bytes(4096, "nvfp4")
    (8192, 2304)

    Raises
    ------
    InputError
        ``parallel.payload``.
    """
    if payload not in PAYLOADS:
        raise InputError("parallel.payload", payload=repr(payload)[:40], payloads=", ".join(PAYLOADS))
    return 2 * hidden if payload == "bf16" else hidden // 2 + hidden // 16


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How uneven R ranks' work is.  A layer waits for its slowest rank.

    Attributes
    ----------
    slowest
        The rank with most rows; the lowest of equals.
    ratio
        Most rows over mean rows: 1 is perfect, R is one rank alone.  vLLM logs the inverse as *balancedness*.
    idle
        Share of the ranks' time spent waiting, were time proportional to rows: ``1 − 1 / ratio``.
    deviation
        Standard deviation over mean.
    """

    slowest: int
    ratio: float
    idle: float
    deviation: float


def imbalance(load: Array) -> Imbalance:
    """Measure rows by rank, ``(R,)``; ranks without any work count as balanced.

    >>> imbalance(np.array([1, 3]))
    Imbalance(slowest=1, ratio=1.5, idle=0.33333333333333337, deviation=0.5)
    """
    load = np.asarray(load, np.float64)
    mean = float(load.mean())
    if mean == 0:
        return Imbalance(0, 1.0, 0.0, 0.0)
    ratio = float(load.max()) / mean
    return Imbalance(int(load.argmax()), ratio, 1 - 1 / ratio, float(load.std()) / mean)


STAYING = ("a1_gscale", "a2_gscale")
"""What EPLB does not move: made from ``input_scale``, which vLLM leaves out of the tensors it exchanges."""


def in_slots(experts: W4A4Experts, slots: Array, staying: Array | None = None) -> W4A4Experts:
    """Experts as they lie in physical slots: every tensor of slot p is that of logical expert ``slots[p]``.

    Parameters
    ----------
    experts
        Logical experts, as loaded.
    slots : (P,) integers
    staying : (P,) integers, optional
        Whose encode scales the slots keep: the placement before a move that leaves `STAYING` behind.
    """
    taken = {}
    for field in fields(experts):
        value = getattr(experts, field.name)
        if isinstance(value, np.ndarray):
            taken[field.name] = value[staying if field.name in STAYING and staying is not None else slots]
    return replace(experts, **taken)


def combine_by_rank(routes: Array, weights: Array, ranks: Array) -> Array:
    """As `combine_routes`, but each rank first sums its own routes and sends that sum in BF16.

    Parameters
    ----------
    routes : (T, k, H) bfloat16
    weights : (T, k) float32
    ranks : (T, k) integers
        Where each route was computed.

    Returns
    -------
    (T, H) bfloat16
        Partial sums are added in the order of ranks.  Where a token met one rank alone, the bits are `combine_routes`'.
    """
    count = int(np.max(ranks, initial=-1)) + 1
    if count == 0:
        return combine_routes(routes, weights)
    w = round_bf16(np.asarray(weights, np.float32)).astype(np.float32)
    products = round_bf16(routes.astype(np.float32) * w[:, :, None])
    zero = np.zeros_like(products)
    partial = [sum_routes(np.where((ranks == rank)[:, :, None], products, zero)) for rank in range(count)]
    return sum_routes(np.stack(partial, axis=1))


def combine_by_rank_reference(routes: Array, weights: Array, ranks: Array) -> Array:
    """`combine_by_rank`, output by output."""
    bits, w = routes.view(np.uint16), np.asarray(weights, np.float32)
    out = np.zeros((routes.shape[0], routes.shape[2]), np.uint16)
    last = int(np.max(ranks, initial=-1))
    with np.errstate(all="ignore"):
        for token, h in np.ndindex(out.shape):
            partial = []
            for rank in range(last + 1):
                mine = [j for j in range(routes.shape[1]) if ranks[token, j] == rank]
                partial.append(sum_routes_scalar([weighed_scalar(int(bits[token, j, h]), w[token, j]) for j in mine]))
            out[token, h] = sum_routes_scalar(partial)
    return out.view(routes.dtype)
