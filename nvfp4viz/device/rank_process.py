"""One rank of an expert-parallel layer: dispatch, compute its experts, combine.  Imports torch.

Started once a rank, by `nvfp4viz.device.ranks` or by torchrun on a folder that `ranks.write_problem` wrote::

    torchrun --nproc-per-node 4 -m nvfp4viz.device.rank_process FOLDER

Messages travel through ``torch.distributed``: NCCL where every local rank has a GPU of its own, else gloo.  The
experts are computed by `run_w4a4_experts` on the CPU either way, and rows travel as bytes: no transport changes a bit.

**Why the result has the bits of one process.**  A row through an expert depends on the row and the expert alone.  Every
expert's BF16 row comes home unsummed, into the place ``(token, j)`` that expert j has among the token's k; only there
are the rows weighted and added, in f32 in the order j = 0 … k−1 (`combine_routes`), as one process does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from nvfp4viz.device.ranks import ERROR_EXIT, Problem, read_problem, write_share
from nvfp4viz.errors import DeviceError, NvError
from nvfp4viz.moe import Routing, combine_routes, run_w4a4_experts
from nvfp4viz.moe.dataflow import Array
from nvfp4viz.moe.parallel import choose_slots, home_ranks, in_slots

if TYPE_CHECKING:
    from collections.abc import Iterator


def say(**what: Any) -> None:
    """A line for who started us: a step that is done, or an error."""
    print(json.dumps(what), flush=True)


@contextmanager
def _group(rank: int, ranks: int, store: str | None, seconds: float) -> Iterator[torch.device]:
    """The process group, and the device whose memory messages lie in."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    together = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= together
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    try:
        dist.init_process_group(
            "nccl" if gpus else "gloo",
            init_method=f"file://{store}" if store else "env://",
            rank=rank,
            world_size=ranks,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        raise DeviceError("ranks.missing", ranks=ranks, seconds=f"{seconds:g}", reason=_line(error)) from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def all_to_all(parts: list[Array], device: torch.device) -> list[Array]:
    """Send ``parts[r]``, (n_r, width) uint8, to rank r; what each rank sent here comes back, in order of ranks."""
    width = parts[0].shape[1]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes)
    counts = coming.tolist()
    sent = torch.from_numpy(np.ascontiguousarray(np.concatenate(parts))).to(device)
    found = torch.empty((sum(counts), width), dtype=torch.uint8, device=device)
    dist.all_to_all_single(found, sent, counts, sizes.tolist())
    return np.split(found.cpu().numpy(), np.cumsum(counts)[:-1])


def _bytes(array: Array) -> Array:
    """(n, …) to (n, bytes of a row) uint8."""
    array = np.ascontiguousarray(array)
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return array.view(np.uint8).reshape(len(array), width)


def run_rank(problem: Problem, rank: int, device: torch.device) -> dict[str, Array]:
    """One layer, seen from one rank.

    Returns
    -------
    dict
        ``out`` (T_r, H) uint16: BF16 bits of this rank's tokens.  ``dispatched``, ``combined`` (R,) int64: bytes sent
        to each rank, its own included, which cross no wire.  ``rows`` (1,) int64: rows of its experts.  ``seconds``
        (3,) float64: dispatch, compute, combine.
    """
    placement = problem.placement
    mine = home_ranks(len(problem.x), placement.ranks) == rank
    x, ids, weights = problem.x[mine], problem.ids[mine], problem.weights[mine]
    slots = choose_slots(ids, placement)
    there = placement.rank_of[slots]

    begin = time.perf_counter()
    travel = [np.flatnonzero((there == to).any(axis=1)) for to in range(placement.ranks)]
    parts = [np.hstack([_bytes(x[tokens]), _bytes(slots[tokens])]) for tokens in travel]
    received = all_to_all(parts, device)
    say(step="dispatched")

    dispatched = time.perf_counter()
    rows = np.concatenate(received)
    width = x.shape[1] * x.dtype.itemsize
    x_here = np.ascontiguousarray(rows[:, :width]).view(x.dtype)
    slots_here = np.ascontiguousarray(rows[:, width:]).view(np.int32)
    staying = None if problem.staying is None else problem.staying.on(rank)
    local = placement.expert_map(rank)
    # The weights stay at home: nothing here is summed, so only the unweighted rows are used.
    unweighted = Routing(slots_here, np.ones(slots_here.shape, np.float32), np.empty((len(rows), 0), np.float32))
    found = run_w4a4_experts(
        x_here, unweighted, in_slots(problem.experts, placement.on(rank), staying), record=True, expert_map=local
    )
    assert found.trace is not None
    say(step="computed")

    computed = time.perf_counter()
    belongs = local[slots_here] >= 0
    ends = np.cumsum([len(part) for part in received])[:-1]
    answers = [
        _bytes(routes[local_routes])
        for routes, local_routes in zip(np.split(found.trace.routes, ends), np.split(belongs, ends), strict=True)
    ]
    home = all_to_all(answers, device)
    routes = np.zeros((*slots.shape, x.shape[1]), x.dtype)
    for to, answer in enumerate(home):
        places = np.zeros_like(there, bool)
        places[travel[to]] = there[travel[to]] == to
        routes[places] = answer.view(x.dtype)
    out = combine_routes(routes, weights)
    say(step="combined")
    return {
        "out": out.view(np.uint16),
        "dispatched": np.array([part.nbytes for part in parts], np.int64),
        "combined": np.array([part.nbytes for part in answers], np.int64),
        "rows": np.array([found.trace.dispatch.rows], np.int64),
        "seconds": np.diff([begin, dispatched, computed, time.perf_counter()]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run as the rank that the environment names; the exit status is 0, or `ERROR_EXIT` after an error was said."""
    parser = argparse.ArgumentParser(description="One rank of an expert-parallel layer; start it with torchrun.")
    parser.add_argument("folder", type=Path, help="what nvfp4viz.device.ranks.write_problem wrote")
    parser.add_argument("--store", help="a file to meet at; without it torchrun's variables are used")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for the others")
    given = parser.parse_args(arguments)
    step = "join"
    try:
        if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
            raise DeviceError("ranks.environment")
        rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        problem = read_problem(given.folder)
        if started != problem.placement.ranks:
            raise DeviceError("ranks.world-size", started=started, ranks=problem.placement.ranks)
        torch.set_num_threads(1)
        with _group(rank, started, given.store, given.timeout) as device:
            say(step="joined", backend=dist.get_backend())
            step = "exchange"
            write_share(given.folder, rank, run_rank(problem, rank, device) | {"backend": np.array(dist.get_backend())})
        say(step="done")
    except NvError as error:
        say(error=error.code, params=error.params)
        return ERROR_EXIT
    except RuntimeError as error:  # gloo's and NCCL's: a peer is gone, or did not answer in time
        say(error="ranks.lost", params={"rank": os.environ["RANK"], "step": step, "reason": _line(error)})
        return ERROR_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
