"""``python -m nvfp4viz.warm``: compile every Numba kernel now, so that no page waits for a compiler.

Kernels state their signatures, so importing their modules is all it takes; later processes load the compiled code from
Numba's cache in a fraction of a second.  Every module whose name ends in ``kernels`` or ``kernel`` holds some.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent


def kernel_modules() -> list[str]:
    """Dotted names of all modules that hold Numba kernels, in a stable order.

    >>> "nvfp4viz.quant.fast_kernels" in kernel_modules()
    True
    """
    files = sorted([*PACKAGE.rglob("*kernels.py"), *PACKAGE.rglob("*kernel.py")])
    return [".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files]


def warm() -> float:
    """Import all kernel modules, showing progress on stderr; returns the seconds it took."""
    names = kernel_modules()
    begin = time.perf_counter()
    for done, name in enumerate(names, start=1):
        print(f"\rCompiling kernels {done}/{len(names)}: {name:<50}", end="", file=sys.stderr, flush=True)
        importlib.import_module(name)
    seconds = time.perf_counter() - begin
    print(f"\r{len(names)} kernel modules are ready after {seconds:.1f} s.{'':<50}", file=sys.stderr)
    return seconds


@cache
def warm_in_background() -> threading.Thread:
    """Load the kernels in a thread, once a process: for a server that was started without ``make app``.

    The first page is drawn meanwhile; one that needs a kernel waits for its import alone.  A kernel that does not
    compile shows its error where it is used, so it is not raised here.
    """

    def load() -> None:
        for name in kernel_modules():
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"{name} did not load: {error}", file=sys.stderr)

    thread = threading.Thread(target=load, name="nvfp4viz-warm", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    warm()
