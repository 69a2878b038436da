"""Tests that need a CUDA GPU: ``make test-gpu``, or ``python3 -m pytest tests/gpu`` where torch, CuPy and pytest are.

Everything here carries the marker ``gpu`` and is skipped, with the reason the app itself would give, where no GPU can
be used.  With ``NVFP4VIZ_REQUIRE_GPU=1`` (set by ``make test-gpu``) the missing GPU is a failure instead, so that a run
meant for one cannot pass by skipping everything.
"""

import os
from pathlib import Path

import pytest

from nvfp4viz import device
from nvfp4viz.device.probe import require_cuda
from nvfp4viz.errors import DeviceError

HERE = Path(__file__).parent


def _reason():
    try:
        require_cuda()
    except DeviceError as error:
        return f"{error.what} {error.why} {error.next_step}"
    return None


@pytest.hookimpl(tryfirst=True)  # before -m gpu looks at the markers
def pytest_collection_modifyitems(items):
    ours = [item for item in items if HERE in Path(str(item.path)).parents]
    if not ours:
        return
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    reason = _reason()
    if reason is None:
        return
    if os.environ.get("NVFP4VIZ_REQUIRE_GPU") == "1":
        pytest.exit(f"tests/gpu needs a GPU: {reason} All other tests run without one: make test.", returncode=1)
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header():
    report = device.describe_device()
    return f"computes on {report.computes_on}: {', '.join(gpu.name for gpu in report.gpus) or 'no GPU'}"


@pytest.fixture(scope="session")
def torch():
    """torch, on the GPU that computes."""
    import torch

    return torch
