"""A deep scan on a Dask cluster gives the report of a scan at home, also when a worker is killed under it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nvfp4viz import cli
from nvfp4viz.audit import run_audit, to_json
from nvfp4viz.audit.cluster import scan_on_cluster, scan_shard
from nvfp4viz.audit.deep import plan
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.checkpoint import inject, inspect, tensor, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError, content_words
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve shards or more, with a fault in the block scales."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_checkpoint(tmp_path / "sound", base(layers=6), config=CONFIG | {"num_hidden_layers": 6},
                     hf_quant_config=QUANT, max_shard_bytes=1800)  # fmt: skip
    inject(tmp_path / "sound", tmp_path / "model", "block-nan", layer=3, expert=2, projection="down", seed=1)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 12
    return tmp_path / "model"


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed", reason="requirements-dev.txt has it")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as running:
        yield running


def slow_shard(place, file, units):
    """Slow enough that a worker is killed while it works."""
    import time

    time.sleep(0.3)
    return scan_shard(place, file, units)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_a_cluster_reports_the_same(folder, cluster, monkeypatch, kill):
    monkeypatch.setattr("nvfp4viz.audit.cluster.scan_shard", slow_shard)
    here = deepen(run_audit(folder)).report
    killed = []

    def elsewhere(work):
        for done in scan_on_cluster(cluster.scheduler_address, str(folder), work):
            if kill and not killed:
                worker = cluster.workers[0]
                killed.append(worker.process.process.pid)
                os.kill(killed[0], signal.SIGKILL)
            yield done

    there = deepen(run_audit(folder), elsewhere=elsewhere).report
    assert there == here
    assert [item.code for item in there.findings] == ["block-scale.nan"]
    assert there.verdict == here.verdict
    assert bool(killed) == kill


@pytest.mark.slow
def test_the_command_line_reaches_a_cluster(folder, cluster, capsys):
    code = cli.main(["audit", str(folder), "--deep", "--scheduler", cluster.scheduler_address, "--format", "json"])
    out, err = capsys.readouterr()
    assert (code, err) == (1, "")
    assert "block-scale.nan" in out
    assert str(folder.parent) not in out


def cut(folder):
    """The shard of the faulty block scales now ends before them, and another ends early too."""
    checkpoint = inspect(folder)
    names = [f"model.layers.{layer}.mlp.experts.2.down_proj.weight" for layer in (3, 0)]
    files = [checkpoint.tensors[name].file for name in names]
    for file in files:
        header = next(header for header in checkpoint.files if header.file == file)
        os.truncate(folder / file, header.size - 8)
    return files


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_shards_that_fail_on_workers_make_a_partial_report_as_here(folder, cluster, order):
    """Shards that became shorter since the audit: whichever fails first, the report is that of a scan here."""
    here, there = run_audit(folder), run_audit(folder)
    files = cut(folder)

    def elsewhere(work):
        done = list(scan_on_cluster(cluster.scheduler_address, str(folder), work))
        assert sorted(file for file, found in done if isinstance(found, CheckpointError)) == sorted(files)
        return iter(sorted(done, reverse=order < 0))

    report = deepen(there, elsewhere=elsewhere).report
    expected = deepen(here).report
    # What a worker had read of a shard before it failed nobody tells.
    assert report.container.bytes_read <= expected.container.bytes_read
    assert msgspec.structs.replace(report, container=expected.container) == expected
    assert [(item.code, item.params["file"]) for item in report.findings] == [
        *(("container.unreadable", file) for file in sorted(files)), ("audit.partial", sorted(files)[0]),
    ]  # fmt: skip
    assert report.backends == ()
    assert there.checkpoint.lost.keys() == set(files)


def leave(cluster):
    cluster.scale(0)
    with contextlib.suppress(TimeoutError):
        cluster.sync(cluster._correct_state)


@pytest.mark.slow
def test_nobody_waits_for_ever_for_a_worker(folder, cluster, monkeypatch):
    """None left after the first shard: the rest of the shards is told of, and kept for --resume."""
    monkeypatch.setattr("nvfp4viz.audit.cluster.PATIENCE", 2.0)
    monkeypatch.setattr("nvfp4viz.audit.cluster.scan_shard", slow_shard)
    done = run_audit(folder)
    work = plan(done.checkpoint, done.view, ())
    found, told = {}, []
    for file, each in scan_on_cluster(cluster.scheduler_address, str(folder), work, told.append):
        found[file] = each
        if len(found) == 1:
            assert told == []
            leave(cluster)
    assert found.keys() == work.keys()
    assert told == [2.0]
    lost = [each for each in found.values() if isinstance(each, CheckpointError)]
    assert {each.code for each in lost} == {"source.no-worker"}
    assert 0 < len(lost) < len(work)
    assert "2" in lost[0].text("en")["why"]
    assert "2" in lost[0].text("zh")["why"]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("quiet", [True, False])
def test_a_cluster_without_workers_is_told_of_at_once(folder, cluster, monkeypatch, capsys, language, quiet):
    """Before the wait, not after it; and then one error, not one a shard."""
    monkeypatch.setattr("nvfp4viz.audit.cluster.PATIENCE", 3.0)
    leave(cluster)
    heard = []

    class Told:
        def write(self, text):
            heard.append((time.monotonic(), text))

        def flush(self):
            pass

        def isatty(self):
            return False

    monkeypatch.setattr(sys, "stderr", Told())
    options = ["audit", str(folder), "--deep", "--scheduler", cluster.scheduler_address, "--language", language]
    code = cli.main(options + ["--quiet"] * quiet)
    assert code == 2
    assert capsys.readouterr().out == ""
    said = content_words("cli.toml", language, "progress.no-workers", seconds="3")
    at = [when for when, text in heard if said in text]
    if quiet:
        assert at == []
    else:
        assert heard[-1][0] - at[0] > 2
        assert len(at) == 1
    what = CheckpointError("source.no-workers", address=cluster.scheduler_address, seconds="3").text(language)
    assert what["what"] in "".join(text for _, text in heard)


@pytest.mark.slow
def test_what_a_worker_found_may_be_lost_with_it(folder, cluster, monkeypatch):
    """All workers leave when a shard is finished and nobody has fetched its records yet."""
    from distributed import Future

    monkeypatch.setattr("nvfp4viz.audit.cluster.PATIENCE", 2.0)
    done = run_audit(folder)
    work = plan(done.checkpoint, done.view, ())
    fetch, asked = Future.result, []

    def late(future, timeout=None):
        if not asked:
            leave(cluster)
        asked.append(future.key)
        return fetch(future, timeout)

    monkeypatch.setattr(Future, "result", late)
    with pytest.raises(CheckpointError) as caught:
        dict(scan_on_cluster(cluster.scheduler_address, str(folder), work))
    assert caught.value.code == "source.no-workers"


def failing_shard(place, file, units):
    """A worker whose disk does not answer for one shard, as long as there is a file that says so."""
    if (Path(place).parent / "fails").exists() and any(".layers.3." in unit.name for unit in units):
        raise CheckpointError("source.unreadable", name=file, reason="Input/output error")
    return scan_shard(place, file, units)


@pytest.mark.slow
def test_the_command_line_goes_on_after_shards_that_fail(folder, cluster, capsys, monkeypatch):
    """Exit 2 and a report of the rest; with --resume only what failed is scanned again."""
    monkeypatch.setattr("nvfp4viz.audit.cluster.scan_shard", failing_shard)
    asked = []

    def scanned(address, place, work, *told):
        asked.append(list(work))
        return scan_on_cluster(address, place, work, *told)

    monkeypatch.setattr("nvfp4viz.audit.cluster.scan_on_cluster", scanned)
    options = ["audit", str(folder), "--deep", "--scheduler", cluster.scheduler_address, "--format", "json"]
    (folder.parent / "fails").touch()
    assert cli.main(options) == 2
    report = json.loads(capsys.readouterr().out)
    assert {item["code"] for item in report["findings"]} == {"container.unreadable", "audit.partial"}
    (folder.parent / "fails").unlink()
    assert cli.main([*options, "--resume"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [item["code"] for item in report["findings"]] == ["block-scale.nan"]
    view = run_audit(folder)
    units = plan(view.checkpoint, view.view, ())
    assert asked[0] == list(units)
    assert asked[1] == [file for file in units if any(".layers.3." in unit.name for unit in units[file])]
    assert 0 < len(asked[1]) < len(asked[0])


@pytest.mark.slow
def test_a_folder_that_the_workers_do_not_have(folder, cluster):
    """It has not changed: the report says that the workers cannot scan it."""
    done = run_audit(folder)
    files = sorted(plan(done.checkpoint, done.view, ()))
    place = f"{folder}-elsewhere"
    report = deepen(done, elsewhere=lambda work: scan_on_cluster(cluster.scheduler_address, place, work)).report
    assert {item.text for item in report.findings} == {"source.worker", "audit.partial.unread.codes"}
    assert sorted(done.checkpoint.lost) == files
    assert str(folder.parent) not in to_json(report)


class Dead:
    """Stands in for a task whose workers all died."""

    def release(self):
        pass


SCHEDULER = """
import time
from distributed import LocalCluster
cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None)
print(cluster.scheduler_address, flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_a_scheduler_that_goes_away(folder, monkeypatch, capfd):
    """One that is killed takes its tasks along: an error for each shard that is left, at once, and no traceback."""
    pytest.importorskip("distributed", reason="requirements-dev.txt has it")
    monkeypatch.setattr("nvfp4viz.audit.cluster.scan_shard", slow_shard)
    work = plan(inspect(folder), run_audit(folder).view, ())
    found = {}
    # Its worker imports `slow_shard`.
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    start = [sys.executable, "-c", SCHEDULER]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=paths) as scheduler:
        try:
            address = scheduler.stdout.readline().strip()
            for file, done in scan_on_cluster(address, str(folder), work):
                scheduler.kill()
                found[file] = done
        finally:
            scheduler.kill()
    assert found.keys() == work.keys()
    lost = [done for done in found.values() if isinstance(done, CheckpointError)]
    assert lost
    assert {error.code for error in lost} == {"source.scheduler-gone"}
    assert "Traceback" not in capfd.readouterr().err


