"""What this machine computes on.

Every page says which device made its numbers.  Today that is always the CPU: the CUDA kernels of ``kernels/`` are not
part of this version, so a GPU that is present is named and left alone.  Finding it must cost nothing and break
nothing: we ask the driver through ``ctypes`` instead of importing CuPy or torch, and every failure is a sentence, not
an exception.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["DeviceReport", "Gpu", "describe_device"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device as its driver describes it."""

    name: str
    capability: tuple[int, int]  # (major, minor), e.g. (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What computes here, and what was found beside it."""

    computes_on: str  # "cpu": the only path of this version
    cpu: str  # the processor's own name, or its architecture
    threads: int  # how many threads our CPU kernels use
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str | None  # id of the reason (a key of content/*/ui.toml), None where a GPU was found


KERNEL_THREADS = 2  # quant.fast splits rows over two threads: the smallest machine we promise speed on has two cores


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _find_gpus(library: str | None = None) -> tuple[tuple[Gpu, ...], str | None]:
    """CUDA devices by way of the driver library; the second value says why there are none."""
    try:
        cuda = ctypes.CDLL(library or "libcuda.so.1")
    except OSError:
        return (), "no-driver"
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return (), "driver-failed"
    gpus = []
    for ordinal in range(count.value):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
            return tuple(gpus), "driver-failed"
        cuda.cuDeviceGetName(name, len(name), handle)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # …_MINOR
        gpus.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    return tuple(gpus), None if gpus else "none-found"


@cache
def describe_device() -> DeviceReport:
    """Name this machine's CPU and its CUDA devices.  Never raises, imports nothing heavy, asks the driver once."""
    gpus, reason = _find_gpus()
    return DeviceReport("cpu", _cpu_name(), min(KERNEL_THREADS, os.cpu_count() or 1), gpus, reason)
