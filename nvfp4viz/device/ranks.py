"""Expert parallelism in several processes: state a layer's problem, start its ranks, collect what they computed.

Nothing here imports torch; the ranks do (`nvfp4viz.device.rank_process`).  A problem is a folder of ``.npy`` files, so
that each rank maps the experts' files and reads the rows of its own experts alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import DeviceError
from nvfp4viz.moe import W4A4Experts
from nvfp4viz.moe.parallel import Placement, home_ranks

Array = npt.NDArray[Any]
ERROR_EXIT = 3
STEPS = ("starting", "joined", "dispatched", "computed", "combined", "done")
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
MOST_RANKS = 8
"""More processes than this would only wait for each other on one machine."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One batch through one layer's experts.

    Attributes
    ----------
    x : (T, H) bfloat16
        The layer's normalised input.
    ids, weights : (T, k) int32, (T, k) float32
        The router's choice, by logical expert.
    experts
        All logical experts.
    placement
        Where they lie.
    staying
        Whose activation scales the slots hold, where that differs: see `nvfp4viz.moe.parallel.in_slots`.
    """

    x: Array
    ids: Array
    weights: Array
    experts: W4A4Experts = field(repr=False)
    placement: Placement
    staying: Placement | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RankAnswer:
    """What the ranks computed together.

    Attributes
    ----------
    out : (T, H) bfloat16
    dispatched, combined : (R, R) int64
        Bytes from rank to rank.  A dispatched row carries its token in BF16 and k slot numbers of four bytes.
    rows : (R,) int64
        Rows that each rank's experts computed.
    seconds : (R, 3) float64
        Dispatch, compute and combine on each rank.
    backend
        ``"gloo"`` or ``"nccl"``.
    """

    out: Array = field(repr=False)
    dispatched: npt.NDArray[np.int64]
    combined: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    backend: str


def write_problem(folder: Path, problem: Problem) -> None:
    """Write what every rank reads."""
    arrays = {
        "x": problem.x.view(np.uint16),
        "ids": np.asarray(problem.ids, np.int32),
        "weights": np.asarray(problem.weights, np.float32),
        "slots": problem.placement.slots,
    }
    if problem.staying is not None:
        arrays["staying"] = problem.staying.slots
    plain: dict[str, object] = {"ranks": problem.placement.ranks, "experts": problem.placement.experts}
    for name in (f.name for f in fields(problem.experts)):
        value = getattr(problem.experts, name)
        if isinstance(value, np.ndarray):
            arrays[f"experts.{name}"] = value
        else:
            plain[name] = value
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "problem.json").write_text(json.dumps(plain), encoding="utf-8")


def read_problem(folder: Path) -> Problem:
    """What `write_problem` wrote; arrays are mapped, not read.

    Raises
    ------
    DeviceError
        ``ranks.no-problem``
    """
    try:
        plain = json.loads((folder / "problem.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError("ranks.no-problem", folder=folder.name) from error

    def mapped(name: str) -> Array:
        array: Array = np.load(folder / f"{name}.npy", mmap_mode="r")
        return array

    ranks, count = plain.pop("ranks"), plain.pop("experts")
    names = [f.name for f in fields(W4A4Experts) if f.name not in plain]
    experts = W4A4Experts(**plain, **{name: mapped(f"experts.{name}") for name in names})
    staying = Placement(mapped("staying"), ranks, count) if (folder / "staying.npy").exists() else None
    return Problem(
        np.asarray(mapped("x")).view(ml_dtypes.bfloat16),
        mapped("ids"),
        mapped("weights"),
        experts,
        Placement(mapped("slots"), ranks, count),
        staying,
    )


def write_share(folder: Path, rank: int, share: dict[str, Array]) -> None:
    """A rank's part of the answer; complete or not there."""
    scratch = folder / f"share{rank}.part.npz"
    np.savez(scratch, **share)
    scratch.rename(folder / f"share{rank}.npz")


