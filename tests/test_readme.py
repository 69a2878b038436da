"""Every claim of the README that a machine can try: commands, snippets and their output, paths, targets, languages."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4viz.cli import build_parser
from nvfp4viz.figures.places import PATHS
from nvfp4viz.figures.words import words
from nvfp4viz.ui.registry import PAGES

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
    if arguments[0] == "diff":
        [earlier] = [other for other in commands() if "--apply" in other]
        assert run(earlier.split()[1:], tmp_path).returncode == 0
    done = run(arguments, tmp_path)
    assert done.returncode == (1 if arguments[0] in ("audit", "diff") else 0), done.stderr
    planned = arguments[0] == "repair" and "--apply" not in arguments
    for written in {"report.json", "report.html", "issue.md", "slots.csv", "broken", "mended"} & set(arguments):
        assert (tmp_path / written).exists() != planned


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nvfp4viz", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )


def test_steps_for_ci_are_commands_that_exist():
    """Both say what fails the job: something that is wrong on a backend."""
    [text] = [text for kind, text in blocks("README.md") if kind == "yaml"]
    found = re.findall(r"nvfp4viz (audit [^}>\n]+)", text)
    assert len(found) == 2
    for command in found:
        options = build_parser().parse_args(command.split())
        assert (options.source, options.fail_on) == ("export", "backend")


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


@pytest.mark.parametrize(("name", "language"), [("README.md", "en"), ("README.zh.md", "zh")])
def test_the_map_of_pages_names_all_of_them_in_the_app_s_words(name, language):
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([^]]+)\]\((pages/\w+\.py)\) \| (.*) \|$", text, re.MULTILINE)
    said = [(words(language, f"{e.id}.title"), e.script, words(language, f"{e.id}.aim")) for e in PAGES]
    assert rows == said
    assert " → ".join(words(language, f"{page}.title") for page in PATHS["first"]) in text
    assert len(PATHS) - 1 == 3, "the sentence below the heading counts the other ways"


def test_both_languages_name_the_same_settings():
    english, chinese = (re.findall(r"NVFP4VIZ_\w+", (ROOT / name).read_text(encoding="utf-8")) for name in READMES)
    assert set(english) == set(chinese)


def test_make_lists_its_targets_and_has_those_of_the_readme():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("app", "test", "lint", "samples", "bench"):
        assert f"make {target}" in shown


def test_the_screenshot_is_there_and_small():
    assert 20_000 < (ROOT / "docs" / "screenshot.png").stat().st_size < 600_000
