"""Expert parallelism with a GPU for each rank: the processes of ``tests/device``, and NCCL carries their rows."""

import numpy as np
import pytest

from nvfp4viz.device.ranks import run_ranks
from nvfp4viz.moe import eplb
from nvfp4viz.moe.parallel import Placement, place
from tests.device.test_rank_processes import EXPERTS, assert_bits, assert_counted, one_process, problem

RANKS = 2


def placement_of(layout, ids):
    """Experts in order, dealt out, or with two copies of the busiest."""
    if layout != "copies":
        return place(EXPERTS, RANKS, layout)
    load = np.bincount(ids.ravel(), minlength=EXPERTS)[None]
    start = place(EXPERTS, RANKS, redundant=2)
    return Placement(eplb.rebalance(load, EXPERTS + 2, RANKS, old=start.slots[None])[0], RANKS, EXPERTS)


@pytest.mark.parametrize("tokens", [1, 37, 1000])  # of one token, one rank owns none
@pytest.mark.parametrize("layout", ["linear", "round_robin", "copies"])
def test_nccl_gives_the_bits_of_one_process(torch, layout, tokens):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("this machine has one GPU")
    given = problem(place(EXPERTS, RANKS), tokens)
    moved = problem(placement_of(layout, given.ids), tokens)
    answer = run_ranks(moved)
    assert answer.backend == "nccl"
    assert_bits(answer.out, one_process(given))
    assert_counted(answer, moved)
