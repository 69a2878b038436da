"""Ranks in processes of their own: the bits of one process, bytes as counted, and what becomes of the lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from nvfp4viz.device import ranks
from nvfp4viz.device.ranks import Problem, RankRun, read_problem, run_ranks, write_problem
from nvfp4viz.errors import DeviceError
from nvfp4viz.moe import Routing, W4A4Experts, eplb, run_w4a4_experts
from nvfp4viz.moe.parallel import Placement, choose_slots_at_home, exchange, in_slots, place
from nvfp4viz.quant import quantize

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 64, 32, 3


def experts(seed=3):
    rng = np.random.default_rng(seed)
    first = [
        quantize(rng.standard_normal((2 * INTERMEDIATE, HIDDEN), np.float32), recipe="modelopt") for _ in range(EXPERTS)
    ]
    second = [
        quantize(rng.standard_normal((HIDDEN, INTERMEDIATE), np.float32), recipe="modelopt") for _ in range(EXPERTS)
    ]
    scale = rng.uniform(1e-3, 4e-3, (2, EXPERTS)).astype(np.float32)
    return W4A4Experts(
        *(np.stack([getattr(q, name) for q in side]) for side in (first, second) for name in ("packed", "scales")),
        a1_gscale=np.float32(1) / scale[0],
        a2_gscale=np.float32(1) / scale[1],
        g1_alphas=scale[0] * np.float32([q.global_scale for q in first]),
        g2_alphas=scale[1] * np.float32([q.global_scale for q in second]),
    )


def problem(placement, tokens=37, seed=5, staying=None):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32).reshape(tokens, TOP_K)
    return Problem(x, ids, rng.random(ids.shape).astype(np.float32), experts(), placement, staying)


def one_process(given):
    """The same batch through all experts at once."""
    routing = Routing(given.ids, given.weights, np.zeros((len(given.ids), 0), np.float32))
    return run_w4a4_experts(given.x, routing, given.experts).out


def assert_bits(found, wanted):
    assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16))


def assert_counted(answer, given):
    """What the ranks sent is what `exchange` says, to the byte."""
    placed = given.placement
    counted = exchange(choose_slots_at_home(given.ids, placed), placed)
    assert np.array_equal(answer.dispatched, counted.copies * (2 * HIDDEN + 4 * TOP_K))
    assert np.array_equal(answer.combined, counted.routes.T * 2 * HIDDEN)
    assert np.array_equal(answer.rows, counted.rank_rows)


def test_a_problem_reads_back(tmp_path):
    given = problem(place(EXPERTS, 2), staying=place(EXPERTS, 2, "round_robin"))
    write_problem(tmp_path, given)
    found = read_problem(tmp_path)
    assert_bits(found.x, given.x)
    assert_bits(one_process(found), one_process(given))
    assert np.array_equal(found.placement.slots, given.placement.slots)
    assert found.staying is not None
    assert np.array_equal(found.staying.slots, given.staying.slots)
    assert isinstance(found.experts.w13_packed, np.memmap)


def test_two_ranks_compute_the_bits_of_one_process():
    given = problem(place(EXPERTS, 2))
    answer = run_ranks(given)
    assert answer.backend == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")
    assert_bits(answer.out, one_process(given))
    assert_counted(answer, given)


def test_nan_comes_home_with_its_bits():
    """What an input scale of zero leaves: an infinite encode scale and an alpha of zero (serving-vllm.md 4.5)."""
    given = problem(place(EXPERTS, 2))
    given.experts.a1_gscale[2], given.experts.g1_alphas[2] = np.inf, 0
    given.experts.a2_gscale[2], given.experts.g2_alphas[2] = np.inf, 0
    answer = run_ranks(given)
    nan = np.isnan(answer.out.astype(np.float32))
    assert np.array_equal(nan.any(axis=1), (given.ids == 2).any(axis=1))
    assert_bits(answer.out, one_process(given))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [37, 2])  # two tokens on four ranks: some ranks own none
def test_four_ranks_compute_the_bits_of_one_process(tokens):
    given = problem(place(EXPERTS, 4, "round_robin"), tokens)
    answer = run_ranks(given)
    assert_bits(answer.out, one_process(given))
    assert_counted(answer, given)


@pytest.mark.slow
def test_replicas_compute_the_same_bits():
    start = place(EXPERTS, 4, redundant=4)
    given = problem(start, tokens=60)
    load = np.bincount(given.ids.ravel(), minlength=EXPERTS)[None]
    slots = eplb.rebalance(load, 12, 4, old=start.slots[None])[0]
    assert not np.array_equal(slots, start.slots)
    moved = problem(Placement(slots, 4, EXPERTS), tokens=60)
    answer = run_ranks(moved)
    assert_bits(answer.out, one_process(given))
    assert_counted(answer, moved)


@pytest.mark.slow
def test_scales_that_stayed_behind_change_what_ranks_compute_as_in_one_process():
    start = place(EXPERTS, 2)
    new = Placement(start.slots[::-1].copy(), 2, EXPERTS)
    given = problem(new, staying=start)
    answer = run_ranks(given)
    slots = choose_slots_at_home(given.ids, new)
    routing = Routing(slots, given.weights, np.zeros((len(slots), 0), np.float32))
    assert_bits(answer.out, run_w4a4_experts(given.x, routing, in_slots(given.experts, new.slots, start.slots)).out)
    assert (answer.out.view(np.uint16) != one_process(given).view(np.uint16)).any()


# ------------------------------------------------------------------ what goes wrong


def wait(run):
    while not run.poll():
        time.sleep(0.02)


def test_a_wrong_number_of_processes_is_refused_at_once():
    begin = time.monotonic()
    with RankRun(problem(place(EXPERTS, 2)), processes=1) as run, pytest.raises(DeviceError) as refused:
        wait(run)
    assert refused.value.code == "ranks.world-size"
    assert refused.value.params == {"started": 1, "ranks": 2}
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("when", ["at once", "after joining"])
def test_a_rank_that_dies_is_named_and_ends_the_others(when):
    with RankRun(problem(place(EXPERTS, 2)), seconds=60) as run:
        while when == "after joining" and "starting" in run.steps():
            assert not run.poll()
            time.sleep(0.01)
        run.processes[1].kill()
        with pytest.raises(DeviceError) as refused:
            wait(run)
        assert (refused.value.code, refused.value.params["rank"]) == ("ranks.died", 1)
        assert refused.value.params["how"] == "SIGKILL"
    assert all(process.returncode is not None for process in run.processes)
    assert not run.folder.exists()


def alone(folder, rank, seconds):
    """One rank of two, started by hand."""
    return subprocess.run(
        [sys.executable, "-m", "nvfp4viz.device.rank_process", str(folder), "--store", str(folder / "store"),
         "--timeout", str(seconds)],
        cwd=ROOT, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip


def said(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][-1]


def test_a_rank_whose_peer_never_comes_gives_up_and_says_so(tmp_path):
    write_problem(tmp_path, problem(place(EXPERTS, 2)))
    done = alone(tmp_path, 0, 2)
    assert done.returncode == ranks.ERROR_EXIT
    assert said(done)["error"] == "ranks.missing"


LEAVES = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=1, world_size=2)
print("joined", flush=True)
os._exit(7)
"""


