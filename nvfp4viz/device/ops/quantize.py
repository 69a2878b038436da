"""Quantise on the GPU: `nvfp4viz.quant.quantize`, the same bits, on torch's tensors.

``kernels/quantize.cu`` and ``quantize_mx.cu`` compute; here is decided which of them, and how the work is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_multiple
from nvfp4viz.device.ops.groups import SPREAD_FROM, GlobalScale, aligned, check_scales, empty, place
from nvfp4viz.device.ops.layout import TILE_ROWS, _most_tiles, _padded
from nvfp4viz.errors import FormatError
from nvfp4viz.quant.rcp import rcp_table
from nvfp4viz.quant.recipes import RECIPES

__all__ = ["DTYPES", "RECIPE_KERNELS", "DeviceQuantized", "quantize"]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
RECIPE_KERNELS = {
    "ieee": "ieee",
    "vllm-cuda": "vllm",
    "ocp-floor": "ocp_floor",
    "vllm-even": "vllm_even",
    "flashinfer-ceil": "flashinfer_ceil",
    "deepgemm-ceil": "deepgemm_ceil",
}
"""Recipes that the kernels compute, and what they are called there."""
LAYOUTS = ("linear", "swizzled")
THREADS, THREADS_MX = 256, 128
SOFT = ("NV_FORCE_SOFT",)
Layout = Literal["linear", "swizzled"]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceQuantized:
    """A matrix in NVFP4 or MXFP4 on the GPU.

    Attributes
    ----------
    packed : (M, K//2) uint8
    scales : uint8
        Linear: (M, K//block).  Swizzled: flat, in 128x4 order, padding 0; with `offsets`, every range of rows is padded
        to tiles of its own.
    global_scale : float or float32 tensor
        As given, and as the recipe stores it: one, one for each row, or one for each range.
    recipe : str
    shape : (M, K)
    layout : "linear" or "swizzled"
    offsets : (E+1,) int32, optional
        First row of each range.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    global_scale: GlobalScale
    recipe: str
    shape: tuple[int, int]
    layout: Layout = "linear"
    offsets: torch.Tensor | None = None


def quantize(
    x: torch.Tensor,
    *,
    recipe: str,
    global_scale: GlobalScale | None = None,
    offsets: torch.Tensor | None = None,
    layout: Layout = "linear",
    soft: bool = False,
) -> DeviceQuantized:
    """Quantise the rows of a matrix.

    Parameters
    ----------
    x : (M, K) bfloat16, float16 or float32
        K a multiple of 16 (NVFP4) or 32 (MXFP4).
    recipe
        One of `RECIPE_KERNELS`.
    global_scale
        Encode scale: a number, a tensor of one, (E,) with `offsets`, or (M,).  By default 2688/amax, computed on the
        GPU.  MXFP4 has none.
    offsets : (E+1,) int32, optional
        First row of each range (of each expert), ascending from 0 to M at most; the values are not looked at
        (`check_offset_values` does).  Rows past the last offset are counted to the last range.
    layout
        Of the block scales; see `DeviceQuantized`.
    soft
        Compute conversions and reciprocals in software, as a GPU without the instructions does.  The bits are the same;
        the self-test holds one against the other.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.method``, ``ops.global-scales``, ``ops.number``,
        ``recipe.no-global-scale``
    DeviceError
        ``ops.memory``
    """
    op = "quantize"
    check(op, "x", x, tuple(DTYPES), None, None)
    _one_of(op, recipe, tuple(RECIPE_KERNELS))
    _one_of(op, layout, LAYOUTS)
    found = RECIPES[recipe]
    rows, k = x.shape
    check_multiple(op, "K", k, found.block_size)
    columns = k // found.block_size
    x = aligned(op, x)
    packed = empty(op, (rows, k // 2), torch.uint8, x.device)
    if found.scheme == "mxfp4":
        if global_scale is not None:
            raise FormatError("recipe.no-global-scale", name=recipe)
        global_scale = 1.0
    elif global_scale is None:
        from nvfp4viz.device.ops.amax import amax

        top = amax(x)
        global_scale = torch.full_like(top, 2688) / top  # a number over a tensor would be two roundings
    given = check_scales(op, global_scale, offsets, rows, x.device)
    scales = empty(op, scale_shape(rows, columns, layout, offsets), torch.uint8, x.device)
    defines, table = (SOFT, reciprocals(x.device)) if soft else ((), None)
    name = f"{DTYPES[x.dtype]}_{RECIPE_KERNELS[recipe]}"
    blocks, sizes = rows * columns, (np.int32(rows), np.int32(columns))
    written, sources, places, tiled = scales, None, None, layout == "swizzled"
    if tiled and offsets is not None and rows and found.scheme == "mxfp4":  # row by row first: see ranges.cu
        given, sources = given.spread_and_place(op, rows, most_tiles(rows, offsets))
        written, tiled = empty(op, (rows, columns), torch.uint8, x.device), False
    elif tiled and offsets is not None and rows:
        given, places = given.spread_over_tiles(op, rows, most_tiles(rows, offsets), scales)
    if found.scheme == "mxfp4":
        if tiled:
            run = kernel("quantize_mx.cu", f"nv_quantize_mx_{name}_swizzled", defines)
            run(strip_grid(rows, columns), THREADS, (x, packed, scales, *sizes, table))
        else:
            run = kernel("quantize_mx.cu", f"nv_quantize_mx_{name}_flat", defines)
            run(-(-blocks // THREADS_MX), THREADS_MX, (x, packed, written, np.uint64(blocks), table))
    elif tiled:
        scale = (given.scales, given.one, np.int32(given.kind))
        if places is None:
            run = kernel("quantize.cu", f"nv_quantize_{name}_swizzled", defines)
            run(strip_grid(rows, columns), THREADS, (x, packed, scales, *sizes, *scale, table))
        else:
            run = kernel("quantize.cu", f"nv_quantize_{name}_placed", defines)
            run(*pair_grid(rows, columns), (x, packed, scales, *sizes, *scale, table, places))
    else:
        if blocks >= SPREAD_FROM:
            given = given.spread(op, rows)
        grid, block = row_grid(rows, columns, 2)
        run = kernel("quantize.cu", f"nv_quantize_{name}_linear", defines)
        run(grid, block, (x, packed, written, *sizes, *given.arguments(), table))
    if sources is not None:
        place(written, scales, sources)
    return DeviceQuantized(packed, scales, global_scale, recipe, (rows, k), layout, offsets)


def scale_shape(rows: int, columns: int, layout: str, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Shape of the block scales of a matrix with ``columns`` blocks a row; swizzled ones are flat, padding included."""
    if layout == "linear":
        return (rows, columns)
    ranges = 1 if offsets is None else offsets.numel() - 1
    return (_most_tiles(ranges, rows, offsets) * TILE_ROWS * _padded(columns),)


def most_tiles(rows: int, offsets: torch.Tensor) -> int:
    """Tiles of 128 rows that a 128x4 layout has where every range is padded to tiles of its own."""
    return _most_tiles(offsets.numel() - 1, rows, offsets)


def strip_grid(rows: int, columns: int) -> tuple[int, int, int]:
    """Grid for kernels in the 128x4 layout: 32 columns by a quarter of 128 rows a block.

    >>> strip_grid(130, 44)
    (2, 8, 1)
    """
    return _grid(-(-_padded(columns) // 32), -(-rows // TILE_ROWS) * 4)


def pair_grid(rows: int, columns: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Grid and block for kernels whose warps take 32 columns of two rows.

    >>> pair_grid(101, 176), pair_grid(101, 44), pair_grid(8192, 1024)
    (((1, 51, 1), (192, 1)), ((1, 13, 1), (64, 4)), ((4, 4096, 1), (256, 1)))
    """
    strips = -(-columns // 32)
    across = -(-strips // (THREADS // 32))
    wide = -(-strips // across)
    high = max(1, THREADS // 32 // wide)
    return _grid(across, -(-rows // (2 * high))), (32 * wide, high)


def row_grid(rows: int, columns: int, each: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Grid and block for kernels whose threads take ``each`` columns of one row, ``blockDim.x`` apart.

    >>> row_grid(100, 176, 2), row_grid(100000, 1024, 2)
    (((1, 50, 1), (88, 2)), ((2, 50000, 2), (256, 1)))
    """
    threads = -(-columns // each)
    across = -(-threads // THREADS)
    x = -(-threads // across)
    y = max(1, THREADS // x)
    return _grid(across, -(-rows // y)), (x, y)


def _grid(across: int, down: int) -> tuple[int, int, int]:
    """Columns first; what is more than a grid's second axis takes goes to the third."""
    deep = max(1, -(-down // 65535))
    return across, -(-down // deep), deep


@cache
def reciprocals(device: torch.device) -> torch.Tensor:
    """(2^23,) int8 on a device: `nvfp4viz.quant.rcp.rcp_table`."""
    return torch.from_numpy(np.array(rcp_table())).to(device)


def _one_of(op: str, method: str, known: tuple[str, ...]) -> None:
    if method not in known:
        raise FormatError("ops.method", op=op, method=method, known=", ".join(known))
