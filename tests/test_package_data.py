"""An installed wheel has every file that the package reads: styles, components, texts, tables."""

from __future__ import annotations

import tomllib
from glob import glob
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILED = {".pyc", ".nbc", ".nbi"}


def test_every_file_that_is_no_module_is_package_data():
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["nvfp4viz"]
    package = ROOT / "nvfp4viz"
    # Read as setuptools reads them: relative to the package, ** for any number of folders.
    packed = {package / name for pattern in patterns for name in glob(pattern, root_dir=package, recursive=True)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in COMPILED}
    # setuptools packs the modules of packages; a snippet's folder is none, so its .py files are data too.
    needed = {path for path in files if path.suffix != ".py" or not (path.parent / "__init__.py").exists()}
    assert len(needed) > 100
    assert sorted(str(path.relative_to(package)) for path in needed - packed) == []
