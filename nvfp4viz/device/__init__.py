"""What this machine computes on.

Every page says which device made its numbers: a CUDA GPU where one can be used, else the CPU with the same bits and one
line saying why.  Finding out must cost nothing and break nothing.  ``describe_device`` asks the driver through
``ctypes`` and looks which packages are installed, without importing CuPy or torch; ``nvfp4viz.device.probe`` really
runs a kernel, once, before the first computation, and what it finds counts from then on.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nvfp4viz.errors import DeviceError

__all__ = ["DeviceReport", "Gpu", "describe_device", "driver_release", "why_cpu"]

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: what cuInit says where CUDA_VISIBLE_DEVICES hides every GPU
VARIABLE = "NVFP4VIZ_DEVICE"  # "auto" or nothing: the GPU where one works; "cpu": never
OLDEST = (7, 5)  # compute capability of Turing; what the kernels are built from
KERNEL_THREADS = 2  # quant.fast splits rows over two threads: the smallest machine we promise speed on has two cores


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device as its driver describes it."""

    name: str
    capability: tuple[int, int]  # (major, minor), e.g. (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What computes here, and why not something faster."""

    computes_on: str  # "cpu" or "cuda"
    cpu: str  # the processor's own name, or its architecture
    threads: int  # how many threads our CPU kernels use
    gpus: tuple[Gpu, ...]  # the first one computes, if any
    driver: tuple[int, int] | None  # newest CUDA version that the driver serves
    reason: DeviceError | None  # why the CPU computes; None where the GPU does


@dataclass(slots=True)
class _Outcome:
    """What the real probe said; filled by ``nvfp4viz.device.probe``."""

    failure: DeviceError | None = None


outcome = _Outcome()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _find_gpus(library: str | None = None) -> tuple[tuple[Gpu, ...], tuple[int, int] | None, str | None]:
    """CUDA devices and the driver's CUDA version by way of the driver library, and why there are none."""
    try:
        cuda = ctypes.CDLL(library or ("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"))
    except OSError:
        return (), None, "no-driver"
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    try:
        started = cuda.cuInit(0)
        cuda.cuDriverGetVersion(ctypes.byref(version))  # answers before cuInit too
        if started == NO_DEVICE:
            return (), (version.value // 1000, version.value % 1000 // 10), "none-found"
        if started != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return (), None, "driver-failed"
        serves = (version.value // 1000, version.value % 1000 // 10)
        gpus = []
        for ordinal in range(count.value):
            handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if cuda.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
                return tuple(gpus), serves, "driver-failed"
            cuda.cuDeviceGetName(name, len(name), handle)
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # …_MINOR
            gpus.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    except AttributeError:  # a library without the driver's functions
        return (), None, "driver-failed"
    return tuple(gpus), serves, None if gpus else "none-found"


def driver_release(library: str | None = None) -> str:
    """Release of the NVIDIA driver, such as ``"580.159.04"``, as NVML tells it; empty where it does not."""
    try:
        nvml = ctypes.CDLL(library or ("nvml.dll" if platform.system() == "Windows" else "libnvidia-ml.so.1"))
        text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0:
            return ""
        return text.value.decode(errors="replace")
    except (OSError, AttributeError):
        return ""


def _torch_cuda() -> tuple[int, int] | str | None:
    """CUDA version that the installed torch was built for, ``"cpu"``, or ``None`` without torch; not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    built = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", version.read_text() if version.exists() else "", re.M)
    return (int(built[1]), int(built[2])) if built else "cpu"


def _cupy_cuda() -> int | None:
    """CUDA major that the installed CuPy wheel was built for (0: built here), or ``None`` without CuPy."""
    if importlib.util.find_spec("cupy") is None:
        return None
    for major in (13, 12, 11):
        try:
            importlib.metadata.distribution(f"cupy-cuda{major}x")
            return major
        except importlib.metadata.PackageNotFoundError:
            pass
    return 0


def _obstacle(
    gpus: tuple[Gpu, ...], driver: tuple[int, int] | None, reason: str | None,
    torch: tuple[int, int] | str | None, cupy: int | None,
) -> DeviceError | None:  # fmt: skip
    """The first thing that keeps the kernels from a GPU, as far as it shows without importing anything."""
    wish = os.environ.get(VARIABLE, "").strip().lower()
    if wish == "cpu":
        return DeviceError("device.switched-off")
    if wish not in ("", "auto"):
        return DeviceError("device.variable", value=wish[:40])
    if reason is not None:
        return DeviceError(f"device.{reason}")
    if gpus[0].capability < OLDEST:
        return DeviceError("device.old-gpu", name=gpus[0].name, capability=".".join(map(str, gpus[0].capability)))
    if torch is None:
        return DeviceError("device.no-torch")
    if isinstance(torch, str):
        return DeviceError("device.torch-cpu")
    if cupy is None:
        return DeviceError("device.no-cupy")
    for package, needed in (("PyTorch", torch[0]), ("CuPy", cupy)):
        if driver is not None and driver[0] < needed:
            serves = ".".join(map(str, driver))
            return DeviceError(
                "device.old-driver", package=package, driver=serves, needed=needed, driver_major=driver[0]
            )
    return None


@cache
def _found() -> DeviceReport:
    gpus, driver, reason = _find_gpus()
    obstacle = _obstacle(gpus, driver, reason, _torch_cuda() if gpus else None, _cupy_cuda() if gpus else None)
    threads = min(KERNEL_THREADS, os.cpu_count() or 1)
    return DeviceReport("cpu" if obstacle else "cuda", _cpu_name(), threads, gpus, driver, obstacle)


def describe_device() -> DeviceReport:
    """Name this machine's CPU and its CUDA devices, and which of them computes.

    Never raises, imports nothing heavy, asks the driver once.  ``"cuda"`` means that nothing speaks against it; after
    ``nvfp4viz.device.probe.require_cuda`` has run, that it works.
    """
    found = _found()
    if found.reason is None and outcome.failure is not None:
        return DeviceReport("cpu", found.cpu, found.threads, found.gpus, found.driver, outcome.failure)
    return found


def why_cpu(language: str = "en") -> str | None:
    """One line saying why the CPU computes here, or ``None`` where a GPU does."""
    reason = describe_device().reason
    if reason is None:
        return None
    text = reason.text(language)
    return text["what"] + ("" if language == "zh" else " ") + text["why"]
