"""Reports of GPUs are read as they were written; without a file there is no record."""

import json
from dataclasses import asdict

from benchmarks.harness import Goal, Row, Section
from nvfp4viz.device import records
from tests.device.selftest_reports import report


def _bench(folder, date, records_):
    (folder / f"{date}-some-cpu.json").write_text(json.dumps({"date": date, "records": records_}))


def _record(*sections):
    return {"before": {"versions": {"torch": "2.11.0"}}, "sections": [asdict(s) for s in sections], "commit": "abc"}


GPU = Section("Streaming", "NVIDIA H200; medians.", [Row("copy bf16", 1e-4, 9e-5, 2e-4, 4000.0, 1.0)], "copy")
GOAL = Section("MoE", "NVIDIA H200; a layer.", [Row("ours", 1e-3, 9e-4, 2e-3)], goals=[Goal("x", 1.0, 2.0)])
NONE = Section("Streaming", "Not measured: This machine has no NVIDIA driver.", [])


def test_gpu_benches_come_newest_first_and_others_not_at_all(tmp_path):
    _bench(tmp_path, "2026-11-01", {"bench_gpu": _record(GPU), "bench_pages": _record(GPU)})
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


def test_what_is_committed_can_be_read():
    for record in records.gpu_records():
        assert record.gpu
        assert record.date
    for found in records.selftest_records():
        assert found.compared > 0
