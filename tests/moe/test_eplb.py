"""EPLB: the fast form equals the one that reads like the description, and does what it says."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import InputError
from nvfp4viz.moe import eplb
from nvfp4viz.moe.parallel import Placement, choose_slots, exchange, place

RNG = np.random.default_rng(21)


def test_examples():
    assert doctest.testmod(eplb).failed == 0


# tied: whole numbers of one digit, so that many loads and many quotients are equal
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("groups", "nodes", "ranks"), [(1, 1, 1), (1, 1, 4), (8, 2, 4), (8, 4, 4), (4, 2, 8), (3, 2, 4)]
)
@pytest.mark.parametrize("redundant", [0, 8, 40])
def test_both_forms_are_equal(tied, groups, nodes, ranks, redundant):
    experts = 48 if groups == 3 else 64
    load = RNG.integers(0, 9, (4, experts)) if tied else RNG.integers(0, 10**6, (4, experts))
    slots = experts + redundant
    for old in (
        None,
        RNG.integers(0, experts, (4, slots)),
        np.tile(place(experts, ranks, redundant=redundant).slots, (4, 1)),
    ):
        fast = eplb.rebalance(load, slots, ranks, groups, nodes, old)
        plain = [
            eplb.rebalance_reference(row, slots, ranks, groups, nodes, None if old is None else old[at].tolist())
            for at, row in enumerate(load.tolist())
        ]
        assert fast.tolist() == plain


LOADS = st.sampled_from(["many equal", "all zero", "integers", "fractions", "huge"])


def loads(kind, rng, shape):
    return {
        "many equal": lambda: rng.integers(0, 3, shape).astype(float),
        "all zero": lambda: np.zeros(shape),
        "integers": lambda: rng.integers(0, 10**6, shape).astype(float),
        "fractions": lambda: rng.random(shape),
        "huge": lambda: rng.random(shape) * 2.0 ** rng.integers(-900, 900, shape),
    }[kind]()


@settings(deadline=None, max_examples=100)
@given(LOADS, st.integers(1, 3), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32))
def test_packing_is_the_same_on_both_paths(kind, layers, packs, room, seed):
    weights = loads(kind, np.random.default_rng(seed), (layers, packs * room))
    packs_of, places = eplb.pack(weights, packs)
    plain = [eplb.pack_reference(row, packs) for row in weights.tolist()]
    assert packs_of.tolist() == [pack for pack, _ in plain]
    assert places.tolist() == [place for _, place in plain]
    assert all(sorted(zip(*one, strict=True)) == [(p, at) for p in range(packs) for at in range(room)] for one in plain)


@settings(deadline=None, max_examples=100)
@given(LOADS, st.integers(1, 3), st.integers(1, 12), st.integers(0, 15), st.integers(0, 2**32))
def test_replication_is_the_same_on_both_paths(kind, layers, experts, redundant, seed):
    load = loads(kind, np.random.default_rng(seed), (layers, experts))
    owners, counts = eplb.replicate(load, experts + redundant)
    plain = [eplb.replicate_reference(row, experts + redundant) for row in load.tolist()]
    assert owners.tolist() == [owner for owner, _ in plain]
    assert counts.tolist() == [count for _, count in plain]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32))
def test_slots_are_kept_alike_on_both_paths(layers, ranks, size, experts, seed):
    rng = np.random.default_rng(seed)
    new, old = rng.integers(0, experts, (2, layers, ranks * size))
    kept = eplb.keep_slots(new, old, ranks)
    rows = zip(new.tolist(), old.tolist(), strict=True)
    assert kept.tolist() == [eplb.keep_slots_reference(coming, was, ranks) for coming, was in rows]
    assert (np.sort(kept.reshape(layers, ranks, -1)) == np.sort(new.reshape(layers, ranks, -1))).all()


@settings(deadline=None, max_examples=60)
@given(LOADS, st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]), st.integers(0, 3),
       st.booleans(), st.integers(0, 2**32))  # fmt: skip
def test_whole_placements_are_the_same_on_both_paths(kind, layers, cut, spare, before, seed):
    rng = np.random.default_rng(seed)
    (ranks, nodes), groups = cut, int(rng.choice([1, 2, 4]))
    experts = 8 * int(rng.integers(1, 3))
    slots = experts + spare * 4
    load = loads(kind, rng, (layers, experts))
    old = rng.integers(0, experts, (layers, slots)) if before else None
    fast = eplb.rebalance(load, slots, ranks, groups, nodes, old)
    olds = old.tolist() if before else [None] * layers
    plain = [
        eplb.rebalance_reference(row, slots, ranks, groups, nodes, was)
        for row, was in zip(load.tolist(), olds, strict=True)
    ]
    assert fast.tolist() == plain


def test_groups_whose_sums_depend_on_the_order_are_packed_alike():
    """Fractions in another order: a last place decides which of two groups is heavier."""
    rng = np.random.default_rng(0)
    load = np.concatenate([rng.permuted(np.tile(rng.random(16), (200, 1)), axis=1) for _ in range(2)] * 2, axis=1)
    load[:, 32:] = rng.permuted(load[:, 32:].reshape(200, 2, 16), axis=2).reshape(200, 32)
    fast = eplb.rebalance(load, 64, 4, groups=4, nodes=2)
    assert fast.tolist() == [eplb.rebalance_reference(row, 64, 4, groups=4, nodes=2) for row in load.tolist()]


@pytest.mark.parametrize("redundant", [0, 4, 16])
def test_every_expert_is_served_and_no_rank_has_more_slots_than_another(redundant):
    load = RNG.integers(0, 1000, (3, 64))
    for slots in eplb.rebalance(load, 64 + redundant, 4):
        placed = Placement(slots, 4, 64)
        assert (placed.replicas >= 1).all()
        assert placed.slots_per_rank == 16 + redundant // 4


def test_groups_stay_on_one_node():
    slots = eplb.rebalance(RNG.integers(1, 100, (5, 64)), 72, 8, groups=8, nodes=4)
    for row in slots:
        groups_of = [set((row[node * 18 : node * 18 + 18] // 8).tolist()) for node in range(4)]
        assert all(len(groups) == 2 for groups in groups_of)
        assert set.union(*groups_of) == set(range(8))


def test_the_busiest_experts_are_replicated():
    load = np.arange(1, 65)[None]
    counts = np.bincount(eplb.rebalance(load, 72, 4)[0], minlength=64)
    assert counts[:48].max() == 1
    assert counts[-8:].min() == 2


def test_experts_that_stay_on_their_rank_stay_in_their_slot():
    old = place(64, 4, redundant=8)
    slots = eplb.rebalance(RNG.integers(0, 1000, (1, 64)), 72, 4, old=old.slots[None])[0]
    new = Placement(slots, 4, 64)
    moved = eplb.compare(old, new)
    for rank in range(4):
        before, after = old.on(rank), new.on(rank)
        for slot, expert in enumerate(before):
            if (before == expert).sum() == 1 and expert in after:
                assert after[slot] == expert
    # a slot that changes within its rank can only hold a second replica there
    assert set(moved.arriving) <= set(moved.slots)
    assert sorted(np.concatenate([new.on(rank) for rank in range(4)]).tolist()) == sorted(slots.tolist())


def test_a_second_look_at_the_same_load_moves_nothing():
    load = RNG.integers(0, 1000, (2, 64))
    once = eplb.rebalance(load, 72, 4)
    assert np.array_equal(eplb.rebalance(load, 72, 4, old=once), once)


def test_one_busy_expert_is_spread_as_its_replicas_are():
    ids = np.zeros((1000, 1), np.int64)
    load = np.bincount(ids.ravel(), minlength=8)[None]
    placed = Placement(eplb.rebalance(load, 12, 4)[0], 4, 8)
    assert placed.replicas[0] == 5
    rows = exchange(choose_slots(ids, placed), placed).rank_rows
    before = exchange(choose_slots(ids, place(8, 4)), place(8, 4)).rank_rows
    assert before.max() == 1000
    assert rows.max() <= 410  # two of five replicas on one rank


@pytest.mark.parametrize(
    ("slots", "ranks", "groups", "nodes", "code"),
    [
        (60, 4, 1, 1, "eplb.too-few"),
        (66, 4, 1, 1, "eplb.uneven"),
        (64, 4, 5, 1, "eplb.uneven"),
        (66, 3, 2, 2, "eplb.uneven"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(slots, ranks, groups, nodes, code):
    with pytest.raises(InputError) as refused:
        eplb.rebalance(np.ones((1, 64)), slots, ranks, groups, nodes)
    assert refused.value.code == code
