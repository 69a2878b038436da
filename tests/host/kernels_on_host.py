"""Run ``kernels/*.cu`` on the CPU: compiled with g++ against ``cuda_on_host.h``, called with NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.host.restatement import compile_cpp

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
OPTIONS = ("-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{HERE}", f"-I{KERNELS}")


class HostKernels:
    """One ``.cu`` file as a shared library; ``kernels(name, grid, threads, *arguments)`` runs one kernel.

    Arguments are contiguous NumPy arrays (their address is passed), None, or NumPy scalars of the kernel's own width.
    """

    def __init__(self, folder: Path, source: str, names: Sequence[str]) -> None:
        stem = Path(source).stem
        driver, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        exports = "\n".join(f"NV_EXPORT({name})" for name in names)
        driver.write_text(f'#include "cuda_on_host.h"\n#include "{source}"\n{exports}\n', encoding="utf-8")
        compile_cpp(driver, library, *OPTIONS)
        self._library = ctypes.CDLL(str(library))

    def __call__(
        self, name: str, grid: int | tuple[int, ...], threads: int | tuple[int, ...], *arguments: object
    ) -> None:
        values = []
        for argument in arguments:
            if argument is None:
                values.append(np.uint64(0))
            elif isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                values.append(np.uint64(argument.ctypes.data))
            else:
                assert isinstance(argument, np.generic), f"{argument!r} has no width"
                values.append(argument)
        held = [np.array([value]) for value in values]
        addresses = (ctypes.c_void_p * len(held))(*[array.ctypes.data for array in held])
        grid = (grid,) if isinstance(grid, int) else grid
        sizes = (ctypes.c_uint * 3)(*[*grid, 1, 1][:3])
        threads = (threads,) if isinstance(threads, int) else threads
        block = (ctypes.c_uint * 2)(*[*threads, 1][:2])
        getattr(self._library, f"run_{name}")(sizes, block, addresses)
