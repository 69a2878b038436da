"""Placement of experts on ranks, what the all-to-all carries, and where a partial sum changes bits."""

import doctest
import itertools
from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import InputError
from nvfp4viz.moe import combine_routes, overlap, parallel, plan_dispatch
from nvfp4viz.moe.parallel import WAYS, Placement, choose_slots, exchange, home_ranks, imbalance, place

RNG = np.random.default_rng(8)


def routed(tokens, experts, k):
    return np.stack([RNG.permutation(experts)[:k] for _ in range(tokens)]) if tokens else np.zeros((0, k), np.int32)


@pytest.mark.parametrize("module", [parallel, overlap])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(64, 4, 0), (64, 4, 8), (6, 3, 0), (5, 1, 2), (2, 2, 6)])
def test_every_expert_has_a_slot_and_every_slot_a_rank(strategy, experts, ranks, redundant):
    placed = place(experts, ranks, strategy, redundant)
    assert len(placed.slots) == experts + redundant
    assert set(placed.slots.tolist()) == set(range(experts))
    assert placed.replicas.sum() == experts + redundant
    for expert, slots in enumerate(placed.table()):
        assert [placed.slots[slot] for slot in slots if slot >= 0] == [expert] * placed.replicas[expert]
    for rank in range(ranks):
        local = placed.expert_map(rank)
        assert (local >= 0).sum() == placed.slots_per_rank
        assert np.array_equal(placed.slots[local >= 0], placed.on(rank))
        assert set(placed.rank_of[local >= 0].tolist()) == {rank}


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(64, 3, 0), (64, 4, 1), (4, 0, 0), (0, 1, 0), (4, 2, -2)])
def test_what_cannot_be_shared_out_is_refused(experts, ranks, redundant):
    with pytest.raises(InputError) as refused:
        place(experts, ranks, redundant=redundant)
    assert refused.value.code == "parallel.uneven"


def test_an_unknown_placement_is_refused():
    with pytest.raises(InputError, match="zigzag"):
        place(4, 2, "zigzag")


def test_a_token_takes_the_replica_that_its_index_hashes_to():
    placed = Placement(np.int32([0, 1, 2, 0, 0, 1]), 3, 3)
    ids = routed(500, 3, 2)
    slots = choose_slots(ids, placed, first=7)
    np.testing.assert_array_equal(slots, parallel.choose_slots_reference(ids, placed, first=7), strict=True)
    # three replicas share the work, none by more than a few rows
    rows = np.bincount(slots[ids == 0], minlength=6)[[0, 3, 4]]
    assert rows.max() - rows.min() < 0.1 * rows.sum()


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 30),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 2**40),
    st.integers(0, 2**32),
)
def test_any_placement_is_used_and_counted_alike_on_both_paths(tokens, top_k, experts, ranks, first, seed):
    rng = np.random.default_rng(seed)
    spare = -experts % ranks + ranks * int(rng.integers(0, 3))
    slots = rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, spare)])).astype(np.int32)
    placed = Placement(slots, ranks, experts)
    ids = rng.integers(0, experts, (tokens, top_k))
    chosen = choose_slots(ids, placed, first)
    np.testing.assert_array_equal(chosen, parallel.choose_slots_reference(ids, placed, first), strict=True)
    for home in (home_ranks(tokens, ranks), rng.integers(0, ranks, tokens)):
        found, counted = exchange(chosen, placed, home), parallel.exchange_reference(chosen, placed, home)
        for field in fields(parallel.Exchange):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(counted, field.name), strict=True)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_partial_sums_are_the_same_bits_on_both_paths(tokens, top_k, ranks, seed):
    rng = np.random.default_rng(seed)
    routes = (rng.standard_normal((tokens, top_k, 6)) * 2.0 ** rng.integers(-9, 9, (tokens, top_k, 1))).astype(
        ml_dtypes.bfloat16
    )
    routes[rng.random(routes.shape) < 0.03] = np.nan
    weights, there = rng.random((tokens, top_k)).astype(np.float32), rng.integers(0, ranks, (tokens, top_k))
    fast = parallel.combine_by_rank(routes, weights, there)
    slow = parallel.combine_by_rank_reference(routes, weights, there)
    np.testing.assert_array_equal(bits(fast), bits(slow), strict=True)


def test_indices_beyond_32_bits_wrap_as_they_do_in_the_kernel():
    token = 2**33 + 5
    assert choose_slots(np.array([[0]]), place(1, 1, redundant=2), token).item() == parallel.replica_of(token, 3)


@pytest.mark.parametrize(("tokens", "ranks", "redundant"), [(41, 4, 4), (3, 4, 0), (0, 2, 2), (64, 1, 0)])
def test_an_exchange_is_what_counting_by_hand_says(tokens, ranks, redundant):
    placed = place(8, ranks, redundant=redundant)
    slots = choose_slots(routed(tokens, 8, 3), placed)
    found, home = exchange(slots, placed), home_ranks(tokens, ranks)
    counted = parallel.exchange_reference(slots, placed, home)
    assert np.array_equal(found.routes, counted.routes)
    assert np.array_equal(found.copies, counted.copies)
    assert found.rank_rows.sum() == 3 * tokens
    assert np.array_equal(found.slot_rows, np.bincount(slots.ravel(), minlength=len(placed.slots)))
    for way in WAYS:
        sent, back = found.dispatch_bytes(128, "nvfp4", way), found.combine_bytes(128, way)
        assert not sent.diagonal().any()
        assert not back.diagonal().any()
        assert np.array_equal(sent.T * 256, back * 72)  # BF16 against half a byte and a sixteenth
    assert (found.copies <= found.routes).all()
    assert (found.copies <= found.units("gather")).all()


