"""The house rules of docs/architecture.md that a machine can check."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nvfp4viz.checkpoint import file_bytes, tensor

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nvfp4viz"

# Who may be imported by whom: a package sees those named here, itself, and nothing else of ours.
SEES = {
    "errors": set(),
    "formats": {"errors"},
    "quant": {"errors", "formats"},
    "moe": {"errors", "formats", "quant"},
    "checkpoint": {"errors", "formats"},
    "device": {"errors", "formats", "quant", "moe"},
    "model": {"errors", "formats", "quant", "moe", "checkpoint"},
    "serving": {"errors", "formats", "quant", "moe", "checkpoint", "model", "device"},
    "audit": {"errors", "formats", "quant", "checkpoint", "serving"},
    "figures": {"errors", "formats", "quant", "moe", "model", "checkpoint", "serving", "audit", "device"},
    "cli_words": {"errors"},
    "cli_output": {"checkpoint", "errors"},
    "cli_options": {"checkpoint", "cli_output", "errors"},
    "commands": {
        "cli_options",
        "cli_output",
        "cli_words",
        "errors",
        "formats",
        "quant",
        "checkpoint",
        "serving",
        "audit",
    },
    "cli": {"cli_options", "cli_output", "cli_words", "commands", "errors"},
    "warm": {"errors", "formats", "quant", "moe", "checkpoint", "model", "serving", "device"},
}


def _imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    names: set[str] = set()
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parts[: len(parts) - node.level]
                base = ".".join([*up, base]).rstrip(".")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def _ours(name: str) -> str | None:
    """Our sub-package that a dotted name lies in."""
    parts = name.split(".")
    if parts[0] == "nvfp4viz" and len(parts) > 1 and (PACKAGE / parts[1]).exists():
        return parts[1]
    if parts[0] == "nvfp4viz" and len(parts) > 1 and (PACKAGE / f"{parts[1]}.py").exists():
        return parts[1]
    return None


# content/code holds the snippets that pages fill in and run: templates, not modules
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "content" not in path.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_run_one_way(path):
    package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if package not in SEES:
        return
    seen = {_ours(name) for name in _imports(path)} - {None, package}
    assert seen <= SEES[package], f"{package} must not import {seen - SEES[package]}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_streamlit_only_in_ui_and_torch_only_where_it_trains(path):
    relative = path.relative_to(PACKAGE)
    roots = {name.split(".")[0] for name in _imports(path)}
    if relative.parts[0] != "ui":
        assert "streamlit" not in roots
    if relative.parts[0] != "device" and relative.parts != ("model", "train.py"):
        assert "torch" not in roots
        assert "cupy" not in roots


@pytest.mark.parametrize("path", sorted((ROOT / "pages").glob("*.py")), ids=lambda p: p.name)
def test_pages_stay_thin(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


LIGHT = ["errors", "formats", "quant", "moe", "checkpoint", "device", "model", "serving", "audit", "figures", "cli"]


@pytest.mark.parametrize(
    "package", [name for name in LIGHT if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
)
def test_imports_are_light(package):
    """Importing a package brings neither torch nor streamlit nor numba: they cost seconds and memory."""
    code = (
        f"import sys, nvfp4viz.{package}; "
        "print(sorted({'torch', 'streamlit', 'numba', 'cupy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_who_reads_headers_and_scales_does_not_wait_for_what_names_mean(tmp_path):
    """`inspect` in a script pays for every import: layouts, configurations, writers and BF16 are loaded when used."""
    code = (
        "import sys, nvfp4viz.checkpoint as c; "
        "c.inspect(sys.argv[1]).all_scalars(); "
        "late = {'canonical_view', 'dialects', 'modules', 'quantconfig', 'writer', 'faults', 'remote'}; "
        "loaded = {f'nvfp4viz.checkpoint.{name}' for name in late} | {'ml_dtypes', 'tomllib', 'asyncio', 'fsspec'}; "
        "print(sorted(loaded & set(sys.modules)))"
    )
    for shard in ("a", "b"):
        (tmp_path / f"{shard}.safetensors").write_bytes(file_bytes({f"{shard}.input_scale": tensor(np.float32(1))}))
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_machine_paths_in_the_tree():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    here = str(ROOT.parent)
    for name in filter(None, tracked):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".json", ".js", ".html", ".css", ".yml"} and path.exists():
            assert f"{here}/" not in path.read_text(encoding="utf-8"), name


def test_files_of_tests_do_not_share_a_name():
    """pytest imports a test by its bare name unless its folder is a package: of two with one name it takes neither."""
    bare = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in bare)
    assert [name for name, count in names.items() if count > 1] == []
