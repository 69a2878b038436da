"""Damaged files: one finding a file and cause, and never a flood of missing scales behind it."""

import json
import os
import shutil

import pytest

from nvfp4viz.audit import audit, naive_check, run_audit
from nvfp4viz.checkpoint import FAULTS, LocalSource, MemorySource, inject, open_checkpoint, write_checkpoint
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened, without

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path):
    """BASE in three shards."""
    write_checkpoint(tmp_path / "base", base(), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    return tmp_path / "base"


def codes(report):
    return [(item.code, item.severity) for item in report.findings]


def outcomes(report):
    return {item.name: item.outcome for item in report.backends}


def test_a_missing_shard(folder):
    (folder / SECOND).unlink()
    report = audit(folder)
    assert codes(report) == [("container.missing-shard", "error")]
    [finding] = report.findings
    assert finding.count > 5
    assert SECOND in finding.message
    for row in report.coverage.values():
        assert row.missing == 0
        assert row.unreadable > 0
        assert row.present + row.unreadable == row.expected == 12
    by = outcomes(report)
    # vllm#34859, sglang#32279: quantised loads succeeded without the shard.
    assert by["vllm-marlin"] == by["sglang-generic"] == "undefined"
    assert by["transformers"] == by["tensorrt-llm"] == "load-error"


def test_a_missing_shard_without_an_index(folder):
    (folder / SECOND).unlink()
    (folder / INDEX).unlink()
    report = audit(folder)
    assert codes(report) == [("container.missing-shard", "error")]
    assert report.coverage["input_scale"].missing == 0


def test_holes_beside_a_missing_shard_are_still_found(tmp_path):
    tensors = without(base(), "experts.0.gate_proj.input_scale")
    write_checkpoint(tmp_path / "x", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    (tmp_path / "x" / SECOND).unlink()
    assert codes(audit(tmp_path / "x")) == [("container.missing-shard", "error"), ("scale.missing", "backend")]


@pytest.mark.parametrize("cut", [10, 300])
def test_a_truncated_shard_is_audited_as_far_as_it_goes(folder, cut):
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-cut])
    report = audit(folder)
    assert codes(report) == [("container.truncated", "error")]
    [finding] = report.findings
    assert f" {cut} bytes" in finding.message
    # Scalars lie at the front of the data, so all of them are there to be judged.
    assert report.coverage["input_scale"].present == 12
    assert set(outcomes(report).values()) == {"load-error"}


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda data: data[:40], "container.truncated"),
        (lambda data: data[:5], "container.not-safetensors"),
        (lambda data: b"", "container.not-safetensors"),
        (lambda data: data[:8] + b"?" + data[9:], "container.invalid-header"),
        (lambda data: (200_000_000).to_bytes(8, "little") + data[8:], "container.header-too-large"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "container.not-safetensors"),
        (lambda data: data + b"x", "container.trailing-bytes"),
    ],
)
def test_a_damaged_shard_is_one_finding(folder, damage, code):
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(damage(data))
    report = audit(folder)
    assert codes(report) == [(code, "error")]
    assert set(outcomes(report).values()) == {"load-error"}


@pytest.mark.parametrize(
    "data", [b"", b"<html></html>", b"\x80\x02}q\0X\x04\0\0\0name", (10**8 + 1).to_bytes(8, "little") + b"{}"]
)
def test_a_lone_file_that_is_nothing_is_still_a_report(data):
    report = audit(MemorySource({"model.safetensors": data}))
    assert report.verdict == "error"
    assert [item.code.split(".")[0] for item in report.findings] == ["container"]
    assert report.format.dialect == "unknown"
    assert report.backends == ()


def test_a_stale_index_is_not_missing_shards(folder):
    for path in sorted(folder.glob("*.safetensors")):
        path.rename(path.with_name(f"part-{path.name[6:11]}.safetensors"))
    report = audit(folder)
    assert codes(report) == [("container.stale-index", "error")]
    assert report.coverage["input_scale"].present == 12


@pytest.mark.parametrize(
    ("content", "severity"),
    [(b"{,}", "error"), (b"\xef\xbb\xbf{}", "warn"), (b"version https://git-lfs.gith", "error")],
)
def test_a_broken_configuration(folder, content, severity):
    (folder / "config.json").write_bytes(content)
    report = audit(folder)
    assert codes(report) == [("config.invalid", severity)]
    assert "config.json" in report.findings[0].message


