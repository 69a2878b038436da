"""Ctrl-C at any moment: one line, exit code 130, nothing half written, and no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvfp4viz import commands
from nvfp4viz.checkpoint import write_checkpoint
from tests.audit.layouts import bf16
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, without
from tests.checkpoint.web_server import Site, serve
from tests.test_cli import run

ROOT = Path(__file__).parents[1]
SLOT = ("--layer", "0", "--expert", "1", "--projection", "down")
COMMANDS = {
    "audit": ("audit", "holed"),
    "show": ("show", "holed", "lm_head.weight"),
    "coverage": ("coverage", "holed"),
    "inject": ("inject", "holed", "out", "--fault", "nan", *SLOT),
    "repair": ("repair", "holed", "out", "--policy", "peer-max", "--apply"),
    "diff": ("diff", "holed", "holed"),
}
# The interrupt comes when the first of a module's lines would run, or none is imported.
PRESSED = """
import os, signal, sys

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            for _ in range({times}):
                os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Presses())
"""
STOPPED = "Stopped. Nothing half written is left.\n"


@pytest.fixture
def holed(tmp_path):
    tensors = without(base(), "model.layers.0.mlp.experts.2.up_proj.input") | {"lm_head.weight": bf16(8, 8)}
    write_checkpoint(tmp_path / "holed", tensors, config=CONFIG, hf_quant_config=QUANT)
    return tmp_path / "holed"


def run_after(first, folder, *command):
    """Run a command in ``folder``, whose Python runs the code ``first`` before anything else."""
    (folder / "press").mkdir()
    (folder / "press/sitecustomize.py").write_text(first)
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'press'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


def pressed(folder, module, arguments, program=("-m", "nvfp4viz"), times=1):
    """Run the program in ``folder``; Ctrl-C is pressed when it comes to import ``module``."""
    return run_after(PRESSED.format(module=module, times=times), folder, sys.executable, *program, *arguments)


MODULES = [
    "nvfp4viz.cli", "argparse", "tomllib", "nvfp4viz.commands", "numpy", "numpy._core._multiarray_umath", "msgspec",
    "nvfp4viz.audit.run", "nvfp4viz.cli_options",
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_while_modules_load(holed, module):
    done = pressed(holed.parent, module, COMMANDS["audit"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", STOPPED)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command(holed, command):
    done = pressed(holed.parent, "numpy", COMMANDS[command])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", STOPPED)
    assert not (holed.parent / "out").exists()


def test_as_the_installed_command(holed):
    """What pip writes: a script that imports one function and calls it."""
    script = holed.parent / "nvfp4viz"
    project = (ROOT / "pyproject.toml").read_text()
    module, _, function = project.partition('\nnvfp4viz = "')[2].partition('"')[0].partition(":")
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    done = pressed(holed.parent, "numpy", COMMANDS["audit"], [str(script)])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", STOPPED)


def test_in_the_other_language(holed):
    done = pressed(holed.parent, "numpy", (*COMMANDS["audit"], "--language", "zh"))
    assert (done.returncode, done.stderr) == (130, "已停止。没有留下写了一半的内容。\n")


def test_pressed_again(holed):
    """Whoever does not want to wait for the modules gets out at once, as quietly."""
    done = pressed(holed.parent, "numpy", COMMANDS["audit"], times=2)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_background_job_ignores_it(holed):
    """A shell starts ``nvfp4viz … &`` in a script with Ctrl-C ignored."""
    line = f"trap '' INT; exec {sys.executable} -m nvfp4viz audit holed --fail-on never"
    done = run_after(PRESSED.format(module="numpy", times=1), holed.parent, "sh", "-c", line)
    assert (done.returncode, done.stderr) == (0, "")
    assert "scale.missing" in done.stdout


def test_help_is_help_all_the_same(holed):
    done = pressed(holed.parent, "argparse", ("--help",))
    assert (done.returncode, done.stderr) == (0, "")
    assert "audit" in done.stdout


@pytest.mark.parametrize("wait", [0.0, 0.5])
def test_during_a_remote_audit(holed, wait):
    """The server waits with its answers; Ctrl-C comes when it has been asked."""
    files = {path.name: path.read_bytes() for path in holed.iterdir()}
    with serve(Site(files, silent=20.0)) as site:
        process = subprocess.Popen(
            [sys.executable, "-m", "nvfp4viz", "audit", site.address],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not site.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert site.asked
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", STOPPED)


WHILE_WRITING = """
import os, signal

def fsync(descriptor):
    os.kill(os.getpid(), {number})

os.fsync = fsync
"""


@pytest.mark.parametrize("command", ["inject", "repair"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_a_copy_is_written(holed, command, number):
    """Also where a job's time is over or its terminal is closed: neither the copy nor a part of it is left."""
    first = WHILE_WRITING.format(number=int(number))
    done = run_after(first, holed.parent, sys.executable, "-m", "nvfp4viz", *COMMANDS[command])
    assert (done.returncode, done.stderr) == (128 + number, STOPPED)
    assert sorted(os.listdir(holed.parent)) == ["holed", "press"]


def stop(*_, **__):
    raise KeyboardInterrupt


def test_a_command_that_is_stopped(capsys, monkeypatch):
    for name in COMMANDS:
        monkeypatch.setitem(commands.RUN, name, stop)
    for arguments in COMMANDS.values():
        assert run(capsys, *arguments) == (130, "", STOPPED)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_deep_scan_says_how_to_go_on(capsys, holed, monkeypatch, language):
    monkeypatch.setattr(commands, "deepen", stop)
    code, out, err = run(capsys, "audit", str(holed), "--deep", "--language", language)
    assert (code, out) == (130, "")
    assert "--deep --resume" in err
    # Where the server does not say what has changed, there is no going on.
    files = {path.name: path.read_bytes() for path in holed.iterdir()}
    for tagged in (False, True):
        with serve(Site(files, tagged=tagged)) as site:
            code, _, err = run(capsys, "audit", site.address, "--deep", "--language", language)
        assert (code, "--resume" in err) == (130, tagged)


def test_nothing_is_imported_before_ctrl_c_is_heeded():
    """Python answers Ctrl-C with a traceback until then; the enumerations of `signal` are 3 ms of that."""
    heard = "import sys; before = set(sys.modules); import nvfp4viz.__main__; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", heard], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nvfp4viz", "nvfp4viz.__main__"]
