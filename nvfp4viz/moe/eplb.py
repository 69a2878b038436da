"""EPLB, the expert-parallel load balancer: replicate the busiest experts, then pack all replicas evenly on ranks.

Source: `serving-vllm.md` section 9 and vLLM's ``distributed/eplb/policy/default.py`` (after DeepSeek's EPLB).  From a
layer's load per logical expert:

1. with expert groups that divide among nodes, **groups are packed to nodes**; otherwise all is one group on one node;
2. on each node redundant slots are given out **one at a time, each to the expert with the largest load / replicas**;
3. replicas are **packed to the node's ranks** by that quotient;
4. experts that stay on their rank **stay in their slot**, so that nothing is copied within a rank.

*Packing* is greedy: heaviest first, always to the lightest pack that has room, the lowest index among equals; with one
item a pack nothing is weighed and item i goes to pack i.  Items of equal weight go by their index here; vLLM's sort
leaves their order open.

`rebalance` computes all layers at once; `rebalance_reference` reads like the four lines above, one layer and plain
Python.  Their results are equal (tested), because both add the same float64 numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError
from nvfp4viz.moe.parallel import Placement

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

WINDOW, INTERVAL = 1000, 3000
"""vLLM's defaults, in steps of the engine: over how many loads are summed, and how often experts are rearranged."""
FIRST = INTERVAL // 4
"""Steps before the first rearrangement."""


# ------------------------------------------------------------------ scalar reference


def pack_reference(weights: Sequence[float], packs: int) -> tuple[list[int], list[int]]:
    """Pack n items evenly: the pack of each, and its place there.

    >>> pack_reference([5, 4, 3, 2, 1, 1], 2)
    ([0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 2, 2])
    """
    room = len(weights) // packs
    if room == 1:
        return list(range(len(weights))), [0] * len(weights)
    pack_of, place_in = [-1] * len(weights), [-1] * len(weights)
    load, held = [0.0] * packs, [0] * packs
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        pack = min((p for p in range(packs) if held[p] < room), key=lambda p: (load[p], p))
        pack_of[item], place_in[item] = pack, held[pack]
        load[pack] += weights[item]
        held[pack] += 1
    return pack_of, place_in


def replicate_reference(load: Sequence[float], slots: int) -> tuple[list[int], list[int]]:
    """The expert of each of `slots` slots, experts first and then replicas, and the replicas of each expert.

    >>> replicate_reference([9, 2, 4], 5)
    ([0, 1, 2, 0, 0], [3, 1, 1])
    """
    expert_of, counts = list(range(len(load))), [1] * len(load)
    for _ in range(slots - len(load)):
        busiest = max(range(len(load)), key=lambda e: (load[e] / counts[e], -e))
        expert_of.append(busiest)
        counts[busiest] += 1
    return expert_of, counts


def keep_slots_reference(new: Sequence[int], old: Sequence[int], ranks: int) -> list[int]:
    """The same experts on the same ranks, those that were there before in their old slots.

    >>> keep_slots_reference([2, 0, 1, 3], [0, 1, 2, 3], 2)
    [0, 2, 1, 3]
    """
    size, kept = len(new) // ranks, []
    for first in range(0, len(new), size):
        coming = list(new[first : first + size])
        slots: list[int | None] = []
        for expert in old[first : first + size]:
            slots.append(expert if expert in coming else None)
            if expert in coming:
                coming.remove(expert)
        kept += [coming.pop(0) if expert is None else expert for expert in slots]
    return kept


def total_load(load: Sequence[float]) -> float:
    """The float64 sum, first to last; Python's own ``sum`` carries what was rounded away since 3.12."""
    total = 0.0
    for one in load:
        total += one
    return total