def test_rows_on_a_rank_are_those_of_its_dispatch_plan():
    placed = place(16, 4, "round_robin")
    slots = choose_slots(routed(50, 16, 4), placed)
    found = exchange(slots, placed)
    for rank in range(4):
        plan = plan_dispatch(slots, 4, n1=2, n=1, k=1, expert_map=placed.expert_map(rank))
        assert plan.rows == found.rank_rows[rank]
        assert (plan.counts > 0).sum() == found.active_slots[rank]


def test_nobody_waits_where_nothing_is_to_do():
    assert imbalance(np.zeros(4)).ratio == 1
    one = imbalance(np.array([0, 0, 9, 0]))
    assert (one.slowest, one.ratio, one.idle) == (2, 4, 0.75)


def bits(x):
    return x.view(np.uint16)


def test_partial_sums_keep_the_bits_of_tokens_that_met_one_rank_and_change_others():
    routes = RNG.standard_normal((400, 4, 64)).astype(ml_dtypes.bfloat16)
    weights = RNG.random((400, 4)).astype(np.float32)
    ranks = RNG.integers(0, 4, (400, 4))
    whole = combine_routes(routes, weights)
    parts = parallel.combine_by_rank(routes, weights, ranks)
    alone = (ranks == ranks[:, :1]).all(axis=1)
    assert alone.any()
    assert np.array_equal(bits(whole[alone]), bits(parts[alone]))
    assert (bits(whole[~alone]) != bits(parts[~alone])).any()
    assert np.array_equal(bits(whole), bits(parallel.combine_by_rank(routes, weights, np.zeros_like(ranks))))
    # one route a rank: nothing is summed before it travels, but the products' order is the ranks'
    each = np.tile(np.arange(4), (400, 1))
    assert np.array_equal(bits(whole), bits(parallel.combine_by_rank(routes, weights, each)))


class TestOverlap:
    size = overlap.LayerSize(4096, 2048)
    machine = overlap.Machine(link=50e9, latency=10e-6, flops=2e15, memory=6e12)

    def batch(self, tokens=512):
        placed = place(64, 4)
        return choose_slots(routed(tokens, 64, 4), placed), placed

    def test_phases_are_the_formulas(self):
        slots, placed = self.batch()
        layer = exchange(slots, placed)
        found = overlap.phases(layer, self.size, self.machine, "nvfp4")
        sent = layer.dispatch_bytes(4096, "nvfp4", "tokens")
        assert found.dispatch == 10e-6 + max(sent.sum(0).max(), sent.sum(1).max()) / 50e9
        flops, weights = 6 * 4096 * 2048 * layer.rank_rows / 2e15, 3 * 4096 * 2048 * 4.5 / 8 * layer.active_slots / 6e12
        assert np.array_equal(found.compute, np.maximum(flops, weights))

    def test_one_batch_takes_its_three_phases(self):
        slots, placed = self.batch()
        found = overlap.phases(exchange(slots, placed), self.size, self.machine)
        whole = overlap.total(overlap.timeline([found]))
        assert whole == found.dispatch + found.compute.max() + found.combine

    def test_no_resource_does_two_things_at_once(self):
        slots, placed = self.batch()
        bars = overlap.timeline(
            [overlap.phases(half, self.size, self.machine) for half in overlap.halves(slots, placed)]
        )
        for rank in range(4):
            for kinds in (("compute",), ("dispatch", "combine")):
                mine = sorted((b.start, b.end) for b in bars if b.rank == rank and b.kind in kinds)
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))

    def test_halves_are_the_batch(self):
        slots, placed = self.batch(513)
        first, second = overlap.halves(slots, placed)
        assert np.array_equal(first.routes + second.routes, exchange(slots, placed).routes)

    def test_overlap_helps_where_rows_cost_and_hurts_where_weights_are_read(self):
        slots, placed = self.batch(4096)

        def gain(machine):
            one = [overlap.phases(exchange(slots, placed), self.size, machine)]
            two = [overlap.phases(half, self.size, machine) for half in overlap.halves(slots, placed)]
            return overlap.total(overlap.timeline(one)) / overlap.total(overlap.timeline(two))

        assert gain(overlap.Machine(link=50e9, latency=1e-6, flops=2e14, memory=1e15)) > 1.1
        assert gain(overlap.Machine(link=1e15, latency=1e-6, flops=1e20, memory=6e12)) < 1


def test_an_unknown_payload_is_refused():
    with pytest.raises(InputError) as stop:
        parallel.row_bytes(4096, "fp8")
    assert stop.value.code == "parallel.payload"
