"""The command line: what goes to stdout, what to stderr, and the exit codes."""

import argparse
import csv
import gc
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from nvfp4viz import cli
from nvfp4viz.checkpoint import FAULTS, copies, open_checkpoint, write_checkpoint
from nvfp4viz.errors import CONTENT
from tests.audit.layouts import LAYOUTS, bf16
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, scalar, snapshot, without
from tests.checkpoint.web_server import Site, serve

ROOT = Path(__file__).parents[1]
E = "model.layers.0.mlp.experts"


@pytest.fixture
def good(tmp_path):
    write_checkpoint(tmp_path / "good", base(), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    return str(tmp_path / "good")


@pytest.fixture
def holed(tmp_path):
    write_checkpoint(tmp_path / "holed", without(base(), f"{E}.2.up_proj.input"), config=CONFIG, hf_quant_config=QUANT)
    return str(tmp_path / "holed")


@pytest.fixture
def odd(tmp_path):
    """Only a warning: an outlier."""
    tensors = {**base(), f"{E}.0.gate_proj.input_scale": scalar(2.0)}
    write_checkpoint(tmp_path / "odd", tensors, config=CONFIG, hf_quant_config=QUANT)
    return str(tmp_path / "odd")


def run(capsys, *arguments):
    """Exit code, stdout and stderr of one command line in this process."""
    try:
        code = cli.main([str(word) for word in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_a_sound_checkpoint_exits_with_0(capsys, good):
    code, out, err = run(capsys, "audit", good)
    assert (code, err) == (0, "")
    assert "verdict: ok" in out
    assert "vllm-cutlass" in out


@pytest.mark.parametrize(
    ("which", "level", "code"),
    [
        ("holed", None, 1),
        ("holed", "error", 0),
        ("holed", "backend", 1),
        ("holed", "warn", 1),
        ("holed", "never", 0),
        ("odd", None, 0),
        ("odd", "warn", 1),
        ("good", "warn", 0),
    ],
)
def test_fail_on(capsys, request, which, level, code):
    options = [] if level is None else ["--fail-on", level]
    assert run(capsys, "audit", request.getfixturevalue(which), *options)[0] == code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--tp", "2"), 1, "parallel.group-split"),  # a width of 16 is one block
        (("--tp", "1"), 0, "parallel.alignment"),
        (("--ep", "2"), 0, "loader.note"),
        (("--ep", "3"), 0, "parallel.alignment"),
    ],
)
def test_ranks(capsys, good, arguments, code, said):
    result, out, _ = run(capsys, "audit", good, *arguments)
    assert result == code
    assert said in out


@pytest.mark.parametrize("text", ["0", "-1", "x", "99999999"])
def test_what_is_no_number_of_ranks(capsys, good, text):
    code, _, err = run(capsys, "audit", good, "--tp", text)
    assert code == 64
    assert "from 1 to 65,536" in err
    assert "_ranks" not in err
    assert "65,536" in run(capsys, "audit", good, "--ep", text, "--language", "zh")[2]


def test_json_is_the_whole_of_stdout(capsys, holed):
    code, out, err = run(capsys, "audit", holed, "--format", "json", "--gpu", "120")
    data = json.loads(out)
    assert (code, err) == (1, "")
    assert data["verdict"] == "backend"
    assert data["source"] == "holed"
    assert data["auto"] == "vllm-flashinfer-cutlass"


def test_no_path_of_this_machine_unless_asked(capsys, holed, tmp_path):
    for form in ("text", "json"):
        assert str(tmp_path) not in run(capsys, "audit", holed, "--format", form)[1]
    _, out, _ = run(capsys, "audit", holed, "--format", "json", "--paths")
    assert json.loads(out)["source"] == str(Path(holed).resolve())


def test_a_report_goes_into_a_file_whole(capsys, holed, tmp_path):
    code, out, _ = run(capsys, "audit", holed, "--format", "json", "--output", str(tmp_path / "report.json"))
    assert (code, out) == (1, "")
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "backend"
    code, _, err = run(capsys, "audit", holed, "--output", str(tmp_path / "no/such/folder.json"))
    assert code == 64
    assert "folder.json" in err
    assert str(tmp_path) not in err
    assert sorted(os.listdir(tmp_path)) == ["holed", "report.json"]


def test_the_other_language(capsys, holed):
    _, out, _ = run(capsys, "audit", holed, "--language", "zh")
    assert "没有对应的张量" in out
    _, _, err = run(capsys, "audit", "nothing-here", "--language", "zh")
    assert "这里没有" in err


def test_an_unquantised_checkpoint_has_no_blocks(capsys, tmp_path):
    write_checkpoint(tmp_path / "plain", {"lm_head.weight": bf16(8, 8)}, config=CONFIG)
    code, out, _ = run(capsys, "audit", str(tmp_path / "plain"))
    assert code == 0
    assert "UNQUANTISED ·" in out
    assert "group" not in out


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"\x80\x02}q\0X\x04\0\0\0name", (2 * 10**8).to_bytes(8, "little") + b"{}"]
)
def test_a_file_that_cannot_be_read_exits_with_2_and_still_reports(capsys, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    code, out, _ = run(capsys, "audit", str(tmp_path / "model.safetensors"), "--format", "json")
    assert code == 2
    assert json.loads(out)["verdict"] == "error"


@pytest.mark.parametrize("name", ["nothing-here", "."])
def test_a_source_that_is_none_exits_with_2(capsys, tmp_path, name):
    code, out, err = run(capsys, "audit", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert str(tmp_path) not in err
    assert len(err.strip().splitlines()) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("audit",),
        ("audit", "x", "--format", "xml"),
        ("audit", "x", "--fail-on", "sometimes"),
        ("audit", "x", "--gpu", "fast"),
        ("repair", "x"),
        ("diff", "x"),
        ("show", "x"),
        ("inject", "x", "y", "--fault", "zero"),
        ("inject", "x", "y", "--fault", "zero", "--layer", "one", "--expert", "1", "--projection", "up"),
    ],
)
def test_bad_usage_exits_with_64(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (64, "")
    assert err


@pytest.mark.parametrize("gpu", ["sm_999", "sm_70", "130", "fast", "sm_1000"])
def test_a_gpu_that_was_not_read_about_is_refused_with_those_that_were(capsys, good, gpu):
    code, out, err = run(capsys, "audit", good, "--gpu", gpu)
    assert (code, out) == (64, "")
    assert gpu in err
    assert "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121," in err
    for one in ("sm_75", "sm121", "120a", "sm_101"):
        assert run(capsys, "audit", good, "--gpu", one)[0] == 0


def test_show(capsys, good):
    code, out, _ = run(capsys, "show", good, f"{E}.0.gate_proj.weight")
    assert code == 0
    data = base()[f"{E}.0.gate_proj.weight"].tobytes()
    first = data[0]
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    low, high = first & 15, first >> 4
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert rows["type"] == ["U8"]
    assert rows["codes"][:2] == [f"{low:x}", f"{high:x}"]
    assert float(rows["E2M1"][0]) == values[low & 7] * (-1 if low & 8 else 1)
    assert len(rows["weights"]) == 16
    code, out, _ = run(capsys, "show", good, f"{E}.0.down_proj.input_scale")
    assert "0.005" in out
    assert "layer 0, expert 0, down, input_scale" in out
    code, _, err = run(capsys, "show", good, "no.such.tensor")
    assert code == 64
    assert "no.such.tensor" in err


def test_show_reads_one_block(good):
    from nvfp4viz.checkpoint import open_checkpoint, preview_tensor

    checkpoint = open_checkpoint(good)
    before = checkpoint.bytes_read
    preview_tensor(checkpoint, f"{E}.0.gate_proj.weight")
    assert checkpoint.bytes_read - before == 8 + 1 + 4


@pytest.mark.parametrize(
    "head", [b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>", b"\x20" + 7 * b"\0" + b"{"]
)
@pytest.mark.parametrize("csv", [(), ("--csv", "-")])
def test_coverage_of_files_that_nobody_can_read_is_no_empty_list(capsys, tmp_path, head, csv):
    (tmp_path / "model.safetensors").write_bytes(head)
    code, out, err = run(capsys, "coverage", str(tmp_path), *csv)
    assert (code, out) == (2, "")
    assert "model.safetensors" in err


def test_coverage_counts_and_lists(capsys, holed, tmp_path):
    code, out, _ = run(capsys, "coverage", holed)
    assert code == 0
    assert "11 ok, 1 missing" in out
    code, out, _ = run(capsys, "coverage", holed, "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 4 * 3 * 4
    assert [row["tensor"] for row in rows if row["status"] == "missing"] == [f"{E}.2.up_proj.input_scale"]
    assert rows[3]["value"] == "0.002"
    run(capsys, "coverage", holed, "--csv", str(tmp_path / "slots.csv"))
    assert (tmp_path / "slots.csv").read_text() == out


@pytest.mark.parametrize("sign", "=+-@")
def test_a_spreadsheet_does_not_take_a_name_for_a_formula(capsys, tmp_path, sign):
    evil = f"{sign}cmd|' /C calc'!A0.layers.0.mlp.experts"
    tensors = {name.replace(E, evil): item for name, item in base().items()}
    write_checkpoint(tmp_path / "evil", tensors, config=CONFIG, hf_quant_config=QUANT)
    _, out, _ = run(capsys, "coverage", str(tmp_path / "evil"), "--csv", "-")
    for row in csv.DictReader(io.StringIO(out)):
        assert row["tensor"].startswith(f"'{sign}")


def test_inject_writes_a_copy_that_the_audit_finds(capsys, good, tmp_path):
    before = snapshot(Path(good))
    out_folder = str(tmp_path / "broken")
    place = ("--layer", "0", "--expert", "1", "--projection", "down")
    code, out, _ = run(capsys, "inject", good, out_folder, "--fault", "nan", *place)
    assert code == 0
    assert f"changed {E}.1.down_proj.input_scale" in out
    assert "scale.nan" in out
    assert snapshot(Path(good)) == before
    code, out, _ = run(capsys, "audit", out_folder)
    assert code == 1
    assert "scale.nan" in out
    # Again into the same folder, or with a fault or slot that does not exist, is bad usage.
    assert run(capsys, "inject", good, out_folder, "--fault", "nan", *place)[0] == 64
    assert run(capsys, "inject", good, str(tmp_path / "z"), "--fault", "none", *place)[0] == 64
    assert run(capsys, "inject", good, str(tmp_path / "z"), "--fault", "zero", *place[:3], "9", *place[4:])[0] == 64
    assert run(capsys, "inject", str(tmp_path / "void"), str(tmp_path / "z"), "--fault", "zero", *place)[0] == 2
    assert not (tmp_path / "z").exists()


def test_repair_plans_first_and_writes_when_asked(capsys, holed, tmp_path):
    before, out_folder = snapshot(Path(holed)), str(tmp_path / "mended")
    command = ("repair", holed, out_folder, "--policy", "peer-max")
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "")
    assert "missing → 0.00" in out
    assert f"{E}.2.up_proj.input_scale" in out
    assert "guesses" in out
    assert re.search(r"to be written anew: 1 shard, \d+ bytes", out)
    assert "Nothing was written" in out
    assert os.listdir(tmp_path) == ["holed"]
    code, out, _ = run(capsys, *command, "--apply")
    assert code == 0
    assert "Wrote mended: 1 shard anew" in out
    assert str(tmp_path) not in out
    assert snapshot(Path(holed)) == before
    assert run(capsys, "audit", out_folder)[0] == 0
    # Again into the same folder, an unknown policy, or a value that no policy takes.
    assert run(capsys, *command, "--apply")[0] == 64
    assert run(capsys, *command[:-1], "magic")[0] == 64
    assert run(capsys, *command, "--value", "2")[0] == 64
    assert run(capsys, "repair", str(tmp_path / "void"), out_folder, "--policy", "peer-max")[0] == 2
    code, out, _ = run(capsys, "repair", out_folder, str(tmp_path / "x"), "--policy", "peer-max", "--apply")
    assert (code, (tmp_path / "x").exists()) == (0, False)
    assert "nothing to mend" in out


def test_repair_in_the_other_language(capsys, holed, tmp_path):
    place = (holed, str(tmp_path / "x"), "--policy", "weight-only", "--language", "zh")
    code, out, _ = run(capsys, "repair", *place)
    assert code == 0
    assert "没有任何猜测" in out
    assert "没有写入任何文件" in out
    with serve(Site({path.name: path.read_bytes() for path in Path(holed).iterdir()})) as site:
        code, _, err = run(capsys, "repair", f"{site.address}/model", *place[1:], "--apply")
    assert (code, "不在本机上" in err) == (64, True)


NAN = ("--fault", "nan", "--layer", "0", "--expert", "1", "--projection", "down")
WRITERS = [("inject", *NAN), ("repair", "--policy", "weight-only", "--apply")]


@pytest.mark.parametrize("command", WRITERS)
def test_a_place_where_nothing_can_be_written(capsys, holed, tmp_path, command):
    (tmp_path / "file").write_text("no folder")
    name, *options = command
    code, _, err = run(capsys, name, holed, str(tmp_path / "file" / "out"), *options)
    assert code == 2
    assert len(err.splitlines()) == 3
    assert "out could not be written" in err
    assert str(tmp_path) not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "holed"]


@pytest.mark.parametrize("command", WRITERS)
def test_a_full_disk(holed, tmp_path, command):
    """As ``ulimit -f`` makes one: the system refuses in the middle of a file."""
    big = without(base(experts=4), f"{E}.2.up_proj.input") | {"lm_head.weight": bf16(512, 512)}
    write_checkpoint(tmp_path / "big", big, config=CONFIG, hf_quant_config=QUANT)
    name, *options = command
    words = [sys.executable, "-m", "nvfp4viz", name, "big", "out", *options]
    limit = f"ulimit -f 64; exec {shlex.join(words)}"
    done = subprocess.run(
        ["bash", "-c", limit], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert "File too large" in done.stderr
    assert str(tmp_path) not in done.stderr
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.parametrize("command", WRITERS)
def test_a_shard_that_may_not_be_read(capsys, holed, tmp_path, command, monkeypatch):
    """Its header was read, and then somebody took the permission away."""
    real_plan, real_open = copies._plan, os.open

    def denied(path, *rest, **more):
        if str(path).endswith("holed/model.safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *rest, **more)

    def plan(*given):
        found = real_plan(*given)
        monkeypatch.setattr(os, "open", denied)
        return found

    monkeypatch.setattr(copies, "_plan", plan)
    name, *options = command
    code, _, err = run(capsys, name, holed, str(tmp_path / "out"), *options)
    assert code == 2
    assert err.startswith("model.safetensors cannot be read.\nThe system says: Permission denied.")
    assert str(tmp_path) not in err
    assert [path.name for path in tmp_path.iterdir()] == ["holed"]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("options", "sound"),
    [
        (("peer-max",), True),
        (("weight-only",), True),
        (("constant", "--value", "0.002"), True),
        (("constant", "--value", "5"), False),
        (("constant", "--value", "1e-6"), False),
    ],
)
def test_a_repair_says_what_its_own_audit_says(capsys, tmp_path, options, sound, language):
    """A number by a rule is one that can be used, and may be far from what is needed."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    del tensors[layout.name(3, "down", "input_scale")]
    write_checkpoint(tmp_path / "a", tensors, config=layout.config, hf_quant_config=layout.quant)
    place = (
        "repair",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--policy",
        *options,
        "--apply",
        "--language",
        language,
    )
    code, out, _ = run(capsys, *place)
    assert code == 0
    report = json.loads(run(capsys, "audit", str(tmp_path / "b"), "--format", "json")[1])
    assert not [item for item in report["findings"] if item["severity"] in ("backend", "error")]
    worse = [item for item in report["backends"] if item["outcome"] not in ("safe", "ignored", "unsupported")]
    assert (not worse) == sound
    assert ("finds no backend that breaks" in out or "也未发现会出错的后端" in out) == sound
    assert (f"{len(worse)} of 13" in out or f"有 {len(worse)} 个" in out) == (not sound)
    # Advice about a number is for who chose one.
    assert ("--value" in out) == (not sound and options[0] == "constant")


def test_what_a_backend_does_to_sound_weights_is_not_blamed_on_the_repair(capsys, tmp_path):
    """FlashInfer's B12X folds small second-level scales into bytes that have no room for them, with any activations."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert in range(8):
        for kind in layout.kinds:
            layout.put(tensors, expert, kind, "weight_scale_2", np.float32(2e-6))
    del tensors[layout.name(3, "down", "input_scale")]
    write_checkpoint(tmp_path / "a", tensors, config=layout.config, hf_quant_config=layout.quant)
    options = ("--policy", "constant", "--value", "0.002", "--apply")
    code, out, _ = run(capsys, "repair", str(tmp_path / "a"), str(tmp_path / "b"), *options)
    assert code == 0
    assert "on 1 of 13 backends, first vllm-flashinfer-b12x" in out
    assert "E4M3" in out.splitlines()[-1]
    assert "--value" not in out


def test_an_invisible_fault_says_so(capsys, good, tmp_path):
    _, out, _ = run(
        capsys, "inject", good, str(tmp_path / "x"), "--fault", "nibble-swap", "--layer", "0", "--expert", "1",
        "--projection", "up",
    )  # fmt: skip
    assert "no check of the files alone can see" in out


def test_a_number_without_peers_is_not_promised_to_be_found(capsys, tmp_path):
    layout = LAYOUTS["fused"]
    write_checkpoint(tmp_path / "a", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    slot = ("--layer", "0", "--expert", "1", "--projection", "gate_up")
    said = run(capsys, "inject", str(tmp_path / "a"), str(tmp_path / "b"), "--fault", "reciprocal", *slot)[1]
    assert "one for all" in said
    assert "should report" not in said
    report = json.loads(run(capsys, "audit", str(tmp_path / "b"), "--format", "json")[1])
    assert [item["code"] for item in report["findings"]] == ["loader.note"]
    assert "the audit of the copy reports nothing there" in said


def test_a_number_that_only_the_audit_can_judge_has_been_judged(capsys, good, tmp_path):
    """Far off its peers, or what a back-fill leaves: the number is known, and so is what the audit says of it."""
    slot = ("--layer", "0", "--expert", "1", "--projection", "down")
    for value, language in (("5000", "en"), ("0.0001860119", "zh")):
        out = str(tmp_path / value)
        options = ("--fault", "constant", "--value", value, *slot, "--language", language)
        said = run(capsys, "inject", good, out, *options)[1].splitlines()[-1]
        findings = json.loads(run(capsys, "audit", out, "--format", "json")[1])["findings"]
        codes = [item["code"] for item in findings if item["code"].startswith("scale.")]
        assert codes
        assert all(code in said for code in codes)


@pytest.mark.parametrize(
    ("options", "promise"),
    [
        (("constant",), True),
        (("constant", "--value", "0.002"), False),
        (("scaled", "--value", "1.5"), False),
        (("scaled",), True),
        # With this seed a negative number.
        (("random-bits",), True),
        (("constant", "--value", "-3"), True),
        (("zero",), True),
    ],
)
def test_inject_promises_what_the_audit_gives(capsys, good, tmp_path, options, promise):
    slot = ("--layer", "0", "--expert", "1", "--projection", "down")
    code, out, _ = run(capsys, "inject", good, str(tmp_path / "out"), "--fault", *options, *slot)
    assert code == 0
    assert ("the audit should report" in out) == promise
    assert ("depends on the number" in out) == (not promise)
    found = {
        item["code"]
        for item in json.loads(run(capsys, "audit", str(tmp_path / "out"), "--format", "json")[1])["findings"]
    }
    assert not promise or any(item in out for item in found)
    # Where a rule leaves it open, the audit of the copy has been asked.
    assert ("the audit of the copy reports nothing there" in out) == (not promise and not found)


@pytest.mark.parametrize(("projection", "seen"), [("gate", True), ("up", True), ("down", False)])
def test_a_neighbours_weight_scale_shows_beside_its_partners(capsys, tmp_path, projection, seen):
    layout = LAYOUTS["modelopt"]
    write_checkpoint(tmp_path / "a", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    slot = ("--layer", "0", "--expert", "1", "--projection", projection, "--role", "weight_scale_2")
    said = run(capsys, "inject", str(tmp_path / "a"), str(tmp_path / "b"), "--fault", "neighbour", *slot)[1]
    assert ("the audit should report scale.pair-mismatch" in said) == seen
    assert ("no check of the files alone can see" in said) == (not seen)
    report = json.loads(run(capsys, "audit", str(tmp_path / "b"), "--format", "json")[1])
    assert [item["code"] for item in report["findings"]] == ["scale.pair-mismatch"] * seen


def test_as_a_module_and_with_a_closed_pipe(good):
    command = [sys.executable, "-m", "nvfp4viz", "coverage", good, "--csv", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("layer,expert")
    piped = subprocess.run(
        f"{' '.join(command)} | head -1", cwd=ROOT, shell=True, capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""


def test_deep(capsys, good, tmp_path, monkeypatch):
    """A NaN among block scales is seen with ``--deep`` alone; a scan that was stopped goes on with ``--resume``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = str(tmp_path / "broken")
    options = ("--fault", "block-nan", "--layer", "0", "--expert", "1", "--projection", "up")
    assert run(capsys, "inject", good, broken, *options)[0] == 0
    assert run(capsys, "audit", broken)[0] == 0
    for more in ((), ("--resume",)):
        code, out, err = run(capsys, "audit", broken, "--deep", "--format", "json", *more)
        assert (code, err) == (1, "")
        assert [item["code"] for item in json.loads(out)["findings"]] == ["block-scale.nan"]
    assert run(capsys, "audit", good, "--deep")[0] == 0
    assert gc.isenabled()
    code, _, err = run(capsys, "repair", broken, str(tmp_path / "x"), "--policy", "weight-only", "--deep")
    assert (code, "block-scale.nan" in err) == (64, True)


@pytest.mark.parametrize("option", [("--resume",), ("--scheduler", "tcp://127.0.0.1:1")])
def test_options_of_a_deep_scan_need_one(capsys, good, option):
    code, out, err = run(capsys, "audit", good, *option)
    assert (code, out) == (64, "")
    assert "--deep" in err


def test_an_address(capsys, good):
    """Over the wire as from disk; ``--paths`` shows no more of an address than its host and path."""
    files = {path.name: path.read_bytes() for path in Path(good).iterdir()}
    with serve(Site(files)) as site:
        address = site.address.replace("//", "//user:hunter2@") + "/model?sig=hunter2"
        code, out, err = run(capsys, "audit", address, "--format", "json", "--paths")
    _, local, _ = run(capsys, "audit", good, "--format", "json")
    assert (code, err) == (0, "")
    assert "hunter2" not in out
    there, here = json.loads(out), json.loads(local)
    assert there["source"] == site.address.removeprefix("http://") + "/model"
    assert (there["findings"], there["fingerprint"]) == (here["findings"], here["fingerprint"])


def test_an_address_of_a_file(capsys, holed):
    files = {path.name: path.read_bytes() for path in Path(holed).iterdir()}
    with serve(Site(files)) as site:
        for options in ((), ("--paths",)):
            address = f"{site.address.replace('//', '//user:hunter2@')}/a/model.safetensors?sig=hunter2"
            out = run(capsys, "audit", address, "--format", "json", *options)[1]
            assert json.loads(out)["source"] == f"{site.address.removeprefix('http://')}/a/model.safetensors"
            assert "hunter2" not in out


def test_an_address_without_a_checkpoint_exits_with_2(capsys):
    with serve(Site({})) as site:
        code, out, err = run(capsys, "audit", site.address)
    assert (code, out) == (2, "")
    assert "nothing to read at 127.0.0.1" in err
    assert "It answered 404" in err


def test_help_and_version_do_not_load_the_library():
    """``--help`` must not cost a second."""
    code = (
        "import sys; from nvfp4viz import cli; cli.build_parser(); "
        "print(sorted({'numpy', 'rich', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert np.float32(1) == 1


# ------------------------------------------------------------------------------------------- Chinese


COMMANDS = ("audit", "show", "coverage", "inject", "repair", "diff")
CJK = re.compile("[\u4e00-\u9fff]")


@pytest.mark.parametrize("arguments", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_speaks_the_language(capsys, arguments):
    said = {}
    for language in ("en", "zh"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--language", language, "--help"])
        assert ended.value.code == 0
        said[language] = capsys.readouterr().out
    assert not CJK.search(said["en"])
    assert said["zh"].startswith("用法：")
    # Every explanation has been translated: no English sentence of three words is left.
    assert not re.search(r"(?:[a-z]{2,} ){2}[a-z]{2,}", re.sub(r"[\[{][^\]}]*[\]}]", "", said["zh"])), said["zh"]


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["audit"], ["nothing"], ["audit", "x", "--wrong"], ["audit", "x", "--format", "pdf"],
        ["audit", "x", "--tp", "0"], ["audit", "x", "--output"], ["audit", "x", "--resume"], ["show", "x"],
        ["inject", "x", "y", "--layer", "a"], ["repair", "x", "y"], ["audit", "x", "--quiet=1"],
        ["repair", "x", "y", "--policy", "guess"], ["audit", "x", "--f", "json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors_speak_the_language(capsys, arguments):
    for language in ("zh", "en"):
        given = [*arguments[:1], f"--language={language}", *arguments[1:]]
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert ended.value.code == 64
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("nvfp4viz")
        assert bool(CJK.search(last)) == (language == "zh"), last


def test_what_the_commands_print_speaks_the_language(capsys, good, holed, tmp_path):
    name = next(name for name in open_checkpoint(good).tensors if name.endswith("down_proj.weight"))
    for arguments, words in (
        (("show", good, name), ("类型", "形状", "文件", "槽位", "字节", "编码", "缩放", "二级", "权重")),
        (("coverage", holed), ("状态", "正常", "缺失")),
        (("inject", good, tmp_path / "a", "--fault", "zero", *SLOT), ("改动了", "重写", "审计应当报告")),
        (("inject", good, tmp_path / "b", "--fault", "missing", *SLOT), ("去掉了",)),
        (("inject", good, tmp_path / "c", "--fault", "nibble-swap", *SLOT), ("发现不了",)),
        (("inject", good, tmp_path / "d", "--fault", "block-nan", *SLOT), ("需要读取权重",)),
    ):
        code, out, err = run(capsys, *map(str, arguments), "--language", "zh")
        assert (code, err) == (0, "")
        for word in words:
            assert word in out
        for line in out.splitlines():
            # Codes such as scale.missing are the same in every language.
            words = re.sub(r"[\w-]+(?:\.[\w-]+)+", "", line)
            assert not re.search(r"\b(?:changed|removed|type|shape|layer|expert|missing|block)\b", words), line


SLOT = ("--layer", "0", "--expert", "1", "--projection", "down")


def test_both_languages_have_the_same_words_and_all_faults():
    def keys(node, at=""):
        return {
            place
            for key, value in node.items()
            for place in (keys(value, f"{at}{key}.") if isinstance(value, dict) else [at + key])
        }

    texts = [tomllib.loads((CONTENT / lang / "cli.toml").read_text(encoding="utf-8")) for lang in ("en", "zh")]
    argparse_words = texts[1].pop("argparse")
    assert keys(texts[0]) == keys(texts[1])
    # Renamed words of another Python would stay English.
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    assert [text for text in argparse_words if f"'{text}'" not in source and f'"{text}"' not in source] == []
    assert tuple(FAULTS) == cli.FAULT_IDS
