"""``python -m nvfp4viz.warm`` finds every kernel, and a later process compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nvfp4viz import device, warm
from nvfp4viz.device import build
from nvfp4viz.errors import DeviceError
from nvfp4viz.warm import kernel_modules, warm_in_background

ROOT = Path(__file__).parents[1]


def test_every_file_with_a_kernel_is_found_and_no_other():
    """By name: ``…kernels.py`` or ``…kernel.py``.  A kernel elsewhere would compile while a visitor waits.

    A page's snippet that is named after a kernel is a template; importing it fails.
    """
    package = ROOT / "nvfp4viz"
    with_kernels = {
        ".".join(("nvfp4viz", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if "\n@kernel(" in path.read_text(encoding="utf-8")
    }
    assert with_kernels
    assert with_kernels == set(kernel_modules())


def test_the_cache_is_used_by_the_next_process(tmp_path):
    code = (
        "import nvfp4viz.quant.gemm_kernels as k\n"
        "stats = k.sequential_product.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    seen = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert seen == [["0", "1"], ["1", "0"]]


def test_a_server_loads_its_kernels_in_the_background_once():
    thread = warm_in_background()
    assert warm_in_background() is thread
    thread.join(120)
    assert not thread.is_alive()
    assert set(kernel_modules()) <= set(sys.modules)


H200 = device.DeviceReport("cuda", "EPYC", 2, (device.Gpu("H200", (9, 0)),), (13, 0), None)


def test_cuda_kernels_are_compiled_for_the_gpu_that_computes(monkeypatch):
    """Each for its full target; one that does not compile is named, and the rest goes on."""
    asked = []

    def compile_(source, target):
        asked.append((source, target))
        if source == "amax.cu":
            raise DeviceError("device.compile", file=source, target=target, log="no")
        return b""

    monkeypatch.setattr(device, "_found", lambda: H200)
    monkeypatch.setattr(device.outcome, "failure", None)
    monkeypatch.setattr(warm, "kernel_modules", list)
    monkeypatch.setattr(build, "cubin", compile_)
    warm.warm()
    assert {target for _, target in asked} == {"sm_90"}
    assert {"probe.cu", "quantize.cu", "gemm_w4a4.cu", "amax.cu"} <= {source for source, _ in asked}


def test_without_a_gpu_no_cuda_kernel_is_compiled(monkeypatch):
    monkeypatch.setattr(
        device, "_found", lambda: device.DeviceReport("cpu", "EPYC", 2, (), None, DeviceError("device.no-driver"))
    )
    assert warm.cuda_sources() == []
    monkeypatch.setattr(warm, "kernel_modules", list)
    assert warm.steps() == []
