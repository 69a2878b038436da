"""Two threads for the Numba kernels.

Kernels release the interpreter lock (``nogil=True``), so two plain Python threads use two cores.  Numba's own
``parallel=True`` is not used: its portable layer breaks when several threads call it, and its OpenMP layer kills
children of a fork; the app runs one thread per visitor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

WORKERS = min(2, os.cpu_count() or 1)

# One helper thread for the whole process: the caller works too, so a second visitor waits for the helper rather than
# starting a third thread on two cores.  After a fork the executor's thread does not exist in the child, hence the pid.
_helper: tuple[int, ThreadPoolExecutor] | None = None


def _executor() -> ThreadPoolExecutor:
    global _helper
    if _helper is None or _helper[0] != os.getpid():
        _helper = (os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="nvfp4viz"))
    return _helper[1]


def run_halves(part: Callable[[int, int], None]) -> None:
    """Run ``part(0, n)`` here and ``part(1, n)`` in the helper thread, with n = 2 (n = 1 on a single core)."""
    if WORKERS == 1:
        part(0, 1)
        return
    other = _executor().submit(part, 1, 2)
    try:
        part(0, 2)
    finally:
        other.result()
