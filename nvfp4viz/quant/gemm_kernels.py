"""Numba kernel of the sequential float32 product; importing this module compiles it or loads it from the cache."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numba as nb
import numpy as np

from nvfp4viz.quant.jit import kernel, read_only


@kernel(nb.void(read_only(nb.f4, 2), read_only(nb.f4, 2), nb.f4[:, ::1]))
def sequential_product(x, columns, acc):
    """``acc[m, n] += Σ_k x[m, k] * columns[k, n]``, k ascending, each product and each sum rounded to f32.

    No fused multiply-add: the kernel's options forbid contraction, so the bits are those of NumPy.
    """
    width = columns.shape[1]
    for m in range(x.shape[0]):
        row = acc[m]
        for k in range(x.shape[1]):
            factor = x[m, k]
            column = columns[k]
            for n in range(width):
                row[n] = np.float32(row[n] + np.float32(factor * column[n]))