def test_the_fingerprint_is_of_the_layout_not_of_the_shards_or_values(folder, tmp_path):
    one = audit(folder).fingerprint
    write_checkpoint(tmp_path / "one", base(seed=9), config=CONFIG, hf_quant_config=QUANT)
    assert audit(tmp_path / "one").fingerprint == one
    assert audit(opened(without(base(), "experts.0.up_proj.input_scale"))).fingerprint != one
    assert one.startswith("sha256:")


def test_container_numbers_are_true(folder):
    report = audit(folder)
    shards = list(folder.glob("*.safetensors"))
    assert report.container.files == 3
    assert report.container.tensors == 49
    assert report.container.bytes == sum(path.stat().st_size for path in shards)
    assert report.container.side_bytes == sum(path.stat().st_size for path in folder.glob("*.json"))
    # Headers, and 24 scalars of four bytes: no weight.
    assert report.container.bytes_read == report.container.header_bytes + 24 * 4


def test_a_report_never_names_a_place_on_this_machine(folder):
    (folder / SECOND).write_bytes(b"")
    (folder / "more.safetensors").symlink_to("/etc/hostname")
    text = str(audit(folder))
    assert str(folder.parent) not in text
    assert "/etc" not in text


# Every fault that can be seen without reading weights gives its finding, on disk, and nothing else above info.

VISIBLE = [fault.id for fault in FAULTS.values() if fault.findings and not fault.deep]
INVISIBLE = [fault.id for fault in FAULTS.values() if not fault.findings]


@pytest.mark.parametrize("fault", VISIBLE)
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_fault_gives_the_finding_that_it_promises(folder, tmp_path, fault, projection):
    if fault == "pair-mismatch" and projection == "down":
        return
    for role in FAULTS[fault].roles:
        out = tmp_path / f"{fault}-{role}"
        inject(folder, out, fault, layer=0, expert=1, projection=projection, role=role, seed=7)
        report = audit(out)
        assert {item.code for item in report.findings} <= set(FAULTS[fault].findings)
        assert len(report.findings) == 1
        assert report.findings[0].experts == (1,)


@pytest.mark.parametrize("fault", INVISIBLE)
def test_a_fault_that_no_file_check_can_see_is_not_guessed_at(folder, tmp_path, fault):
    inject(folder, tmp_path / "out", fault, layer=0, expert=1, projection="up")
    assert codes(audit(tmp_path / "out")) == []


@pytest.mark.parametrize("fault", [fault.id for fault in FAULTS.values() if fault.deep and fault.id != "exponent-cast"])
def test_a_fault_inside_the_weights_costs_no_weight_to_read(folder, tmp_path, fault):
    inject(folder, tmp_path / "out", fault, layer=0, expert=1, projection="up")
    report = audit(tmp_path / "out")
    assert codes(report) == []
    assert report.container.bytes_read == report.container.header_bytes + 24 * 4


# The check that everybody writes, beside the audit.


def test_the_naive_check_passes_the_broken_file(folder, tmp_path):
    inject(folder, tmp_path / "out", "missing", layer=0, expert=2, projection="up")
    checkpoint = open_checkpoint(tmp_path / "out")
    check = naive_check(checkpoint)
    assert check.passed
    assert [(step.id, step.expected, step.found) for step in check.steps] == [
        ("index", 48, 48),
        ("weights", 12, 12),
        ("shapes", 12, 12),
    ]
    assert audit(tmp_path / "out").verdict == "backend"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_naive_check_fails_nothing_that_it_cannot_compare(name):
    layout = LAYOUTS[name]
    bare = naive_check(layout.open(config=None))
    assert bare.passed
    [shapes] = [step for step in bare.steps if step.id == "shapes"]
    assert bool(shapes.expected) == (layout.arrangement == "expert")
    assert naive_check(layout.open()).passed


