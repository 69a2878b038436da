"""Every option of every command: it does something, is refused, or its help says when it does nothing."""

import argparse
import json
import os
import re
from pathlib import Path

import pytest

from nvfp4viz import cli
from nvfp4viz.checkpoint import FAULTS, inject, write_checkpoint
from nvfp4viz.cli_options import is_hub
from nvfp4viz.errors import error_texts
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, without
from tests.checkpoint.web_server import Site, serve
from tests.test_cli import run

E = "model.layers.0.mlp.experts"
SLOT = ("--layer", "0", "--expert", "1", "--projection", "down")
NAN = ("--fault", "nan", *SLOT)
RANDOM = ("--fault", "random-bits", *SLOT)

# What an option does on a folder: (command, option): words that change stdout, a file or the exit code; an error's
# code; or the words of the help that say when it does nothing.
EFFECT, REFUSED, HELP = "effect", "refused", "help"
TABLE = {
    ("audit", "--revision"): (REFUSED, "cli.idle-revision"),
    ("audit", "--language"): (HELP, "JSON and CSV"),
    ("audit", "--format"): (EFFECT, ("--format", "json")),
    ("audit", "--output"): (HELP, "instead of stdout"),
    ("audit", "--fail-on"): (EFFECT, ("--fail-on", "never")),
    ("audit", "--gpu"): (EFFECT, ("--gpu", "sm_120")),
    ("audit", "--tp"): (EFFECT, ("--tp", "2")),
    ("audit", "--ep"): (EFFECT, ("--ep", "3")),
    ("audit", "--deep"): (HELP, "read every packed code"),
    ("audit", "--resume"): (REFUSED, "--deep"),
    ("audit", "--scheduler"): (REFUSED, "--deep"),
    ("audit", "--paths"): (EFFECT, ("--paths",)),
    ("audit", "--quiet"): (HELP, "only a terminal"),
    ("show", "--revision"): (REFUSED, "cli.idle-revision"),
    ("show", "--language"): (EFFECT, ("--language", "zh")),
    ("coverage", "--revision"): (REFUSED, "cli.idle-revision"),
    ("coverage", "--language"): (EFFECT, ("--language", "zh")),
    ("coverage", "--csv"): (EFFECT, ("--csv", "-")),
    ("inject", "--language"): (EFFECT, ("--language", "zh")),
    ("inject", "--fault"): (EFFECT, ("--fault", "zero")),
    ("inject", "--layer"): (EFFECT, ("--layer", "1")),
    ("inject", "--expert"): (EFFECT, ("--expert", "2")),
    ("inject", "--projection"): (EFFECT, ("--projection", "up")),
    ("inject", "--role"): (EFFECT, ("--role", "weight_scale_2")),
    ("inject", "--value"): (REFUSED, "fault.value"),
    ("inject", "--seed"): (HELP, "random-bits, block-nan and block-negative"),
    ("repair", "--revision"): (REFUSED, "cli.idle-revision"),
    ("repair", "--language"): (EFFECT, ("--language", "zh")),
    ("repair", "--policy"): (EFFECT, ("--policy", "constant")),
    ("repair", "--value"): (REFUSED, "repair.value"),
    ("repair", "--suspects"): (REFUSED, "cli.idle-suspects"),
    ("repair", "--deep"): (HELP, "block scales first"),
    ("repair", "--apply"): (EFFECT, ("--apply",)),
    ("diff", "--revision"): (REFUSED, "cli.idle-revision"),
    ("diff", "--language"): (HELP, "JSON and CSV"),
    ("diff", "--format"): (EFFECT, ("--format", "json")),
    ("diff", "--output"): (HELP, "instead of stdout"),
}
VALUES = {
    "--revision": "main", "--resume": None, "--scheduler": "tcp://127.0.0.1:1", "--value": "0.5", "--seed": "7",
    "--suspects": None,
}  # fmt: skip


@pytest.fixture
def holed(tmp_path, monkeypatch):
    tensors = without(base(), f"{E}.2.up_proj.input")
    write_checkpoint(tmp_path / "holed", tensors, config=CONFIG, hf_quant_config=QUANT)
    monkeypatch.chdir(tmp_path)
    return "holed"


def line(command, out="out"):
    return {
        "audit": ("audit", "holed"),
        "show": ("show", "holed", f"{E}.0.gate_proj.weight"),
        "coverage": ("coverage", "holed"),
        "inject": ("inject", "holed", out, *NAN),
        "repair": ("repair", "holed", out, "--policy", "weight-only"),
        "diff": ("diff", "holed", "holed"),
    }[command]


def actions_of(command):
    parser = cli.build_parser()
    [commands] = [item for item in parser._actions if isinstance(item, argparse._SubParsersAction)]
    return commands.choices[command]._actions


def options_of(command):
    return {item.option_strings[-1]: item.help for item in actions_of(command) if item.option_strings}


def test_the_table_has_every_option():
    every = {(name, option) for name in ("audit", "show", "coverage", "inject", "repair", "diff")
             for option in options_of(name)}  # fmt: skip
    assert {pair for pair in every if pair[1] != "--help"} == set(TABLE)


