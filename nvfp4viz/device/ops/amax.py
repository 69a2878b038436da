"""Largest magnitudes on the GPU: `nvfp4viz.quant.amax` of a tensor, of its rows, or of ranges of rows."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_multiple, check_offsets
from nvfp4viz.device.ops.groups import aligned, empty
from nvfp4viz.device.ops.quantize import DTYPES, THREADS
from nvfp4viz.errors import FormatError

__all__ = ["amax"]

PER = ("tensor", "expert", "token")
CHUNKS, LONGEST = 8192, 2048
"""A warp reads up to 2048 vectors of 16 bytes that lie together; a smaller tensor is cut into 8192 pieces."""
MOST_ROWS = 1 << 26
"""Rows of one launch: a warp for each, and the kernel counts its threads in 32 bits."""


def amax(
    x: torch.Tensor, offsets: torch.Tensor | None = None, per: Literal["tensor", "expert", "token"] | None = None
) -> torch.Tensor:
    """Largest magnitude, NaN where there is one; 0 for nothing.

    Parameters
    ----------
    x : (M, K) bfloat16, float16 or float32
        Any shape ``per="tensor"``; else rows of whole 16 bytes.
    offsets : (E+1,) int32
        First row of each expert, for ``per="expert"``, ascending from 0 to M at most (`check_offset_values` looks);
        rows past the last offset are counted to the last one.
    per
        By default ``"expert"`` with `offsets`, else ``"tensor"``.

    Returns
    -------
    float32 (1,), (E,) or (M,)

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.method``
    DeviceError
        ``ops.memory``
    """
    op = "amax"
    per = per or ("tensor" if offsets is None else "expert")
    if per not in PER:
        raise FormatError("ops.method", op=op, method=per, known=", ".join(PER))
    check(op, "x", x, tuple(DTYPES), *(None,) * (x.dim() if per == "tensor" else 2))
    x, name = aligned(op, x), DTYPES[x.dtype]
    if per == "tensor":
        out = empty(op, (1,), torch.float32, x.device).zero_()
        vectors = x.numel() * x.element_size() // 16
        chunk = min(LONGEST, max(32, vectors // CHUNKS))
        grid = max(1, -(-vectors // (chunk * THREADS // 32)))
        kernel("amax.cu", f"nv_amax_{name}")(grid, THREADS, (x, np.uint64(x.numel()), np.uint32(chunk), out))
        return out
    run = kernel("amax.cu", f"nv_amax_rows_{name}")
    rows, k = x.shape
    check_multiple(op, "K", k, 16 // x.element_size())
    ranges = 0
    if per == "expert":
        check_offsets(op, offsets)
        assert offsets is not None
        ranges = offsets.numel() - 1
    else:
        offsets = None
    out = empty(op, (ranges if per == "expert" else rows,), torch.float32, x.device).zero_()
    for first in range(0, rows, MOST_ROWS):
        part = x[first : first + MOST_ROWS]
        of_part = out[first:] if offsets is None else out
        sizes = (np.int32(len(part)), np.int32(k), None if offsets is None else offsets - first, np.int32(ranges))
        run(-(-len(part) // (THREADS // 32)), THREADS, (part, *sizes, of_part))
    return out