def test_the_naive_check_does_fail_where_it_can(folder):
    index = json.loads((folder / INDEX).read_text())
    os.remove(folder / SECOND)
    check = naive_check(open_checkpoint(folder))
    assert not check.passed
    assert not check.steps[0].passed
    assert check.steps[0].expected == len(index["weight_map"])
    wrong = open_checkpoint(folder.parent / "base")
    wrong.config = {**CONFIG, "moe_intermediate_size": 48}
    assert not naive_check(wrong).steps[2].passed


def test_rows_say_what_coverage_counts(folder, tmp_path):
    inject(folder, tmp_path / "out", "nan", layer=0, expert=2, projection="up")
    done = run_audit(tmp_path / "out")
    rows = done.rows()
    assert len(rows) == 4 * 3 * 4
    assert [(row.expert, row.projection, row.role) for row in rows if row.status == "nan"] == [(2, "up", "input_scale")]
    assert {row.status for row in rows} == {"ok", "nan"}


def test_one_shard_that_was_asked_for(folder, tmp_path):
    """Its name counts the others: beside it they were not looked at, and gone they are missing."""
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / INDEX).unlink()
    for shard in shards:
        report = audit(folder / shard)
        assert codes(report) == [("audit.partial", "info")] * len(report.findings)
        assert report.findings[0].text == "audit.partial.one-shard"
        assert shard in report.findings[0].message
        assert report.coverage["input_scale"].missing == 0
        alone = tmp_path / f"alone-{shard}"
        alone.mkdir()
        for name in (shard, "config.json", "hf_quant_config.json"):
            shutil.copy(folder / name, alone / name)
        told, whole = audit(alone / shard), audit(alone)
        for report in (told, whole):
            assert [item for item in codes(report) if item[1] != "info"] == [("container.missing-shard", "error")] * 2


def test_one_shard_is_forecast_by_nobody(folder, tmp_path):
    """A forecast is about the whole, whether a number in the name or an index beside it says that there is more."""
    index = json.loads((folder / INDEX).read_text())
    healthy = audit(folder)
    assert {item.outcome for item in healthy.backends} == {"safe"}
    other = tmp_path / "unnumbered"
    other.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(folder / name, other / name)
    shards = sorted(set(index["weight_map"].values()))
    new = {shard: f"part-{number}.safetensors" for number, shard in enumerate(shards)}
    for shard in shards:
        shutil.copy(folder / shard, other / new[shard])
    renamed = {name: new[shard] for name, shard in index["weight_map"].items()}
    (other / INDEX).write_text(json.dumps({"weight_map": renamed}))
    assert {item.outcome for item in audit(other).backends} == {"safe"}
    for place, names in ((folder, shards), (other, list(new.values()))):
        for shard in names:
            content = {path.name: path.read_bytes() for path in place.iterdir() if path.suffix == ".json"}
            given = MemorySource(content | {shard: (place / shard).read_bytes()}, only=shard)
            for report in (audit(place / shard), audit(given)):
                assert report.backends == ()
                assert {item.severity for item in report.findings} == {"info"}
                [part] = [item for item in report.findings if item.text == "audit.partial.one-shard"]
                assert part.count == len(shards) - 1
                assert [row.missing for row in report.coverage.values()] == [0, 0, 0]
    # A file that no index names is whole, and so is one without any.
    (other / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(renamed, "x.safetensors")}))
    assert "audit.partial.one-shard" not in {item.text for item in audit(other / "part-0.safetensors").findings}


def test_a_file_that_is_all_is_forecast_alone(tmp_path):
    write_checkpoint(tmp_path / "x", base(), config=CONFIG, hf_quant_config=QUANT)
    [only] = (tmp_path / "x").glob("*.safetensors")
    report = audit(only)
    assert codes(report) == []
    assert {item.outcome for item in report.backends} == {"safe"}


def test_what_is_bad_in_one_shard_is_told(folder, tmp_path):
    inject(folder, tmp_path / "out", "nan", layer=0, expert=2, projection="up")
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    home = next(file for name, file in index.items() if name.endswith("experts.2.up_proj.input_scale"))
    for shard in sorted(set(index.values())):
        report = audit(tmp_path / "out" / shard)
        told = [item.code for item in report.findings if item.severity != "info"]
        assert told == (["scale.nan"] if shard == home else [])
        assert report.backends == ()


def test_the_root_of_all_folders_has_a_name():
    assert LocalSource("/").name == "/"