class RankRun:
    """Ranks at work on this machine.  Use it in a ``with``: leaving it ends every process that was started.

    Parameters
    ----------
    problem
    seconds
        After which `poll` gives up.
    processes
        How many to start, where that is not the placement's number (a test of what then happens).

    Raises
    ------
    DeviceError
        ``ranks.no-torch``, ``ranks.too-many``
    """

    def __init__(self, problem: Problem, *, seconds: float = 120.0, processes: int | None = None) -> None:
        ranks = problem.placement.ranks
        if importlib.util.find_spec("torch") is None:
            raise DeviceError("ranks.no-torch")
        if ranks > MOST_RANKS:
            raise DeviceError("ranks.too-many", ranks=ranks, most=MOST_RANKS)
        self.ranks, self.tokens = ranks, len(problem.x)
        self.seconds, self._deadline = seconds, time.monotonic() + seconds
        self._folder = tempfile.TemporaryDirectory(prefix="nvfp4viz-ranks-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            write_problem(self.folder, problem)
            for rank in range(ranks if processes is None else processes):
                self.processes.append(self._start(rank, ranks if processes is None else processes))
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int, started: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nvfp4viz.device.rank_process", str(self.folder), "--timeout"]
        command += [f"{self.seconds:g}", "--store", str(self.folder / "store")]
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # Ranks on one machine: gloo must not go looking for this host's name in a network.
        place = {"RANK": str(rank), "WORLD_SIZE": str(started)}
        if sys.platform in LOOPBACK:
            place["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
        with (self.folder / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **one, **place},
            )

    @property
    def overdue(self) -> bool:
        """Whether the time that was given is over."""
        return time.monotonic() > self._deadline

    def __enter__(self) -> RankRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every rank, and forget the files."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        self._folder.cleanup()

    def _said(self, rank: int) -> list[dict[str, Any]]:
        """The lines of JSON in a rank's log; others are warnings of libraries."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [one for one in found if isinstance(one, dict)]

    def steps(self) -> tuple[str, ...]:
        """The last of `STEPS` that each rank has reached."""
        reached = []
        for rank in range(len(self.processes)):
            steps = [one["step"] for one in self._said(rank) if one.get("step") in STEPS]
            reached.append(steps[-1] if steps else STEPS[0])
        return tuple(reached)

    def poll(self) -> bool:
        """Whether all ranks are done.  One that failed ends the others.

        Raises
        ------
        DeviceError
            What a rank said (``ranks.world-size``, ``ranks.missing``, ``ranks.lost`` …), ``ranks.died`` for one that
            ended without a word, ``ranks.slow`` after `seconds`.
        """
        codes = [process.poll() for process in self.processes]
        if any(codes):
            error = self._failure(codes)
            self.stop()
            raise error
        if all(code == 0 for code in codes):
            return True
        if self.overdue:
            error = DeviceError("ranks.slow", seconds=f"{self.seconds:g}", steps=", ".join(self.steps()))
            self.stop()
            raise error
        return False

    def _failure(self, codes: list[int | None]) -> DeviceError:
        """The cause among several failures: a rank that died, then one that refused, then one that lost its peers."""
        said: list[DeviceError] = []
        for rank, code in enumerate(codes):
            if not code:
                continue
            errors = [one for one in self._said(rank) if "error" in one]
            if not errors:
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                log = ""
                with contextlib.suppress(OSError):
                    log = (self.folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").strip()
                return DeviceError("ranks.died", rank=rank, how=how, last=(log.splitlines() or ["–"])[-1][:200])
            said.append(DeviceError(errors[-1]["error"], **errors[-1]["params"]))
        return min(said, key=lambda error: error.code == "ranks.lost")

    def answer(self) -> RankAnswer:
        """What the ranks computed; call it after `poll` was true."""
        shares = [dict(np.load(self.folder / f"share{rank}.npz")) for rank in range(self.ranks)]
        assert sum(len(share["out"]) for share in shares) == self.tokens
        assert [len(share["out"]) for share in shares] == np.bincount(
            home_ranks(self.tokens, self.ranks), minlength=self.ranks
        ).tolist()
        return RankAnswer(
            np.concatenate([share["out"] for share in shares]).view(ml_dtypes.bfloat16),
            np.stack([share["dispatched"] for share in shares]),
            np.stack([share["combined"] for share in shares]),
            np.concatenate([share["rows"] for share in shares]),
            np.stack([share["seconds"] for share in shares]),
            str(shares[0]["backend"]),
        )


def run_ranks(problem: Problem, *, seconds: float = 120.0) -> RankAnswer:
    """Start the ranks, wait, and return what they computed.

    Raises
    ------
    DeviceError
        As `RankRun` and `RankRun.poll`.
    """
    with RankRun(problem, seconds=seconds) as run:
        while not run.poll():
            time.sleep(0.02)
        return run.answer()
