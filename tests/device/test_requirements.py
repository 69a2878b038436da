"""The two requirements files are one list, but for the CUDA version of CuPy and of its compiler."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pins(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def test_cuda_13_differs_in_cupy_and_nvrtc_alone():
    twelve, thirteen = pins("requirements.txt"), pins("requirements-cuda13.txt")
    assert len(twelve) == len(thirteen)
    differing = [(a, b) for a, b in zip(twelve, thirteen, strict=True) if a != b]
    assert [(a.split("=")[0], b.split("=")[0]) for a, b in differing] == [
        ("cupy-cuda12x", "cupy-cuda13x"),
        ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    ]
    assert differing[0][0].replace("12x", "13x") == differing[0][1], "both CuPys are of one version"


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-cuda13.txt", "requirements-cluster.txt", "requirements-dev.txt"]
)
def test_every_requirement_is_pinned(name):
    assert all("==" in pin for pin in pins(name))


def test_one_nvrtc_13_everywhere():
    """The development environment may sit beside PyTorch's CUDA 13 build, which asks for this very version."""
    chosen = {
        pin for name in ("requirements-cuda13.txt", "requirements-dev.txt") for pin in pins(name) if "nvrtc==" in pin
    }
    assert len(chosen) == 1
