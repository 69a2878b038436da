"""Orders of bytes on the GPU: 128x4 block scales, gate and up rows mixed, four UE8M0 to a word.

NumPy's truth, byte for byte, is `nvfp4viz.formats`.
"""

from __future__ import annotations

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_multiple, check_offsets
from nvfp4viz.device.ops.groups import aligned, empty
from nvfp4viz.errors import FormatError

__all__ = ["interleave_gate_up", "pack_ue8m0", "scale_tile_offsets", "swizzle", "unswizzle"]

THREADS = 128
TILE_ROWS = 128


def scale_tile_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """First row of each expert's block scales when every expert starts a tile of 128 rows: (E+1,) int32.

    What vLLM calls ``blockscale_offsets``; computed on the device, without waiting for it.
    """
    tiles = (offsets[1:] - offsets[:-1] + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    starts = torch.zeros_like(offsets)
    torch.cumsum(tiles, 0, out=starts[1:])
    return starts


def swizzle(scales: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """Block scales in 128x4 order.

    Parameters
    ----------
    scales : (R, C) or (E, R, C) uint8
        One matrix, or one for each expert: each is padded to tiles of its own.
    offsets : (E+1,) int32, optional
        For (R, C): rows of expert e are ``offsets[e] … offsets[e+1]`` and are padded to tiles of their own.

    Returns
    -------
    Flat uint8, padding 0.  With `offsets`, room for the most tiles these rows can need; what is used are the first
    ``scale_tile_offsets(offsets)[-1]`` rows.

    Raises
    ------
    FormatError
        ``ops.tensor``
    """
    ranges, rows, columns = _check_scales("swizzle", scales, offsets)
    tiles = _most_tiles(ranges, rows, offsets)
    flat = empty("swizzle", (tiles * TILE_ROWS * _padded(columns),), torch.uint8, scales.device).zero_()
    _launch("swizzle", scales, flat, offsets, ranges, rows, columns, tiles)
    return flat


def unswizzle(
    flat: torch.Tensor, shape: tuple[int, int] | tuple[int, int, int], offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Inverse of :func:`swizzle`: block scales of ``shape`` from their 128x4 bytes.

    Raises
    ------
    FormatError
        ``ops.tensor``: `flat` has another size than :func:`swizzle` gives.
    """
    scales = empty("unswizzle", shape, torch.uint8, flat.device)
    ranges, rows, columns = _check_scales("unswizzle", scales, offsets)
    tiles = _most_tiles(ranges, rows, offsets)
    check("unswizzle", "flat", flat, torch.uint8, tiles * TILE_ROWS * _padded(columns))
    _launch("unswizzle", flat, scales, offsets, ranges, rows, columns, tiles)
    return scales


def _check_scales(op: str, scales: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, int, int]:
    """Ranges, rows of each (of all, with offsets), columns."""
    shape = (None,) * (3 if isinstance(scales, torch.Tensor) and scales.dim() == 3 and offsets is None else 2)
    check(op, "scales", scales, torch.uint8, *shape)
    if offsets is not None:
        check_offsets(op, offsets)
        return len(offsets) - 1, scales.shape[0], scales.shape[1]
    return (scales.shape[0] if scales.dim() == 3 else 1), scales.shape[-2], scales.shape[-1]


def _padded(columns: int) -> int:
    return -(-columns // 4) * 4


def _most_tiles(ranges: int, rows: int, offsets: torch.Tensor | None) -> int:
    if offsets is None:
        return ranges * -(-rows // TILE_ROWS)
    # every range that has rows ends in one partial tile at most
    return rows // TILE_ROWS + min(ranges, rows)


def _launch(
    op: str,
    source: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor | None,
    ranges: int,
    rows: int,
    columns: int,
    tiles: int,
) -> None:
    grid = (-(-_padded(columns) // (4 * THREADS // 32)), tiles)
    sizes = (np.int32(ranges), np.int32(rows), np.int32(columns))
    kernel("layout.cu", f"nv_{op}_128x4")(grid, THREADS, (aligned(op, source), target, offsets, *sizes))


def interleave_gate_up(w: torch.Tensor, group: int = 8) -> torch.Tensor:
    """`nvfp4viz.formats.interleave_gate_up` of ``(2I, C)`` or ``(E, 2I, C)`` bytes: a weight, or its scales.

    Raises
    ------
    FormatError
        ``ops.tensor``; ``format.interleave``
    """
    check("interleave_gate_up", "w", w, torch.uint8, *(None,) * (3 if w.dim() == 3 else 2))
    rows, columns = w.shape[-2], w.shape[-1]
    if group < 1 or rows == 0 or rows % (2 * group):
        raise FormatError("format.interleave", shape=tuple(w.shape), multiple=2 * group)
    out = empty("interleave_gate_up", tuple(w.shape), torch.uint8, w.device)
    matrices = w.numel() // (rows * columns) if columns else 0
    # rows that stay together lie together: `group` of them are one long row, and a grid's second axis ends at 65535
    rows, columns = rows // group, columns * group
    whole = columns % 16 == 0
    pieces = columns // 16 if whole else columns
    name = "nv_interleave_gate_up" if whole else "nv_interleave_gate_up_bytes"
    sizes = (np.int32(rows), np.int32(pieces), np.int32(1))
    source = aligned("interleave_gate_up", w)
    kernel("layout.cu", name)((-(-pieces // THREADS), rows, matrices), THREADS, (source, out, *sizes))
    return out


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Four UE8M0 bytes to a word, the first in bits 0 to 7: ``(M, C)`` uint8 to ``(M, C//4)`` int32.

    Raises
    ------
    FormatError
        ``ops.tensor``; ``ops.multiple`` where C is not a multiple of 4
    """
    check("pack_ue8m0", "scales", scales, torch.uint8, None, None)
    check_multiple("pack_ue8m0", "columns", scales.shape[1], 4)
    words = empty("pack_ue8m0", (scales.shape[0], scales.shape[1] // 4), torch.int32, scales.device)
    kernel("layout.cu", "nv_pack_ue8m0")(
        -(-words.numel() // THREADS), THREADS, (scales, words, np.int64(words.numel()))
    )
    return words
