"""Two threads for the Numba kernels.

Kernels release the interpreter lock (``nogil=True``), so two plain Python threads use two cores.  Numba's own
``parallel=True`` is not used: its portable layer breaks when several threads call it, and its OpenMP layer kills
children of a fork; the app runs one thread per visitor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

WORKERS = min(2, os.cpu_count() or 1)
PARTS = 8
"""Pieces of a large job.  More than threads, so that a thread that is held up leaves its share to the other."""

# One helper thread for the whole process: the caller works too, so a second visitor waits for the helper rather than
# starting a third thread on two cores.  After a fork the executor's thread does not exist in the child, hence the pid.
_helper: tuple[int, ThreadPoolExecutor] | None = None


def _executor() -> ThreadPoolExecutor:
    global _helper
    if _helper is None or _helper[0] != os.getpid():
        _helper = (os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="nvfp4viz"))
    return _helper[1]


def run_parts(part: Callable[[int, int], None], large: bool) -> None:
    """Run ``part(0, n) … part(n-1, n)``: one part if the job is not ``large``, else shared with the helper thread.

    Each thread takes the next part when it has finished one.  If the helper is busy with another visitor's job, the
    caller simply does all parts itself.
    """
    if not large or WORKERS == 1:
        part(0, 1)
        return
    numbers = itertools.count()  # next() on it is one bytecode under the interpreter lock: no part is taken twice
    job = [part]

    def work() -> None:
        while (number := next(numbers)) < PARTS:
            job[0](number, PARTS)

    other = _executor().submit(work)
    try:
        work()
    finally:
        if not other.cancel():
            other.result()
        # A cancelled call stays in the helper's queue until it gets there; the job's arrays must not.
        job.clear()
