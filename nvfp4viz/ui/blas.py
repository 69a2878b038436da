"""One thread for NumPy's matrix products.

tiny-moe's products are small and the server answers many people at once: OpenBLAS's second thread costs more in waiting
than it brings (a 100-token forward pass: 0.25 s of processor time with two threads, 0.05 s with one, measured on two
cores).  ``OPENBLAS_NUM_THREADS`` must be set before NumPy is imported, and Streamlit imports it before any script of
ours runs, so the library is asked directly.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path


@cache
def use_one_thread() -> bool:
    """Ask NumPy's OpenBLAS for one thread; False where NumPy brings another library (then nothing changes)."""
    import numpy as np

    for folder in (Path(np.__file__).parents[1] / "numpy.libs", Path(np.__file__).parent / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for name in (
                "scipy_openblas_set_num_threads64_",
                "openblas_set_num_threads64_",
                "openblas_set_num_threads",
            ):
                if hasattr(library, name):
                    getattr(library, name)(1)
                    return True
    return False
