"""What was recorded on GPUs: benches and self-tests that ``benchmarks/results`` holds, read as they were written.

The notes of a bench that ran on a GPU begin with the GPU's name (``benchmarks/harness.py`` writes the files).
Nothing here knows a result: without a file there is no record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4viz.device.build import KERNELS, source_hash

__all__ = [
    "RESULTS",
    "GpuRecord",
    "GpuTests",
    "SelfTestRecord",
    "gpu_records",
    "logs_of_tests",
    "selftest_records",
    "tried_on",
    "written_reports",
]

DATE = "2026-11-29"  # how every file's name begins
RESULTS = KERNELS.parent / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, eq=False)
class GpuRecord:
    """One bench of one day on one machine.

    Attributes
    ----------
    bench, date, commit
        Name of the bench, ISO date, the commit that was measured.
    machine
        As `benchmarks.harness.describe_machine` wrote it: ``cpu``, ``versions`` and more.
    sections
        Tables with rows: ``title``, ``note``, ``rows`` (``name``, ``seconds``, ``gb_per_s``, ``ratio``), ``goals``.
    """

    bench: str
    date: str
    commit: str
    machine: Mapping[str, Any]
    sections: tuple[Mapping[str, Any], ...]

    @property
    def gpu(self) -> str:
        """The GPU's name, with which every section's note begins."""
        return str(self.sections[0]["note"]).split(";")[0]

    @property
    def versions(self) -> str:
        """What was installed, for one line."""
        return ", ".join(f"{name} {version}" for name, version in self.machine.get("versions", {}).items())


def gpu_records(folder: Path | None = None) -> list[GpuRecord]:
    """All records of GPU benches, the newest first: a day's report, or one bench saved with ``--json``."""
    found = []
    for path in sorted((folder or RESULTS).glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "records" in report:
            found += [_record(name, report["date"], record) for name, record in report["records"].items()]
        elif "sections" in report:
            found.append(_record(path.stem[len(DATE) + 1 :], path.stem[: len(DATE)], report))
    found = [record for record in found if record.sections and record.gpu.startswith("NVIDIA")]
    return sorted(found, key=lambda record: (record.date, record.bench), reverse=True)


def _record(bench: str, date: str, record: Mapping[str, Any]) -> GpuRecord:
    # A machine without a GPU leaves a section without rows that says so.
    sections = tuple(section for section in record["sections"] if section["rows"])
    return GpuRecord(bench, date, record.get("commit", "unknown"), record["before"], sections)


@dataclass(frozen=True, slots=True)
class GpuTests:
    """What pytest counted in a run of ``tests/gpu``; a log may hold several, and one test may be in more than one."""

    file: str
    date: str
    gpu: str
    passed: int
    failed: int  # failures and errors
    skipped: int
    run: int = 1  # which of the runs in its log, from 1
    runs: int = 1  # how many the log holds


def logs_of_tests(folder: Path | None = None) -> list[GpuTests]:
    """Every run in the logs of ``tests/gpu``, ``<date>-<gpu>-….log``: the newest log first, its runs in order.

    A run ends with pytest's last line; a log without one holds none.  Runs are not added up: a later one of a log may
    repeat tests of an earlier one.
    """
    found = []
    for path in sorted((folder or RESULTS).glob("*.log")):
        text = path.read_text(encoding="utf-8", errors="replace")
        named = re.search(r"^computes on cuda: (.+)$", text, re.MULTILINE)
        gpu = named[1].strip() if named else path.stem[len(DATE) + 1 :].split("-")[0].upper()
        summaries = re.findall(r"^=* ?(\d+ [a-z]+.*) in [\d.]+s", text, re.MULTILINE)
        if "tests/gpu" not in text or "computes on cpu" in text:
            continue
        for run, summary in enumerate(summaries, start=1):
            counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
            failed = counts.get("failed", 0) + counts.get("error", 0)
            passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
            date = path.name[: len(DATE)]
            found.append(GpuTests(path.name, date, gpu, passed, failed, skipped, run, len(summaries)))
    return sorted(found, key=lambda log: (log.date, log.file), reverse=True)


def written_reports(folder: Path | None = None) -> list[Path]:
    """Reports that people wrote, the newest first: Markdown that no program made from a JSON file of the same name."""
    paths = sorted((folder or RESULTS).glob("*.md"), reverse=True)
    return [path for path in paths if not _is_made(path.with_suffix(".json"))]


def _is_made(data: Path) -> bool:
    """Whether the Markdown beside ``data`` says the same: benches of a day and self-tests write both."""
    return data.exists() and not json.loads(data.read_text(encoding="utf-8")).keys().isdisjoint({"records", "checks"})


@dataclass(frozen=True, slots=True, eq=False)
class SelfTestRecord:
    """A report of ``make selftest`` that somebody sent: what `nvfp4viz.device.selftest.to_json` wrote."""

    report: Mapping[str, Any]

    @property
    def gpu(self) -> str:
        return str(self.report["gpu"])

    @property
    def capability(self) -> tuple[int, int]:
        major, minor = self.report["capability"]
        return int(major), int(minor)

    @property
    def differing(self) -> int:
        """How many of all compared values differ."""
        return sum(check["differing"] or 0 for check in self.report["checks"])

    @property
    def compared(self) -> int:
        """How many were compared."""
        return sum(check["compared"] for check in self.report["checks"])

    @property
    def changed_since(self) -> tuple[str, ...]:
        """Kernel files that are no longer what was tested: they, or a header of theirs, have changed."""
        tested = self.report.get("sources", {})
        there = {path.name for path in KERNELS.glob("*.cu")}
        return tuple(n for n, digest in tested.items() if n not in there or not source_hash(n).startswith(digest))


def selftest_records(folder: Path | None = None) -> list[SelfTestRecord]:
    """All self-test reports, the newest first."""
    paths = sorted((folder or RESULTS).rglob("*selftest*.json"))
    found = [SelfTestRecord(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(found, key=lambda record: str(record.report["date"]), reverse=True)


def tried_on(major: int, folder: Path | None = None) -> bool:
    """Whether a self-test of a GPU with this compute capability's major number, or a later one, is recorded."""
    return any(record.capability[0] >= major for record in selftest_records(folder))
