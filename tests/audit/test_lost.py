"""A source that fails after its headers were read: a report of the rest, exit 2, and no forecast."""

import json

import numpy as np
import pytest

from nvfp4viz import commands
from nvfp4viz.audit import run_audit
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.checkpoint import inject_tensors, inspect, tensor, write_checkpoint
from nvfp4viz.cli import main
from nvfp4viz.errors import InputError
from tests.audit.layouts import HIDDEN, LAYOUTS, ct_linear, linear
from tests.checkpoint.web_server import Site, apart, header_end, serve

CHOSEN = (
    "modelopt", "modelopt, shared expert", "compressed-tensors", "NVFP4_AWQ", "MIXED_PRECISION", "fused", "stacked",
    "Quark NVFP4", "W4A16", "DeepSeek V4, three formats", "gpt-oss",
)  # fmt: skip
INDEX = "model.safetensors.index.json"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("nvfp4viz.checkpoint.transport.PAUSE", 0.001)


def written(layout, folder, tensors=None, shard=6000):
    tensors = layout.tensors() if tensors is None else tensors
    write_checkpoint(
        folder, tensors, config=layout.config, hf_quant_config=layout.quant, max_shard_bytes=shard, overwrite=True
    )
    return folder


def cut(folder, file):
    """What is left of a file whose writer has begun anew."""
    path = folder / file
    path.write_bytes(path.read_bytes()[: header_end(path.read_bytes())])


def losing_each(folder, how="cut"):
    """Each shard in turn, with the audit of a checkpoint that loses it between its header and its numbers."""
    for header in inspect(folder).files:
        kept = (folder / header.file).read_bytes()
        checkpoint = inspect(folder)
        cut(folder, header.file) if how == "cut" else (folder / header.file).unlink()
        done = run_audit(checkpoint)
        (folder / header.file).write_bytes(kept)
        yield header.file, done


def lost_only(report, healthy, files):
    """Nothing but what was lost is said beside what a healthy file's report says, and nothing of backends."""
    worse = [(item.code, item.severity, item.params["file"]) for item in report.findings if item.severity != "info"]
    assert worse == [("container.unreadable", "warn", file) for file in files]
    [note] = [item for item in report.findings if item.text == "audit.partial.unread.numbers"]
    assert (note.count, note.params["file"]) == (len(files), files[0])
    # What is said of headers stays; a note about numbers may have fewer of them.
    assert {item.text for item in report.findings} - {item.text for item in healthy.findings} <= {
        "audit.partial.unread.numbers", "source.changed", "source.status", "source.forbidden", "source.cut",
        "source.connection", "source.unreadable",
    }  # fmt: skip
    assert report.backends == ()
    assert report.verdict == "warn"
    assert report.fingerprint == healthy.fingerprint
    for role, row in report.coverage.items():
        assert (row.missing, row.invalid, row.expected) == (0, 0, healthy.coverage[role].expected)
        assert row.present + row.unreadable == row.expected


@pytest.mark.parametrize("how", ["cut", "gone"])
@pytest.mark.parametrize("id", CHOSEN)
def test_a_file_that_changes_while_it_is_read(id, how, tmp_path):
    layout = LAYOUTS[id]
    folder = written(layout, tmp_path / "x")
    healthy = run_audit(folder).report
    seen = 0
    for file, done in losing_each(folder, how):
        if not done.checkpoint.lost:
            # A shard of weights alone is not read beyond its header.
            assert done.report.findings == healthy.findings
            continue
        seen += 1
        lost_only(done.report, healthy, [file])
        text = commands.to_json(done.report)
        assert str(tmp_path) not in text
        assert file in text
        for row in done.rows():
            entry = done.checkpoint.tensors.get(row.tensor)
            gone = entry is not None and entry.file == file and row.role in ("input_scale", "weight_scale_2")
            assert (row.status == "unreadable") == (gone and row.status != "not-needed")
            assert row.status != "unreadable" or row.value is None
        # The report's other forms are made too, and a repair is refused.
        with pytest.raises(InputError) as caught:
            plan_repair(done, "constant")
        assert caught.value.code == "repair.unmendable"
    assert seen or layout.block == "MXFP4"


