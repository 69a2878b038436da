"""The compiled restatement, built once per test session."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest

from tests.host.restatement import Restatement, build


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Restatement:
    folder = tmp_path_factory.mktemp("restatement")
    program = build(folder)
    table = folder / "rcp.bin"
    packed = resources.files("nvfp4viz.quant") / "data" / "rcp_approx_h200.npz"
    with resources.as_file(packed) as path, np.load(path) as saved:
        table.write_bytes(saved["delta"].astype(np.int8).tobytes())
    return Restatement(program, table, folder)
