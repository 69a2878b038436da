"""Reports of GPUs are read as they were written; without a file there is no record."""

import json
import re
from dataclasses import asdict

from benchmarks.harness import Goal, Row, Section
from nvfp4viz.device import records
from nvfp4viz.device.build import source_hash
from tests.device.selftest_reports import report


def _bench(folder, date, records_):
    (folder / f"{date}-some-cpu.json").write_text(json.dumps({"date": date, "records": records_}))


def _record(*sections):
    return {"before": {"versions": {"torch": "2.11.0"}}, "sections": [asdict(s) for s in sections], "commit": "abc"}


GPU = Section("Streaming", "NVIDIA H200; medians.", [Row("copy bf16", 1e-4, 9e-5, 2e-4, 4000.0, 1.0)], "copy")
GOAL = Section("MoE", "NVIDIA H200; a layer.", [Row("ours", 1e-3, 9e-4, 2e-3)], goals=[Goal("x", 1.0, 2.0)])
CPU = Section("First paint", "To title and main figure.", [Row("/", 0.4, 0.3, 0.7)])
NONE = Section("Streaming", "Not measured: This machine has no NVIDIA driver.", [])


def test_gpu_benches_come_newest_first_and_others_not_at_all(tmp_path):
    _bench(tmp_path, "2026-11-01", {"bench_gpu": _record(GPU), "bench_pages": _record(CPU)})
    _bench(tmp_path, "2026-12-01", {"bench_gpu_moe": _record(GOAL, NONE)})
    new, old = records.gpu_records(tmp_path)
    assert (new.date, new.bench, new.gpu, new.versions) == (
        "2026-12-01",
        "bench_gpu_moe",
        "NVIDIA H200",
        "torch 2.11.0",
    )
    assert len(new.sections) == 1
    assert old.sections[0]["rows"][0]["gb_per_s"] == 4000.0


def test_a_bench_that_found_no_gpu_is_no_record(tmp_path):
    _bench(tmp_path, "2026-11-01", {"bench_gpu": _record(NONE)})
    assert records.gpu_records(tmp_path) == []


def test_selftest_reports_are_counted(tmp_path):
    (tmp_path / "selftest-nvidia-x.json").write_text(report((9, 0), 3))
    (found,) = records.selftest_records(tmp_path)
    assert (found.gpu, found.capability, found.compared, found.differing) == ("NVIDIA X", (9, 0), 1 << 32, 3)
    assert not records.tried_on(10, tmp_path)
    (tmp_path / "selftest-other.json").write_text(report((12, 0), 0, "2026-12-01 20:00 UTC"))
    assert records.tried_on(10, tmp_path)
    assert records.selftest_records(tmp_path)[0].capability == (12, 0)


def test_kernels_that_changed_since_a_selftest_are_named(tmp_path):
    """Its counts are of other sources than the reader's: the report says which by their hashes."""
    sources = {"probe.cu": source_hash("probe.cu")[:12], "amax.cu": "0" * 12, "gone.cu": "1" * 12}
    (tmp_path / "selftest-x.json").write_text(report((9, 0), 0, sources=sources))
    (found,) = records.selftest_records(tmp_path)
    assert found.changed_since == ("amax.cu", "gone.cu")


def test_a_bench_saved_alone_has_its_date_in_its_name(tmp_path):
    (tmp_path / "2026-12-02-h200-streaming.json").write_text(json.dumps(_record(GPU)))
    (found,) = records.gpu_records(tmp_path)
    assert (found.date, found.bench, found.gpu) == ("2026-12-02", "h200-streaming", "NVIDIA H200")


LOG = "header\ncomputes on cuda: NVIDIA H200\ntests/gpu/x PASSED\n{summary}\n"


def test_logs_of_gpu_tests_are_counted(tmp_path):
    for name, summary in {
        "2026-11-29-a": "============ 66 passed in 20.76s ============",
        "2026-11-30-b": "= 2 failed, 60 passed, 3 skipped, 1 warning, 1 error in 90.0s (0:01:30) =",
        "2026-12-01-c": "interrupted",
    }.items():
        (tmp_path / f"{name}.log").write_text(LOG.format(summary=summary))
    (tmp_path / "2026-12-02-cpu.log").write_text("computes on cpu: no GPU\ntests/gpu\n= 5 skipped in 1.0s =\n")
    (tmp_path / "2026-11-01-h200-quiet.log").write_text("# pytest tests/gpu -q\n...\n211 passed in 23.58s\n")
    new, old, quiet = records.logs_of_tests(tmp_path)
    assert (quiet.gpu, quiet.passed) == ("H200", 211)
    assert new == records.GpuTests("2026-11-30-b.log", "2026-11-30", "NVIDIA H200", 60, 3, 3)
    assert (old.passed, old.failed, old.skipped) == (66, 0, 0)


def test_every_run_of_a_log_is_listed(tmp_path):
    """A log may end with a small second run, and the first one is what was tested; they are not added up either."""
    text = "# pytest tests/gpu\n...\n376 passed, 1 skipped in 37.72s\n..\n10 passed, 2 skipped in 6.18s\n"
    (tmp_path / "2026-11-29-h200-two.log").write_text(text)
    first, second = records.logs_of_tests(tmp_path)
    assert (first.passed, first.skipped, first.run, first.runs) == (376, 1, 1, 2)
    assert (second.passed, second.skipped, second.run, second.runs) == (10, 2, 2, 2)


def test_the_committed_log_counts_its_376_tests():
    found = [log for log in records.logs_of_tests() if log.file == "2026-11-29-h200-gpu-tests.log"]
    assert [log.passed for log in found] == [376, 10]


def test_reports_that_a_program_made_from_data_are_left_out(tmp_path):
    for name, data in {"a": {"records": {}}, "b": {"checks": []}, "c": {"sections": []}, "d": None}.items():
        (tmp_path / f"2026-11-29-{name}.md").write_text("# report")
        if data is not None:
            (tmp_path / f"2026-11-29-{name}.json").write_text(json.dumps(data))
    assert [path.stem[-1] for path in records.written_reports(tmp_path)] == ["d", "c"]


def test_what_is_committed_can_be_read():
    for record in records.gpu_records():
        assert record.gpu
        assert record.date
    for found in records.selftest_records():
        assert found.compared > 0


def test_what_is_committed_names_no_place_on_the_machine_that_ran_it():
    """pytest writes ``rootdir:``, a traceback its files: such lines are taken out of a log before it is kept."""
    place = re.compile(r"(?<![\w./])/(?:work|tmp|root|home|opt|Users|mnt)/")
    files = [path for path in records.RESULTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".log", ".md"}
    assert [path.name for path in files if place.search(path.read_text(encoding="utf-8", errors="replace"))] == []