def test_other_shards_are_still_judged(tmp_path):
    """Faults of the shards that were read, and names that a lost shard's header lacks."""
    layout = LAYOUTS["modelopt"]
    at = {"layer": 0, "config": layout.config, "hf_quant_config": layout.quant, "role": "input_scale"}
    tensors = inject_tensors(layout.tensors(), "nan", expert=1, projection="down", **at)
    tensors = inject_tensors(tensors, "missing", expert=2, projection="up", **at)
    folder = written(layout, tmp_path / "x", tensors)
    whole = {(item.code, item.experts) for item in run_audit(folder).report.findings}
    assert whole == {("scale.nan", (1,)), ("scale.missing", (2,))}
    for file, done in losing_each(folder):
        bad = done.checkpoint.tensors[layout.name(1, "down", "input_scale")].file
        expected = whole if bad != file else {("scale.missing", (2,))}
        found = {(item.code, item.experts) for item in done.report.findings if item.severity in ("backend", "error")}
        assert found == expected
        assert bool(done.report.backends) == (not done.checkpoint.lost)


@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
def test_numbers_of_ordinary_layers_and_of_the_cache(names, tmp_path):
    layout = LAYOUTS[names]
    make = ct_linear if layout.divisors else linear
    own = {f"{ATTENTION}.{kind}_proj": make(f"{ATTENTION}.{kind}_proj", HIDDEN, HIDDEN) for kind in "qkv"}
    tensors = {**layout.tensors(), **{key: item for part in own.values() for key, item in part.items()}}
    tensors |= {f"{ATTENTION}.{kind}_scale": tensor(np.float32(0.5)) for kind in "kv"}
    folder = written(layout, tmp_path / "x", tensors)
    healthy = run_audit(folder).report
    lost = set()
    for file, done in losing_each(folder):
        if done.checkpoint.lost:
            lost |= {entry.name for entry in done.checkpoint.tensors.values() if entry.file == file}
            lost_only(done.report, healthy, [file])
    assert {f"{ATTENTION}.k_scale", *(name for name in tensors if "proj.input" in name)} <= lost


# ------------------------------------------------------------------------------------------------- over HTTP


STATUS = {500: "source.status", 403: "source.forbidden", 404: "source.changed", 0: "source.cut"}


@pytest.mark.parametrize("status", STATUS)
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "stacked"])
def test_a_server_that_fails_for_one_shard(id, status, tmp_path, capsys):
    layout = LAYOUTS[id]
    files, begins = apart(written(layout, tmp_path / "x"))
    with serve(Site(files, lists=True)) as site:
        healthy = run_audit(site.address).report
        checkpoint = inspect(site.address)
        read = sorted({entry.file for entry in checkpoint.tensors.values() if entry.dtype == "F32"})
        file = read[0]
        site.late = {file: (begins[file], status)}
        report = run_audit(site.address).report
        lost_only(report, healthy, [file])
        [finding] = [item for item in report.findings if item.code == "container.unreadable"]
        assert finding.text == STATUS[status]
        assert main(["audit", site.address, "--quiet", "--format", "json"]) == 2
        assert json.loads(capsys.readouterr().out)["backends"] == []
        assert main(["audit", site.address, "--quiet", "--fail-on", "never"]) == 2
        assert file in capsys.readouterr().out
        # Each of them is asked for, and each is named.
        site.late = {file: (begins[file], status) for file in read}
        every = run_audit(site.address).report
        lost_only(every, healthy, read)


def test_a_lost_shard_is_asked_again_only_by_another_audit(tmp_path):
    layout = LAYOUTS["modelopt, shared expert"]
    files, begins = apart(written(layout, tmp_path / "x"))
    with serve(Site(files, lists=True)) as site:
        checkpoint = inspect(site.address)
        site.late = {file: (begin, 403) for file, begin in begins.items()}
        before = len(site.asked)
        done = run_audit(checkpoint)
        asked = [path for path, *_ in site.asked[before:]]
        assert len(asked) == len(set(asked)) > 1
        site.late = {}
        assert deepen(done).checkpoint.unread == tuple(sorted(path.removeprefix("/") for path in asked))
        assert not {path for path, *_ in site.asked[before + len(asked) :]} & set(asked)
        # The checkpoint itself knows nothing of it.
        assert checkpoint.unread == ()
        assert run_audit(checkpoint).report.backends