def rebalance_reference(
    load: Sequence[float], slots: int, ranks: int, groups: int = 1, nodes: int = 1, old: Sequence[int] | None = None
) -> list[int]:
    """The logical expert of each physical slot, for one layer; see `rebalance`.

    >>> rebalance_reference([8, 1, 1, 2], 6, 2)
    [0, 0, 2, 0, 3, 1]
    """
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    node_of, place_in = pack_reference([total_load(load[g * size : (g + 1) * size]) for g in range(groups)], nodes)
    found: list[int] = []
    for node in range(nodes):
        mine = sorted((g for g in range(groups) if node_of[g] == node), key=lambda g: place_in[g])
        experts = [expert for g in mine for expert in range(g * size, (g + 1) * size)]
        expert_of, counts = replicate_reference([load[e] for e in experts], slots // nodes)
        rank_of, at = pack_reference([load[experts[e]] / counts[e] for e in expert_of], ranks // nodes)
        order = sorted(range(len(expert_of)), key=lambda slot: (rank_of[slot], at[slot]))
        found += [experts[expert_of[slot]] for slot in order]
    return found if old is None else keep_slots_reference(found, old, ranks)


# ------------------------------------------------------------------ all layers at once


def pack(weights: F64, packs: int) -> tuple[I64, I64]:
    """`pack_reference` of every row: ``(L, n)`` to two arrays ``(L, n)`` int64."""
    layers, items = weights.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (layers, 1)), np.zeros((layers, items), np.int64)
    order = np.argsort(-weights, axis=1, kind="stable")
    pack_of, place_in = np.empty((layers, items), np.int64), np.empty((layers, items), np.int64)
    load, held, rows = np.zeros((layers, packs)), np.zeros((layers, packs), np.int64), np.arange(layers)
    for step in range(items):
        item = order[:, step]
        lightest = np.where(held < room, load, np.inf).argmin(axis=1)
        pack_of[rows, item], place_in[rows, item] = lightest, held[rows, lightest]
        load[rows, lightest] += weights[rows, item]
        held[rows, lightest] += 1
    return pack_of, place_in


def replicate(load: F64, slots: int) -> tuple[I64, I64]:
    """`replicate_reference` of every row: ``(L, E)`` to ``(L, slots)`` and ``(L, E)`` int64."""
    layers, experts = load.shape
    expert_of, counts, rows = np.tile(np.arange(slots), (layers, 1)), np.ones_like(load, np.int64), np.arange(layers)
    for slot in range(experts, slots):
        busiest = (load / counts).argmax(axis=1)
        expert_of[:, slot] = busiest
        counts[rows, busiest] += 1
    return expert_of, counts


def keep_slots(new: I64, old: Array, ranks: int) -> I64:
    """`keep_slots_reference` of every row: ``(L, P)``."""
    layers, slots = new.shape
    coming, were = new.reshape(layers, ranks, -1), np.asarray(old).reshape(layers, ranks, -1)
    size = slots // ranks
    free = np.ones_like(coming, bool)  # of `coming`: not yet given a slot
    kept = np.full_like(coming, -1)
    at = np.ogrid[:layers, :ranks]
    for slot in range(size):
        same = (coming == were[:, :, slot, None]) & free
        first = same.argmax(axis=2)
        found = same.any(axis=2)
        kept[:, :, slot] = np.where(found, were[:, :, slot], -1)
        free[at[0], at[1], first] &= ~found
    # What remains goes, in order, into the slots that remain: both have as many a rank.
    kept[kept < 0] = coming[free]
    return kept.reshape(layers, slots)


def rebalance(load: Array, slots: int, ranks: int, groups: int = 1, nodes: int = 1, old: Array | None = None) -> I32:
    """Where EPLB puts the experts.

    Parameters
    ----------
    load : (L, E)
        Rows that each logical expert of each layer computed in the window.
    slots
        Physical slots P: E and the redundant ones.
    ranks, nodes, groups
        Numbers of ranks R, of nodes, and of the router's expert groups.
    old : (L, P) integers, optional
        The placement so far.

    Returns
    -------
    (L, P) int32
        Logical expert of each slot.

    Raises
    ------
    InputError
        ``eplb.uneven``: slots do not divide by ranks, or ranks by nodes, or experts by groups; ``eplb.too-few``.

    >>> rebalance(np.array([[8, 1, 1, 2]]), 6, 2).tolist()
    [[0, 0, 2, 0, 3, 1]]
    """
    weights = np.asarray(load, np.float64)
    layers, experts = weights.shape
    if groups % nodes:
        groups = nodes = 1
    if slots < experts:
        raise InputError("eplb.too-few", slots=slots, experts=experts)
    if slots % ranks or ranks % nodes or experts % groups:
        raise InputError("eplb.uneven", slots=slots, ranks=ranks, nodes=nodes, experts=experts, groups=groups)
    size = experts // groups
    # A running sum, because NumPy's own pairs its terms; and two groups of equal load must stay equal.
    node_of, place_in = pack(np.cumsum(weights.reshape(layers, groups, size), axis=2)[:, :, -1], nodes)
    by_node = np.argsort(node_of * groups + place_in, axis=1, kind="stable")
    ordered = (by_node[:, :, None] * size + np.arange(size)).reshape(layers * nodes, -1)  # experts of each node
    mine = np.take_along_axis(np.repeat(weights, nodes, axis=0), ordered, axis=1)
    expert_of, counts = replicate(mine, slots // nodes)
    rank_of, at = pack(np.take_along_axis(mine / counts, expert_of, axis=1), ranks // nodes)
    order = np.argsort(rank_of * slots + at, axis=1, kind="stable")
    found = np.take_along_axis(ordered, np.take_along_axis(expert_of, order, axis=1), axis=1).reshape(layers, slots)
    return (found if old is None else keep_slots(found, old, ranks)).astype(np.int32)


# ------------------------------------------------------------------ what a move costs


@dataclass(frozen=True, slots=True)
class Move:
    """What a rearrangement of one layer copies.

    Attributes
    ----------
    slots : tuple of int
        Physical slots whose expert changed.
    arriving : tuple of int
        Those of them whose new expert was not on their rank before: it comes over the network.
    replicated : tuple of int
        Logical experts with more than one slot now.
    """

    slots: tuple[int, ...]
    arriving: tuple[int, ...]
    replicated: tuple[int, ...]


def compare(old: Placement, new: Placement) -> Move:
    """Which slots change, between two placements of equal slots and ranks.

    >>> compare(Placement(np.array([0, 1, 2, 3]), 2, 4), Placement(np.array([1, 0, 2, 1]), 2, 4))
    Move(slots=(0, 1, 3), arriving=(3,), replicated=(1,))
    """
    changed = np.flatnonzero(old.slots != new.slots)
    arriving = [p for p in changed.tolist() if new.slots[p] not in old.on(p // old.slots_per_rank)]
    return Move(tuple(changed.tolist()), tuple(arriving), tuple(np.flatnonzero(new.replicas > 1).tolist()))
