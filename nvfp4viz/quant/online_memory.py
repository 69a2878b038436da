"""What the ways of online packing really hold while they run: measured, where `online.peak_buffers` counts.

``tracemalloc`` is told of every array that NumPy makes and of every Python object, but of the whole interpreter's: in a
server it would count other visitors' arrays too.  So the ways run in a process of their own, which does nothing else::

    python -m nvfp4viz.quant.online_memory E N K < weights.bf16

It answers with one line of JSON.  It uses one thread: a second one's scratch would count or not as the two happen to
meet, and the same weights would not give the same number.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.quant import threads
from nvfp4viz.quant.online import BFLOAT16, WAYS, Way, expert_weights, pack_online

Array = npt.NDArray[Any]
RUNS = 3
SECONDS = 120.0
"""Longest that the process may take; compiling the kernels for the first time is most of it."""


def traced_peak(weights: Array, way: Way) -> int:
    """Most bytes that this process held at once, above what it held before, while packing ``(E, N, K)`` BF16.

    The way is run once before: what is loaded or built the first time belongs to no way.  Of several runs the smallest
    counts: some hundred bytes of Python's own objects come and go.
    """
    pack_online(weights, way)
    return min(_one_peak(weights, way) for _ in range(RUNS))


def _one_peak(weights: Array, way: Way) -> int:
    tracemalloc.start()
    try:
        pack_online(weights, way)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_peaks(weights: Array) -> dict[Way, int]:
    """Bytes at the peak of each way, without the weight itself, measured by `traced_peak` in a process of its own.

    Raises
    ------
    FormatError
        ``online.weights``; ``online.process`` where none can be started, it fails, or it takes longer than `SECONDS`.
    """
    array = expert_weights(weights)
    command = [sys.executable, "-m", "nvfp4viz.quant.online_memory", *map(str, array.shape)]
    try:
        done = subprocess.run(
            command,
            input=array.tobytes(),
            cwd=Path(__file__).parents[2],
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise FormatError("online.process", reason=_reason(error)) from error
    return {way: int(found[way]) for way in WAYS}


def _reason(error: Exception) -> str:
    """The last line that the process wrote, or what kept it from starting; without the paths of this machine."""
    said = getattr(error, "stderr", None) or b""
    lines = said.decode(errors="replace").strip().splitlines()
    told = lines[-1] if lines else getattr(error, "strerror", None) or type(error).__name__
    return re.sub(r"\S*[/\\]\S+", "…", told)


def main(arguments: list[str]) -> None:
    """Weights from standard input, their shape from the command line; peaks in bytes to standard output."""
    threads.WORKERS = 1
    shape = tuple(map(int, arguments))
    weights = np.frombuffer(sys.stdin.buffer.read(), BFLOAT16).reshape(shape)
    print(json.dumps({way: traced_peak(weights, way) for way in WAYS}))


if __name__ == "__main__":
    main(sys.argv[1:])
