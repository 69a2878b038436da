"""``python -m nvfp4viz.warm``: compile every kernel now, so that no page waits for a compiler.

Kernels state their signatures, so importing their modules is all it takes; later processes load the compiled code from
Numba's cache in a fraction of a second.  They live in modules whose names end in ``kernels`` or ``kernel``.  Where a
GPU computes, the CUDA kernels are compiled for it into the cache of `nvfp4viz.device.build`.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from nvfp4viz import device
from nvfp4viz.device import build
from nvfp4viz.errors import DeviceError

PACKAGE = Path(__file__).parent
MARK = "\n@kernel("


def kernel_modules() -> list[str]:
    """Dotted names of all modules that hold Numba kernels, in a stable order.

    >>> "nvfp4viz.quant.fast_kernels" in kernel_modules()
    True
    """
    files = sorted([*PACKAGE.rglob("*kernels.py"), *PACKAGE.rglob("*kernel.py")])
    # A lesson may be named after a kernel; its snippet under content/code is a template and no Python yet.
    return [
        ".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts))
        for file in files
        if MARK in file.read_text(encoding="utf-8")
    ]


def cuda_sources() -> list[str]:
    """Files of ``kernels/`` that the app may launch on this machine's GPU; none where the CPU computes."""
    if device.describe_device().computes_on != "cuda":
        return []
    return sorted(path.name for path in build.KERNELS.glob("*.cu") if path.stem != "selftest")


def steps() -> list[tuple[str, Callable[[], object]]]:
    """What there is to compile, by name, and how."""
    found: list[tuple[str, Callable[[], object]]] = [
        (name, partial(importlib.import_module, name)) for name in kernel_modules()
    ]
    gpus = device.describe_device().gpus
    return found + [(name, partial(build.cubin, name, build.target_of(gpus[0].capability))) for name in cuda_sources()]


def warm() -> float:
    """Compile everything, showing progress on stderr; returns the seconds it took.

    A CUDA kernel that does not compile is named and left to the CPU, which the pages then say.
    """
    todo = steps()
    begin = time.perf_counter()
    for done, (name, compile_it) in enumerate(todo, start=1):
        print(f"\rCompiling kernels {done}/{len(todo)}: {name:<50}", end="", file=sys.stderr, flush=True)
        try:
            compile_it()
        except DeviceError as error:
            print(f"\r{error.what} {error.why}", file=sys.stderr)
    seconds = time.perf_counter() - begin
    print(f"\r{len(todo)} kernel modules are ready after {seconds:.1f} s.{'':<50}", file=sys.stderr)
    return seconds


class Warming(threading.Thread):
    """The thread that loads the kernels; ``done`` of ``total`` are there."""

    def __init__(self) -> None:
        super().__init__(name="nvfp4viz-warm", daemon=True)
        self._steps = steps()
        self.done, self.total = 0, len(self._steps)

    def run(self) -> None:
        for name, compile_it in self._steps:
            try:
                compile_it()
            except Exception as error:
                print(f"{name} did not load: {error}", file=sys.stderr)
            self.done += 1


@cache
def warm_in_background() -> Warming:
    """Load the kernels in a thread, once a process: for a server that was started without ``make app``.

    A page's title is drawn meanwhile; what computes waits for the thread and shows how far it is (``ui/kernels.py``).
    A kernel that does not compile shows its error where it is used, so it is not raised here.
    """
    thread = Warming()
    thread.start()
    return thread


if __name__ == "__main__":
    warm()
