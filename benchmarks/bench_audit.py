"""Reading and auditing a checkpoint of DeepSeek-R1's shape: the whole process, its reading, its growth.

Every number is of a fresh process on two cores with a warm page cache; rounds go through all candidates in turn.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import harness
from benchmarks.big_checkpoint import DEEPSEEK_LAYERS, DEEPSEEK_SHARDS, EXPERTS, Made, make

if TYPE_CHECKING:
    from collections.abc import Iterator

COPY = """
import os, shutil
os.mkdir({1!r})
for path in {0!r}:
    with open(path, 'rb') as source, open(os.path.join({1!r}, os.path.basename(path)), 'wb') as target:
        shutil.copyfileobj(source, target, 1 << 24)
        os.fsync(target.fileno())
"""
ROOT = Path(__file__).resolve().parent.parent
# Goals of the issue: seconds, times, bytes.
WHOLE, BEYOND_START, MEMORY = 1.5, 0.3, 400e6
OVER_SAFE_OPEN, OVER_HUB, INTERLEAVED = 4.0, 8.0, 3.0
# t ~ n^1 measured over a factor of 19 in n; 0.1 is what caches and noise may add.
EXPONENT = 1.1
# MoE layers of the four sizes: 21,504, 79,872, 178,176 and 399,360 tensors.
SIZES = (7, 26, DEEPSEEK_LAYERS, 130)


class Process(NamedTuple):
    """What a process took: its start by the clock that all processes share, seconds, peak bytes; and what it wrote."""

    begin: float
    seconds: float
    peak: int
    out: str


# A process of its own between us and what is measured: Linux lets a child's peak begin at its parent's.
LAUNCH = """
import os, subprocess, sys, time
start = time.monotonic()
process = subprocess.Popen([sys.executable, *sys.argv[1:]])
_, status, usage = os.wait4(process.pid, 0)
print(start, time.monotonic() - start, usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def run(command: list[str]) -> Process:
    """One process of this interpreter, measured without the one that measures it."""
    # Where nothing may be cached, each process would compile the modules that were edited since; the warm-up does it.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCH, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with an error:\n{done.stderr}")
    begin, seconds, peak = done.stderr.splitlines()[-1].split()
    # Linux counts kibibytes, macOS bytes.
    return Process(float(begin), float(seconds), int(peak) * (1 if sys.platform == "darwin" else 1024), done.stdout)


def read(method: str, folder: Path) -> dict:
    return json.loads(run(["-m", "benchmarks.read_phase", method, str(folder)]).out)


@contextmanager
def made(**options: object) -> Iterator[Made]:
    """A sparse checkpoint in a folder of its own, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="nvfp4viz-bench-"))
    try:
        yield make(folder / "checkpoint", **options)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(folder)


def whole_process(folder: Path, rounds: int) -> harness.Section:
    shards = bare(folder)
    # The moment at which everything is there, by the clock that all processes share.
    read_all = "import nvfp4viz.checkpoint as c, time; k = c.inspect({!r}); k.all_scalars(); print(time.monotonic())"
    commands = {
        "interpreter start (python -c pass)": ["-c", "pass"],
        "the same with NumPy imported": ["-c", "import numpy"],
        "names, shapes, all scalars": ["-c", read_all.format(str(shards))],
        "the same, and compared with the index": ["-c", read_all.format(str(folder))],
        "nvfp4viz audit": ["-m", "nvfp4viz", "audit", str(folder), "--format", "json", "--quiet"],
    }
    start, _, reading, _, whole = commands
    times: dict[str, list[float]] = {name: [] for name in commands}
    peak = 0
    for turn in range(rounds + 1):
        for name, command in commands.items():
            done = run(command)
            if turn:
                times[name].append(float(done.out) - done.begin if "monotonic" in command[1] else done.seconds)
                peak = max(peak, done.peak)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return harness.Section(
        "Whole processes",
        "Wall time from starting Python, imports included: to its end, or to where all values are there.",
        harness.rows_from(times),
        goals=[
            harness.Goal("whole `nvfp4viz audit` process, seconds", middle[whole], WHOLE, at_most=True),
            harness.Goal(
                "names, shapes and scalars beyond interpreter start, imports included, seconds",
                middle[reading] - middle[start], BEYOND_START, at_most=True,
            ),
            harness.Goal("peak resident memory, MB", peak / 1e6, MEMORY / 1e6, at_most=True),
        ],
    )  # fmt: skip


def bare(folder: Path) -> Path:
    """The same shards under another name, without index and configuration: what safe_open reads, and no more."""
    out = folder.with_name(folder.name + "-bare")
    if not out.exists():
        out.mkdir()
        for path in folder.glob("*.safetensors"):
            os.link(path, out / path.name)
    return out


def reading(folder: Path, rounds: int) -> harness.Section:
    shards = bare(folder)
    candidates = {
        "nvfp4viz, shards alone": ("nvfp4viz", shards),
        "safe_open (np)": ("safe_open", shards),
        "nvfp4viz, with the index": ("nvfp4viz", folder),
        "huggingface_hub, with the index": ("huggingface_hub", folder),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    checks, beyond = set(), 0
    for turn in range(rounds + 1):
        for name, (method, place) in candidates.items():
            result = read(method, place)
            checks.add(tuple(result["check"]))
            if turn:
                times[name].append(result["seconds"])
            if method == "nvfp4viz" and result["kernel_bytes"] is not None:
                beyond = max(beyond, result["kernel_bytes"] - result["bytes_read"] - result["side_bytes"])
    assert len(checks) == 1, f"the readers disagree: {checks}"
    ours, opened, indexed, hub = (statistics.median(values) for values in times.values())
    return harness.Section(
        "Names, shapes and every scalar",
        "Fresh processes, imports done before the clock starts; all read the same names, shapes and values, bit for "
        "bit. safe_open opens the shards that are there; huggingface_hub's `get_local_safetensors_metadata` reads the "
        "index too, and safe_open then the scalars.  With the index, nvfp4viz compares its names with the headers'.",
        harness.rows_from(times, None, "safe_open (np)"),
        "safe_open",
        [
            harness.Goal("times faster than safe_open (np)", opened / ours, OVER_SAFE_OPEN),
            harness.Goal("times faster than huggingface_hub, both with the index", hub / indexed, OVER_HUB),
            harness.Goal("bytes that the kernel counts beyond those reported", beyond, 4096, at_most=True),
        ],
    )


def cold(paths: list[Path]) -> None:
    """Drop files from the page cache, so that the disk is what is measured."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def half_the_rate(title: str, note: str, times: dict, nbytes: int, limit: str, peak: int, most: int) -> harness.Section:
    """Ours, the second of two candidates, beside the first, which only moves the same bytes; at most ``most`` MB."""
    moved, ours = (statistics.median(values) for values in times.values())
    goals = [
        harness.Goal(f"part of {limit} rate", moved / ours, 0.5),
        harness.Goal("peak resident memory, MB", peak / 1e6, most, at_most=True),
    ]
    return harness.Section(title, note, harness.rows_from(times, nbytes), goals=goals)


def deep(quick: bool, rounds: int) -> harness.Section:
    experts = 2 if quick else 48
    with made(layers=1, shards=2, experts=experts, filled_bytes=1 << 40) as big:
        paths = sorted(big.folder.glob("*.safetensors"))
        methods = {"the same files read in 8 MiB pieces": "sequential", "nvfp4viz audit --deep": "deep"}
        times: dict[str, list[float]] = {name: [] for name in methods}
        peak = 0
        for _ in range(rounds):
            for name, method in methods.items():
                cold(paths)
                done = run(["-m", "benchmarks.read_phase", method, str(big.folder)])
                times[name].append(json.loads(done.out)["seconds"])
                peak = max(peak, done.peak)
    note = f"{big.nbytes / 1e9:.1f} GB of packed codes and block scales, dropped from the page cache before every run."
    return half_the_rate("--deep", note, times, big.nbytes, "the disk's sequential", peak, 1000)


def mending(quick: bool) -> harness.Section:
    """``repair --apply`` where every shard changes, beside a plain copy of the same files; both onto the disk."""
    with made(layers=1, shards=2, experts=8 if quick else EXPERTS) as big:
        out = big.folder.with_name("out")
        files = sorted(big.folder.glob("*.safetensors"))
        repair = ["-m", "nvfp4viz", "repair", str(big.folder), str(out), "--policy", "weight-only", "--apply"]
        candidates = {"a plain copy of the shards": ["-c", COPY.format([str(path) for path in files], str(out))],
                      "nvfp4viz repair --policy weight-only --apply": repair}  # fmt: skip
        times: dict[str, list[float]] = {}
        peak = 0
        for _ in range(1 if quick else 3):
            for name, command in candidates.items():
                done = run(command)
                times.setdefault(name, []).append(done.seconds)
                peak = max(peak, done.peak) if command is repair else peak
                shutil.rmtree(out)
    size = f"{big.nbytes / 1e9:.1f} GB in {len(files)} shards"
    note = f"{size} that all change, each written, and on the disk at the end."
    return half_the_rate("repair --apply", note, times, big.nbytes, "a plain copy's", peak, 200)


def growth(rounds: int, sizes: tuple[int, ...]) -> harness.Section:
    times: dict[str, list[float]] = {}
    counts = []
    for layers in sizes:
        shards = max(1, round(layers * DEEPSEEK_SHARDS / DEEPSEEK_LAYERS))
        with made(layers=layers, shards=shards) as big:
            counts.append(big.tensors)
            for method in ("nvfp4viz", "audit"):
                values = [read(method, big.folder)["seconds"] for _ in range(rounds + 1)][1:]
                times[f"{'reading' if method == 'nvfp4viz' else 'audit'}, {big.tensors:,} tensors"] = values
    middle = [statistics.median(values) for values in times.values()]
    span = math.log(counts[-1] / counts[0])
    goals = [
        harness.Goal(
            f"{what}: exponent of growth over the sizes",
            math.log(middle[k - 2] / middle[k]) / span,
            EXPONENT,
            at_most=True,
        )
        for k, what in enumerate(("reading", "audit"))
    ]
    note = "Inside the process, imports apart.  An exponent of 1 is linear."
    return harness.Section("Growth", note, harness.rows_from(times), goals=goals)


def layouts(sorted_folder: Path, rounds: int, layers: int, shards: int) -> harness.Section:
    with made(layers=layers, shards=shards, layout="interleaved") as other:
        folders = {"sorted: scalars of a shard together": sorted_folder, "interleaved": other.folder}
        times: dict[str, list[float]] = {name: [] for name in folders}
        for turn in range(rounds + 1):
            for name, folder in folders.items():
                seconds = read("nvfp4viz", folder)["seconds"]
                if turn:
                    times[name].append(seconds)
    one, two = (statistics.median(values) for values in times.values())
    goal = harness.Goal("interleaved over sorted", two / one, INTERLEAVED, at_most=True)
    note = "The same tensors in the reference writer's order, and each projection's four tensors side by side."
    return harness.Section("Layouts", note, harness.rows_from(times), goals=[goal])


def measure(quick: bool) -> list[harness.Section]:
    layers, shards, rounds = (2, 3, 1) if quick else (DEEPSEEK_LAYERS, DEEPSEEK_SHARDS, 7)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with made(layers=layers, shards=shards) as big:
        sections = [
            whole_process(big.folder, rounds),
            reading(big.folder, rounds),
            layouts(big.folder, rounds, layers, shards),
        ]
    sections.append(growth(max(1, rounds // 2), (1, 2) if quick else SIZES))
    return [*sections, deep(quick, max(1, rounds // 2)), mending(quick)]


if __name__ == "__main__":
    harness.main(measure)
