"""Every claim of the README that a machine can try: commands, snippets and their output, paths, targets, languages."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, content) of all fenced blocks."""
    return FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


def commands() -> list[str]:
    return [line[2:] for kind, text in blocks("README.md") if kind == "console" for line in text.splitlines()]


def snippets() -> list[tuple[str, str]]:
    found = blocks("README.md")
    return [(code, found[i + 1][1]) for i, (kind, code) in enumerate(found) if kind == "python"]


def test_both_languages_show_the_same_commands_and_snippets():
    assert blocks("README.md") == blocks("README.zh.md")


@pytest.mark.parametrize("command", commands())
def test_a_command_does_what_is_said(command, tmp_path):
    """Run beside a copy of the sample, so that what it writes lands elsewhere; the holed sample ends with code 1."""
    sample = "sample_checkpoints/tiny-moe-nvfp4-holes"
    shutil.copytree(ROOT / sample, tmp_path / sample)
    program, *arguments = command.split()
    assert program == "nvfp4viz"
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4viz", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if arguments[0] == "audit" else 0), done.stderr
    for written in {"report.json", "slots.csv", "broken"} & set(arguments):
        assert (tmp_path / written).exists()


@pytest.mark.parametrize(("code", "output"), snippets(), ids=lambda text: text.split("\n")[0][:30])
def test_a_snippet_prints_what_is_said(code, output):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


@pytest.mark.parametrize("name", READMES)
def test_every_path_and_link_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"^\| `([^`|]+)`", text, re.MULTILINE):
        assert (ROOT / path).exists(), path


def test_make_lists_its_targets_and_has_those_of_the_readme():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("app", "test", "lint", "samples", "bench"):
        assert f"make {target}" in shown


def test_the_screenshot_is_there_and_small():
    assert 20_000 < (ROOT / "docs" / "screenshot.png").stat().st_size < 600_000
