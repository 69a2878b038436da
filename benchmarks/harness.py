"""What every benchmark shares: interleaved timing, the machine's description, and one shape of table.

A bench is a module ``benchmarks/bench_<name>.py`` with

* ``measure(quick: bool) -> list[Section]``: does the work and returns tables;
* optionally ``ENVIRONMENT = "peers"``: run inside ``.venv-peers`` (default: the interpreter that runs the benches);
* ``if __name__ == "__main__": harness.main(measure)``.

``python -m benchmarks`` finds the modules, runs each in a fresh process and writes one report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One timed thing.

    ``ratio`` is how many times faster than the row that ``Section.baseline`` names (None: no baseline applies).
    """

    name: str
    seconds: float
    fastest: float
    slowest: float
    gb_per_s: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise and what came of it: ``measured`` must be at least ``required`` (at most, if ``at_most``)."""

    text: str
    measured: float
    required: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.required if self.at_most else self.measured >= self.required


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a report, with the sentence that says what was measured."""

    title: str
    note: str
    rows: list[Row]
    baseline: str = ""
    goals: list[Goal] = field(default_factory=list)


def interleave(candidates: Mapping[str, Callable[[], object]], repeats: int, warm: int = 1) -> dict[str, list[float]]:
    """Time every candidate once per round, ``repeats`` rounds, after ``warm`` untimed calls of each.

    Rounds, and not one candidate after the other: a busy minute on a shared machine then slows everybody, and the
    ratio of two medians stays fair.
    """
    for call in candidates.values():
        for _ in range(warm):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def rows_from(times: Mapping[str, list[float]], bytes_counted: int | None = None, baseline: str = "") -> list[Row]:
    """Medians with their spread; GB/s of ``bytes_counted``; ratio to the median of ``baseline``."""
    base = statistics.median(times[baseline]) if baseline else None
    rows = []
    for name, values in times.items():
        middle = statistics.median(values)
        rate = bytes_counted / middle / 1e9 if bytes_counted else None
        rows.append(Row(name, middle, min(values), max(values), rate, base / middle if base else None))
    return rows


def fastest(times: Mapping[str, list[float]], names: list[str]) -> str:
    """The name with the smallest median: the peer to beat."""
    return min(names, key=lambda name: statistics.median(times[name]))


# --------------------------------------------------------------------------------------------- the machine


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of ``names`` that this environment has."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


PACKAGES = (
    "numpy",
    "numba",
    "ml_dtypes",
    "torch",
    "torchao",
    "nvidia-modelopt",
    "compressed-tensors",
    "safetensors",
    "huggingface_hub",
    "msgspec",
)


def describe_machine() -> dict[str, object]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_name(),
        "cores": usable,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": load,
        "versions": installed(PACKAGES),
    }


# ----------------------------------------------------------------------------------------------- reports


def main(measure: Callable[[bool], list[Section]]) -> None:
    """Command line of one bench: print its tables, and save them with the machine if ``--json`` is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    options = parser.parse_args()
    before = describe_machine()
    sections = measure(options.quick)
    if options.quick:  # a goal is about the full size
        sections = [replace(section, goals=[]) for section in sections]
    record = {"before": before, "after": describe_machine(), "sections": [asdict(s) for s in sections]}
    print("\n".join(section_to_markdown(s) for s in sections))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def section_to_markdown(section: Section) -> str:
    lines = [f"### {section.title}", "", section.note, ""]
    lines += [f"| | median | range | GB/s | x {section.baseline or '–'} |", "|---|---:|---:|---:|---:|"]
    for row in section.rows:
        rate = f"{row.gb_per_s:.2f}" if row.gb_per_s is not None else ""
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        spread = f"{time_text(row.fastest)} – {time_text(row.slowest)}"
        lines.append(f"| {row.name} | {time_text(row.seconds)} | {spread} | {rate} | {ratio} |")
    lines.append("")
    for goal in section.goals:
        sign = "≤" if goal.at_most else "≥"
        verdict = "met" if goal.met else "NOT met"
        lines.append(f"* {goal.text}: {goal.measured:.3g} (goal {sign} {goal.required:g}): **{verdict}**")
    return "\n".join(lines) + "\n"


def section_from_json(data: dict) -> Section:
    rows = [Row(**row) for row in data["rows"]]
    goals = [Goal(**goal) for goal in data["goals"]]
    return Section(data["title"], data["note"], rows, data["baseline"], goals)
