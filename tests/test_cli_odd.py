"""What an engineer on call meets: odd names, terminals, disks and places; nothing crashes, hangs or tells a path."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from nvfp4viz import commands
from nvfp4viz.checkpoint import copies, write_checkpoint
from tests.audit.layouts import bf16
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, snapshot, without
from tests.checkpoint.web_server import Site, serve
from tests.test_cli import run

ROOT = Path(__file__).parents[1]
E = "model.layers.0.mlp.experts"
WRITERS = [
    ("inject", "--fault", "nan", "--layer", "0", "--expert", "1", "--projection", "down"),
    ("repair", "--policy", "weight-only", "--apply"),
]


@pytest.fixture
def holed(tmp_path, monkeypatch):
    tensors = without(base(), f"{E}.2.up_proj.input") | {"lm_head.weight": bf16(64, 64)}
    write_checkpoint(tmp_path / "holed", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=6000)
    monkeypatch.chdir(tmp_path)
    return Path("holed")


# ------------------------------------------------------------------------------------------- terminals and JSON


@pytest.mark.parametrize("form", ["text", "json", "md", "csv", "html"])
def test_a_terminal_without_utf_8(holed, form):
    """ISO-8859-1 and ASCII know no arrow: people see escapes, programs get UTF-8."""
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4viz", "audit", "holed", "--format", form, "--language", "zh"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    text = done.stdout.decode("utf-8")
    if form == "json":
        assert json.loads(text)["verdict"] == "backend"
    assert ("\\u" in text) == (form == "text")


@pytest.mark.parametrize("command", [("audit", "--format", "json"), ("audit",), ("coverage",), ("diff", "holed")])
def test_half_a_surrogate_pair_in_a_configuration(capsys, holed, command):
    """JSON may name it; no UTF-8 can hold it."""
    for file in ("config.json", "hf_quant_config.json"):
        content = json.loads((holed / file).read_text())
        content["architectures"] = ["\udc00x"]
        content.setdefault("quantization", {})["quant_method"] = "\ud800"
        (holed / file).write_text(json.dumps(content))
    name, *rest = command
    code, out, err = run(capsys, name, "holed", *rest)
    assert (code in (0, 1), err) == (True, "")
    assert out.encode("utf-8")


# ------------------------------------------------------------------------------------------- the hub's cache


@pytest.fixture
def cache(holed):
    """As `huggingface_hub` lays it out: links in a snapshot, the files among the blobs."""
    blobs, snap = Path("models--a--b/blobs"), Path("models--a--b/snapshots/0123abc")
    blobs.mkdir(parents=True)
    snap.mkdir(parents=True)
    for number, path in enumerate(sorted(holed.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snap / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snap


def test_a_snapshot_of_the_hub_s_cache(capsys, holed, cache):
    there, here = (json.loads(run(capsys, "audit", place, "--format", "json")[1]) for place in (cache, holed))
    assert {**there, "source": ""} == {**here, "source": ""}
    before = snapshot(Path("models--a--b/blobs"))
    assert run(capsys, "repair", cache, "out", "--policy", "peer-max", "--apply")[0] == 0
    assert run(capsys, "audit", "out")[0] == 0
    assert snapshot(Path("models--a--b/blobs")) == before
    assert not any(path.is_symlink() for path in Path("out").iterdir())


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("place", ["models--a--b", "models--a--b/snapshots"])
def test_the_folder_around_a_checkpoint(capsys, cache, place, language):
    code, out, err = run(capsys, "audit", place, "--language", language)
    assert (code, out) == (2, "")
    assert ("snapshots/0123abc" if place.endswith("b") else "0123abc") in err
    assert os.getcwd() not in err


# ------------------------------------------------------------------------------------------- where a report goes


def test_a_report_for_a_device_leaves_the_device(capsys, holed, tmp_path):
    """A report moved into the place of /dev/null would be the end of many things."""
    os.mkfifo("pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True)
    code, out, _ = run(capsys, "audit", holed, "--format", "json", "--output", "pipe")
    assert json.loads(reader.communicate(timeout=30)[0])["verdict"] == "backend"
    assert (code, out) == (1, "")
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    assert sorted(os.listdir()) == ["holed", "pipe"]


def test_a_report_for_a_link_goes_where_it_leads(capsys, holed):
    Path("reports").mkdir()
    Path("latest.json").symlink_to("reports/today.json")
    assert run(capsys, "audit", holed, "--format", "json", "--output", "latest.json")[0] == 1
    assert Path("latest.json").is_symlink()
    assert json.loads(Path("reports/today.json").read_text())["verdict"] == "backend"
    assert os.listdir("reports") == ["today.json"]


def test_a_report_does_not_replace_weights(capsys, holed):
    before = snapshot(holed)
    for command in (("audit", "--output"), ("coverage", "--csv")):
        shard = min(holed.glob("*.safetensors"))
        code, out, err = run(capsys, command[0], holed, command[1], shard)
        assert (code, out) == (64, "")
        assert shard.name in err
    assert snapshot(holed) == before


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "tokenizer.json"]
)
@pytest.mark.parametrize("way", ["plain", "link", "hard link"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_report_does_not_replace_the_source(capsys, holed, name, way, language):
    if name == "tokenizer.json":
        (holed / name).write_text("{}")
    before, place = snapshot(holed), holed / name
    if way != "plain":
        place = Path("report.json")
        (place.hardlink_to if way == "hard link" else place.symlink_to)(Path(os.path.realpath(holed / name)))
    shutil.copytree(holed, "other")
    shard = min(holed.glob("*.safetensors"))
    for command in (
        ("audit", holed, "--output"), ("audit", shard, "--output"), ("coverage", holed, "--csv"),
        ("diff", "other", holed, "--output"), ("diff", holed, "other", "--format", "json", "--output"),
        ("audit", holed / "model.safetensors.index.json", "--format", "html", "--output"),
    ):  # fmt: skip
        code, out, err = run(capsys, *command, place, "--language", language)
        assert (code, out) == (64, "")
        assert len(err.splitlines()) == 3
        assert os.getcwd() not in err
    assert snapshot(holed) == before


def test_a_report_in_the_source_s_folder_under_a_name_of_its_own(capsys, holed):
    """What belongs to the checkpoint is refused, not its folder; and a report may be written again."""
    for name in ("report.json", "notes.md", "slots.csv"):
        for _ in range(2):
            assert run(capsys, "audit", holed, "--output", holed / name)[0] == 1
    Path("elsewhere").mkdir()
    assert run(capsys, "audit", holed, "--output", "elsewhere/config.json")[0] == 1
    # Nothing of this name is there; a report in its place would be read as the checkpoint's.
    assert run(capsys, "audit", holed, "--output", holed / "generation_config.json")[0] == 64


def test_a_report_does_not_replace_what_the_hub_s_cache_holds(capsys, cache):
    before = snapshot(Path("models--a--b/blobs"))
    blob = os.path.realpath(cache / "config.json")
    for place in (cache / "config.json", blob):
        assert run(capsys, "audit", cache, "--output", place)[0] == 64
    assert snapshot(Path("models--a--b/blobs")) == before


COMMANDS = [
    ("audit", "holed"),
    ("audit", "holed", "--format", "json"),
    ("audit", "holed", "--format", "html", "--output", "-"),
    ("coverage", "holed"),
    ("coverage", "holed", "--csv", "-"),
    ("show", "holed", f"{E}.0.up_proj.weight"),
    ("diff", "holed", "holed"),
    ("diff", "holed", "holed", "--format", "json"),
    ("repair", "holed", "out", "--policy", "weight-only"),
    ("inject", "holed", "out", "--fault", "nan", "--layer", "0", "--expert", "1", "--projection", "down"),
    ("--help",),
    ("audit", "--help"),
    ("--version",),
]


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    """What a shell makes of a line in which nvfp4viz is the program."""
    line = line.replace("nvfp4viz", f"{sys.executable} -m nvfp4viz", 1)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("stdout", ["> /dev/full", ">&-"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_answer_that_cannot_be_written(holed, command, stdout):
    """A gate takes 1 for a finding, and nobody reads a traceback."""
    done = shell(f"nvfp4viz {' '.join(command)} {stdout}")
    reason = "No space left on device" if "full" in stdout else "Bad file descriptor"
    assert (done.returncode, done.stdout) == (64, "")
    assert len(done.stderr.splitlines()) == 3
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("audit nowhere 2> /dev/full", 2),
        ("audit nowhere 2>&-", 2),
        ("audit nowhere >&- 2>&-", 2),
        ("audit 2> /dev/full", 64),
        ("audit holed > /dev/full 2> /dev/full", 64),
        ("audit holed <&- >&- 2>&-", 64),
        ("audit holed > /dev/null 2>&-", 1),
        ("audit holed --output report.json >&- 2>&-", 1),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_the_exit_code_says_it_where_no_word_can(holed, line, code):
    done = shell(f"nvfp4viz {line}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_the_longest_names(capsys, holed, tmp_path):
    """What is written beside its place first needs a name, too: a name of 250 letters has no room for more."""
    for name in ("o" * 250, "卷" * 83):
        assert run(capsys, "audit", holed, "--output", name)[0] == 1
        assert Path(name).is_file()
        Path(name).unlink()
        assert run(capsys, "repair", holed, name, "--policy", "weight-only", "--apply")[0] == 0
        assert run(capsys, "audit", name)[0] == 0
        shutil.rmtree(name)
    for command in WRITERS:
        code, _, err = run(capsys, command[0], holed, "x" * 300, *command[1:])
        assert code == 2
        assert "File name too long" in err
        assert str(tmp_path) not in err
    assert os.listdir() == ["holed"]


# ------------------------------------------------------------------------------------------- where a copy goes


@pytest.mark.parametrize("command", WRITERS, ids=["inject", "repair"])
@pytest.mark.parametrize("place", [".", "holed", "holed/inside", "taken", "link"])
def test_places_that_are_none(capsys, holed, command, place):
    Path("taken").mkdir()
    Path("taken/file").write_text("x")
    Path("link").symlink_to("/nowhere")
    before = sorted(str(path) for path in Path().rglob("*"))
    code, _, err = run(capsys, command[0], holed, place, *command[1:])
    assert code == 64
    assert len(err.splitlines()) == 3
    assert os.getcwd() not in err
    assert sorted(str(path) for path in Path().rglob("*")) == before


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("command", WRITERS, ids=["inject", "repair"])
def test_room_is_looked_for_before_anything_is_written(capsys, holed, monkeypatch, command, language):
    """Links need none: only what changes, or cannot be linked, has to fit."""
    written = []
    monkeypatch.setattr(copies, "_rewrite", lambda *rest: written.append(rest))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    code, _, err = run(capsys, command[0], holed, "out", *command[1:], "--language", language)
    assert (code, written) == (2, [])
    assert "1,000" in err
    assert len(err.splitlines()) == 3
    assert os.listdir() == ["holed"]


def test_a_link_takes_no_room_and_a_copy_does(holed, tmp_path, monkeypatch):
    from nvfp4viz.audit.repair import apply_repair, plan_repair

    asked = []
    monkeypatch.setattr(copies, "_refuse_full", lambda target, out, sizes, other: asked.append(set(sizes)))
    plan = plan_repair(holed, "peer-max")
    apply_repair(plan, "linked")
    real = os.link
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    apply_repair(plan, "copied")
    monkeypatch.setattr(os, "link", real)
    shards = {path.name for path in holed.glob("*.safetensors")}
    assert [names & shards for names in asked] == [set(), shards]
    assert snapshot(Path("linked")) == snapshot(Path("copied"))


def test_the_place_is_looked_at_before_hours_of_reading(capsys, holed, monkeypatch):
    def never(*_, **__):
        raise AssertionError("read all weights for nothing")

    monkeypatch.setattr(commands, "plan_repair", never)
    Path("taken").mkdir()
    Path("taken/file").write_text("x")
    assert run(capsys, "repair", holed, "taken", "--policy", "weight-only", "--deep", "--apply")[0] == 64
    with serve(Site({path.name: path.read_bytes() for path in holed.iterdir()})) as site:
        code, _, err = run(capsys, "repair", site.address, "out", "--policy", "weight-only", "--deep", "--apply")
    assert (code, "not on this machine" in err) == (64, True)


def test_progress_of_a_copy_reaches_its_end(holed):
    from nvfp4viz.audit.repair import apply_repair, plan_repair

    told = []
    apply_repair(plan_repair(holed, "weight-only"), "out", progress=lambda *at: told.append(at))
    assert {stage for stage, _, _ in told} == {"copy"}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert all(done <= of for _, done, of in told)


@pytest.mark.parametrize("command", [*COMMANDS[:8], ("--help",)], ids=" ".join)
def test_who_stops_reading_changes_no_exit_code(holed, command):
    """`nvfp4viz audit … | grep -q` is a gate too: bash's pipefail takes the last code that is not 0."""
    line = f"{sys.executable} -m nvfp4viz {' '.join(command)}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = subprocess.run(line.split(), env=env, capture_output=True, check=False)
    reader, writer = os.pipe()
    os.close(reader)
    stopped = subprocess.run(line.split(), env=env, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (stopped.returncode, stopped.stderr) == (whole.returncode, whole.stderr)
