"""Back from bytes to values on the GPU: `nvfp4viz.quant.dequantize`, the same bits."""

from __future__ import annotations

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_multiple
from nvfp4viz.device.ops.groups import ONE, SPREAD_FROM, aligned, check_scales, empty
from nvfp4viz.device.ops.layout import unswizzle
from nvfp4viz.device.ops.quantize import DeviceQuantized, row_grid, scale_shape
from nvfp4viz.errors import FormatError
from nvfp4viz.quant.recipes import find_recipe

__all__ = ["dequantize"]

OUT = {torch.bfloat16: ("bf16", 8), torch.float32: ("f32", 4)}
"""Name in the kernels, and codes that make 16 bytes."""
UNITS, THREADS = 2, 512
"""Units of 16 bytes a thread; threads of a block, where rows do not matter."""


def decoding(recipe: str) -> int:
    """``Decoding`` of ``kernels/dequantize.cu``: how a block's multiplier comes from its byte and the global scale."""
    found = find_recipe(recipe)
    if found.scheme == "mxfp4":
        return 4 if recipe == "modelopt-mxfp4" else 3
    if recipe == "compressed-tensors":
        return 2
    return 1 if found.stores == "decode" else 0


def dequantize(q: DeviceQuantized, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of a quantised matrix: ``code · (block scale · decode scale)``, every NaN the quiet one.

    Parameters
    ----------
    q
        Of any recipe; its global scale as the recipe stores it, one, one for each row, or one for each range.
    dtype
        bfloat16 (the float32 value rounded once), or float32.

    Returns
    -------
    (M, K)

    Raises
    ------
    FormatError
        ``quantize.dtype``, ``recipe.unknown``, ``ops.tensor``, ``ops.multiple``, ``ops.global-scales``, ``ops.number``
    DeviceError
        ``ops.memory``
    """
    op = "dequantize"
    if dtype not in OUT:
        raise FormatError("quantize.dtype", dtype=dtype)
    block = find_recipe(q.recipe).block_size
    rows, k = q.shape
    check_multiple(op, "K", k, block)
    check(op, "packed", q.packed, torch.uint8, rows, k // 2)
    device, columns, scales, layout = q.packed.device, k // block, q.scales, q.layout
    check(op, "scales", scales, torch.uint8, *scale_shape(rows, columns, layout, q.offsets))
    if layout == "swizzled" and q.offsets is not None:
        scales, layout = unswizzle(scales, (rows, columns), q.offsets), "linear"
    given = check_scales(op, q.global_scale, q.offsets, rows, device)
    out = empty(op, (rows, k), dtype, device)
    name, codes = OUT[dtype]
    units = k // codes
    how = (np.int32(decoding(q.recipe)), np.int32(block.bit_length() - 1), np.int32(q.recipe == "modelopt"))
    packed = aligned(op, q.packed)
    if layout == "linear" and given.kind == ONE:
        units_in_all, done = rows * units, 0
        if block == 16 and decoding(q.recipe) <= 1 and q.recipe != "modelopt":
            whole = units_in_all // (UNITS * THREADS)  # blocks of threads without an end in them
            run = kernel("dequantize.cu", f"nv_dequantize_{name}_whole")
            run(whole, THREADS, (packed, scales, out, given.scales, given.one, how[0]))
            done = whole * UNITS * THREADS
        if left := units_in_all - done:
            first = done * codes
            rest = packed.view(-1)[first // 2 :], scales.view(-1)[first // block :], out.view(-1)[first:]
            run = kernel("dequantize.cu", f"nv_dequantize_{name}_flat")
            run(-(-left // (UNITS * THREADS)), THREADS, (*rest, np.uint64(left), given.scales, given.one, *how))
    else:
        if rows * columns >= SPREAD_FROM:
            given = given.spread(op, rows)
        grid, threads = row_grid(rows, units, UNITS)
        run = kernel("dequantize.cu", f"nv_dequantize_{name}_{layout}")
        run(grid, threads, (packed, scales, out, np.int32(rows), np.int32(units), *given.arguments(), *how))
    return out