def test_a_rank_whose_peer_leaves_after_joining_gives_up_and_says_so(tmp_path):
    write_problem(tmp_path, problem(place(EXPERTS, 2)))
    with subprocess.Popen([sys.executable, "-c", LEAVES, str(tmp_path / "store")], stdout=subprocess.PIPE) as peer:
        done = alone(tmp_path, 0, 20)
        assert peer.wait(30) == 7
    assert done.returncode == ranks.ERROR_EXIT
    # gone before this rank had finished joining, or after
    assert said(done)["error"] in ("ranks.lost", "ranks.missing")


def test_time_that_runs_out_ends_every_rank():
    with RankRun(problem(place(EXPERTS, 2)), seconds=0.0) as run, pytest.raises(DeviceError) as refused:
        wait(run)
    assert refused.value.code == "ranks.slow"
    assert all(process.returncode is not None for process in run.processes)


def test_more_ranks_than_one_machine_should_start_are_refused():
    with pytest.raises(DeviceError) as refused:
        RankRun(problem(place(EXPERTS, 2 * ranks.MOST_RANKS, redundant=EXPERTS)))
    assert refused.value.code == "ranks.too-many"


def test_a_folder_without_a_problem_is_named(tmp_path):
    with pytest.raises(DeviceError, match=r"problem\.json"):
        read_problem(tmp_path)


def test_torchrun_starts_the_same_ranks(tmp_path):
    given = problem(place(EXPERTS, 2))
    write_problem(tmp_path, given)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "nvfp4viz.device.rank_process", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, check=True, timeout=180,
        capture_output=True,
    )  # fmt: skip
    out = np.concatenate([np.load(tmp_path / f"share{rank}.npz")["out"] for rank in range(2)])
    assert np.array_equal(out, one_process(given).view(np.uint16))
