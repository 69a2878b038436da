"""How this project compiles a Numba kernel.

Every kernel states its signature, so importing its module compiles it, or loads it from the cache, once, and no later
call compiles again.  Python's import lock makes two threads wait for one compilation.  ``python -m nvfp4viz.warm``
imports them all ahead of time.

Numba looks for a cache folder beside the source, then in the user's cache folder (``NUMBA_CACHE_DIR`` overrides
both).  Where none can be written, as in a read-only container, we compile in memory instead of failing.

**Keep a kernel and all jitted helpers it calls in one file**: Numba's cache notices changes of the kernel's own file
only, and would go on using old bits after a helper in another file changed.  For the same reason, touch the kernel
files after changing the options below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb

# The "numpy" error model divides by zero as IEEE says; the default would raise, and its test would keep loops scalar.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for ``signature`` without the interpreter lock, cached on disk where that is possible."""

    def compile_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled: Callable[..., Any] = nb.njit(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            compiled = nb.njit(signature, **_OPTIONS)(function)
        return compiled

    return compile_kernel


inline = nb.njit(**_OPTIONS)
"""For small helpers of the kernels in the same file; LLVM inlines them."""


def read_only(dtype: Any, ndim: int) -> Any:
    """Type of a C-contiguous input: shared arrays are read-only, and a writable array fits as well."""
    return nb.types.Array(dtype, ndim, "C", readonly=True)