def test_a_shard_under_which_all_workers_died(monkeypatch):
    distributed = pytest.importorskip("distributed", reason="requirements-dev.txt has it")

    class Client:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def as_current(self):
            return contextlib.nullcontext()

        def submit(self, *_, **__):
            return Dead()

    monkeypatch.setattr(distributed, "Client", Client)
    killed = RuntimeError("KilledWorker at tcp://10.1.2.3:4567")
    monkeypatch.setattr(
        "nvfp4viz.audit.cluster._finished", lambda _, futures, alone: [(each, killed) for each in futures]
    )
    [(file, found)] = scan_on_cluster("tcp://127.0.0.1:1", "here", {"a.safetensors": []})
    assert (file, found.code, found.params["reason"]) == ("a.safetensors", "source.worker", "RuntimeError")
    assert "10.1.2.3" not in str(found)


def test_a_task_is_a_scan_of_one_shard(folder):
    checkpoint = inspect(folder)
    for file, units in plan(checkpoint, run_audit(checkpoint).view, ()).items():
        scans = scan_shard(str(folder), file, units)
        assert [scan.nbytes for scan in scans] == [unit.end - unit.begin for unit in units]


def test_bytes_that_others_read_are_counted_as_here(tmp_path, monkeypatch):
    """What lies between two tensors of a scan comes along in one read, wherever that is done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    between = tensor(np.zeros(5, np.uint8))
    write_checkpoint(tmp_path / "model", {**base(), "model.layers.0.mlp.experts.1.other": between}, config=CONFIG,
                     hf_quant_config=QUANT)  # fmt: skip
    here = deepen(run_audit(tmp_path / "model")).report

    def elsewhere(work):
        return ((file, scan_shard(str(tmp_path / "model"), file, units)) for file, units in work.items())

    assert deepen(run_audit(tmp_path / "model"), elsewhere=elsewhere).report == here
    assert here.container.bytes_read > run_audit(tmp_path / "model").report.container.bytes_read


@pytest.mark.parametrize("address", ["nonsense://x", "nonsense", "tcp://nonsense"])
def test_nobody_at_the_address(monkeypatch, address):
    distributed = pytest.importorskip("distributed", reason="requirements-dev.txt has it")
    # A client that fails at an address prints a traceback later.
    monkeypatch.setattr(distributed, "Client", None)
    with pytest.raises(InputError) as caught:
        next(scan_on_cluster(address, "here", {"a": []}))
    assert caught.value.code == "cli.scheduler"


def test_without_dask(monkeypatch):
    """The extra is optional: the command says what is missing, and imports nothing of it otherwise."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError) as caught:
        next(scan_on_cluster("tcp://127.0.0.1:1", "here", {"a": []}))
    assert caught.value.code == "cli.no-dask"
    done = subprocess.run(
        [sys.executable, "-c", "import sys, nvfp4viz.audit.cluster; print('dask' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
