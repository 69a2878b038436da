"""A deep scan on a Dask cluster gives the report of a scan at home, also when a worker is killed under it."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from nvfp4viz import cli
from nvfp4viz.audit import run_audit
from nvfp4viz.audit.cluster import scan_on_cluster, scan_shard
from nvfp4viz.audit.deep import plan
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.checkpoint import inject, inspect, tensor, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError
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
    distributed = pytest.importorskip("distributed", reason="an optional extra: requirements-cluster.txt")
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


@pytest.mark.slow
def test_a_folder_that_the_workers_do_not_have(folder, cluster):
    checkpoint = inspect(folder)
    work = plan(checkpoint, run_audit(checkpoint).view, ())
    with pytest.raises(CheckpointError) as caught:
        list(scan_on_cluster(cluster.scheduler_address, str(folder) + "-elsewhere", work))
    assert caught.value.code == "source.not-found"


class Dead:
    """Stands in for a task whose workers all died."""

    def result(self):
        raise RuntimeError("KilledWorker at tcp://10.1.2.3:4567")


def test_a_shard_under_which_all_workers_died(monkeypatch):
    distributed = pytest.importorskip("distributed", reason="an optional extra: requirements-cluster.txt")

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
    monkeypatch.setattr(distributed, "as_completed", list)
    with pytest.raises(CheckpointError) as caught:
        next(scan_on_cluster("tcp://127.0.0.1:1", "here", {"a.safetensors": []}))
    assert caught.value.code == "source.worker"
    assert "10.1.2.3" not in str(caught.value)


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
    distributed = pytest.importorskip("distributed", reason="an optional extra: requirements-cluster.txt")
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