@pytest.mark.parametrize(("command", "option"), TABLE, ids=" ".join)
def test_what_an_option_does(capsys, holed, command, option):
    kind, what = TABLE[command, option]
    if kind == HELP:
        assert what in options_of(command)[option]
        return
    if kind == EFFECT:
        plain = run(capsys, *line(command, "one"))
        assert plain[0] in (0, 1)
        assert run(capsys, *line(command, "two"), *what) != plain
        return
    words = [option, *([VALUES[option]] if VALUES[option] else [])]
    code, out, err = run(capsys, *line(command), *words)
    assert (code, out) == (64, "")
    if "." in what:
        pattern = re.sub(r"\\{.*?\\}", ".*", re.escape(error_texts("en")[what]["what"]))
        assert re.match(pattern, err)
        assert len(err.splitlines()) == 3
    assert option in err or what in ("fault.value", "repair.value")
    assert os.listdir() == ["holed"]


@pytest.mark.parametrize("option", ["--gpu=sm_120", "--paths"])
def test_a_table_of_slots_names_no_source_and_no_backend(capsys, holed, option):
    plain = run(capsys, "audit", holed, "--format", "csv")
    assert plain[0] == 1
    assert run(capsys, "audit", holed, "--format", "csv", option) == plain
    assert "CSV" in options_of("audit")[option.partition("=")[0]]
    # What a split over ranks finds still decides the exit code.
    assert run(capsys, "audit", holed, "--format", "csv", "--fail-on", "error", "--tp", "2")[0] == 0


def test_faults_that_a_seed_changes(capsys, holed):
    """The help names the faults that are not the same with another seed."""
    write_checkpoint("good", base(), config=CONFIG, hf_quant_config=QUANT)
    seeded = []
    for fault, spec in FAULTS.items():
        if fault == "exponent-cast":
            # It is for MXFP4, and reads no seed: see `nvfp4viz.checkpoint.faults`.
            continue
        projection = "up" if fault in ("pair-mismatch", "gate-up-swap") else "down"
        files = []
        for seed in (1, 2):
            out = Path(f"{fault}-{seed}")
            inject("good", out, fault, layer=0, expert=1, projection=projection, role=spec.roles[0], seed=seed)
            files.append({path.name: path.read_bytes() for path in out.iterdir()})
        if files[0] != files[1]:
            seeded.append(fault)
    assert set(re.findall(r"[a-z]+-[a-z]+", options_of("inject")["--seed"])) == set(seeded)
    assert run(capsys, "inject", holed, "x", *RANDOM, "--seed", "3")[0] == 0


EMPTY = [
    ("audit", ""), ("audit", "holed", "--output", ""), ("audit", "holed", "--gpu", ""),
    ("audit", "holed", "--revision="),
    ("audit", "holed", "--deep", "--scheduler", ""), ("coverage", "holed", "--csv", ""), ("show", "holed", ""),
    ("inject", "holed", "", *NAN), ("repair", "holed", "", "--policy", "weight-only"), ("diff", "holed", ""),
]  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("arguments", EMPTY, ids=" ".join)
def test_what_is_empty(capsys, holed, arguments, language):
    """A shell variable that nobody has set: never the current folder."""
    code, out, err = run(capsys, *arguments, "--language", language)
    assert (code, out) == (64, "")
    assert len(err.splitlines()) == 3
    assert re.match(r"(--\w+|SOURCE|OUT|OTHER|TENSOR) ?(is empty|是空的)", err), err
    assert os.listdir() == ["holed"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_revision_that_was_never_set(capsys, holed, language):
    """As ``hf://owner/name@$REV`` reads without one: what was asked for is not what main holds."""
    for command in (("audit", "hf://a/b@"), ("show", "hf://a/b@", "x"), ("diff", holed, "hf://a/b@")):
        code, out, err = run(capsys, *command, "--language", language)
        assert (code, out) == (64, "")
        assert "hf://a/b@" in err
        assert len(err.splitlines()) == 3


def test_resume_where_the_server_marks_its_files_and_where_it_does_not(capsys, holed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in Path(holed).iterdir()}
    for language in ("en", "zh"):
        with serve(Site(files)) as site:
            code, out, err = run(capsys, "audit", site.address, "--deep", "--resume", "--language", language)
        assert (code, out) == (64, "")
        assert "ETag" in err
        assert "--resume" in err
        assert len(err.splitlines()) == 3
    with serve(Site(files, tagged=True)) as site:
        code, out, _ = run(capsys, "audit", site.address, "--deep", "--resume", "--format", "json")
    assert (code, json.loads(out)["verdict"]) == (1, "backend")
    # Nothing is kept of a scan that came to its end, or that could not be taken up again.
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_what_a_copy_is_made_of(capsys, holed):
    """Help offers what works: a copy needs files on this machine, and a plan to repair does not."""
    helps = {
        name: next(item.help for item in actions_of(name) if item.dest == "source") for name in ("inject", "repair")
    }
    assert "http" not in helps["inject"]
    assert "hf://" not in helps["inject"]
    assert "http" in helps["repair"]
    assert "--apply" in helps["repair"]
    files = {path.name: path.read_bytes() for path in Path(holed).iterdir()}
    with serve(Site(files)) as site:
        assert run(capsys, "inject", site.address, "x", *NAN)[0] == 64
        assert run(capsys, "repair", site.address, "x", "--policy", "peer-max")[0] == 0
        assert run(capsys, "repair", site.address, "x", "--policy", "peer-max", "--apply")[0] == 64
    assert run(capsys, "inject", "hf://a/b", "x", *NAN, "--revision", "main")[0] == 64


def test_what_has_revisions():
    for address in ("hf://a/b", "hf://a/b@main", "https://huggingface.co/a/b", "https://hf.co/a/b/tree/main"):
        assert is_hub(address)
    for address in ("a/b", "https://example.org/a/b", "https://huggingface.co/a/b/resolve/main/x.safetensors", "."):
        assert not is_hub(address)