def test_the_command_line_says_it_of_a_folder(tmp_path, capsys, monkeypatch):
    layout = LAYOUTS["modelopt"]
    folder = written(layout, tmp_path / "x")
    file = inspect(folder).tensors[layout.name(1, "down", "input_scale")].file
    opened = commands.inspect

    def then_cut(*arguments, **more):
        found = opened(*arguments, **more)
        cut(folder, file)
        return found

    kept = (folder / file).read_bytes()
    monkeypatch.setattr(commands, "inspect", then_cut)
    for form in ("text", "json", "html", "md", "csv"):
        (folder / file).write_bytes(kept)
        assert main(["audit", str(folder), "--quiet", "--format", form]) == 2
        out = capsys.readouterr().out
        assert str(tmp_path) not in out
        assert ("unreadable" if form == "csv" else file) in out
    (folder / file).write_bytes(kept)
    assert main(["audit", str(folder), "--quiet", "--fail-on", "warn"]) == 1
    for more in ([], ["--csv", str(tmp_path / "out.csv")]):
        (folder / file).write_bytes(kept)
        assert main(["coverage", str(folder), *more]) == 2
    assert "unreadable" in (tmp_path / "out.csv").read_text()
    assert "unreadable" in capsys.readouterr().out
    for policy in ("peer-max", "weight-only"):
        (folder / file).write_bytes(kept)
        assert main(["repair", str(folder), str(tmp_path / "out"), "--policy", policy]) == 64
        assert "container.unreadable" in capsys.readouterr().err


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_the_address_of_one_shard_is_no_word_about_the_whole(numbered, lists, tmp_path, capsys):
    """No backend is forecast, and nothing is wrong: exit code 0, as for all that was asked for and was read."""
    layout = LAYOUTS["modelopt"]
    files, _ = apart(written(layout, tmp_path / "x"))
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    if not numbered:
        new = {shard: f"part-{number}.safetensors" for number, shard in enumerate(shards)}
        index = json.loads(files[INDEX])["weight_map"]
        files = {new.get(name, name): data for name, data in files.items()}
        files[INDEX] = json.dumps({"weight_map": {name: new[shard] for name, shard in index.items()}}).encode()
        shards = sorted(new.values())
    with serve(Site(files, lists=lists)) as site:
        assert {item.outcome for item in run_audit(site.address).report.backends} == {"safe"}
        for shard in shards:
            before = len(site.asked)
            assert main(["audit", f"{site.address}/{shard}", "--quiet", "--format", "json"]) == 0
            report = json.loads(capsys.readouterr().out)
            assert report["backends"] == []
            assert report["verdict"] == "info"
            assert any(f"{len(shards) - 1} other" in item["message"] for item in report["findings"])
            asked = {path.rpartition("/")[2] for path, *_ in site.asked[before:]}
            # A number says enough, and an index may be large.
            assert (INDEX in asked) == (not numbered)
            assert asked.isdisjoint(set(shards) - {shard})


# ------------------------------------------------------------------------------------------------- --deep


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_deep_goes_on_with_the_other_shards(tmp_path, how, monkeypatch):
    """And a second scan of the same files goes on where this one could not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = LAYOUTS["modelopt"]
    at = {"layer": 0, "config": layout.config, "hf_quant_config": layout.quant}
    tensors = inject_tensors(layout.tensors(), "block-nan", expert=1, projection="down", **at)
    tensors = inject_tensors(tensors, "zero-weight", expert=6, projection="down", **at)
    folder = written(layout, tmp_path / "x", tensors)
    done = run_audit(folder)
    file = done.checkpoint.tensors[layout.name(6, "down", "weight")].file
    other = done.checkpoint.tensors[layout.name(1, "down", "weight_scale")].file
    assert file != other
    cut(folder, file) if how == "cut" else (folder / file).unlink()
    report = deepen(done).report
    assert [item.code for item in report.findings if item.severity != "info"] == [
        "block-scale.nan", "container.unreadable",
    ]  # fmt: skip
    [note] = [item for item in report.findings if item.text == "audit.partial.unread.codes"]
    assert note.params["file"] == file
    assert report.backends == ()
    assert done.checkpoint.unread == (file,)


def test_deep_over_http(tmp_path, capsys):
    layout = LAYOUTS["modelopt"]
    files, begins = apart(written(layout, tmp_path / "x"))
    with serve(Site(files, lists=True, tagged=True)) as site:
        checkpoint = inspect(site.address)
        file = checkpoint.tensors[layout.name(6, "down", "weight")].file
        numbers = [entry.end for entry in checkpoint.tensors.values() if entry.file == file and entry.dtype == "F32"]
        site.late = {file: (max(numbers, default=begins[file]), 500)}
        assert main(["audit", site.address, "--quiet", "--deep", "--format", "json"]) == 2
        report = json.loads(capsys.readouterr().out)
        assert [item["code"] for item in report["findings"]] == ["container.unreadable", "audit.partial"]
        assert report["backends"] == []
        # What was read is kept, and the rest follows.
        site.late = {}
        before = len(site.asked)
        assert main(["audit", site.address, "--quiet", "--deep", "--resume", "--format", "json"]) == 0
        again = {path.rpartition("/")[2] for path, *_ in site.asked[before:] if path.endswith(".safetensors")}
        assert again == set(begins)
        assert json.loads(capsys.readouterr().out)["findings"] == []
