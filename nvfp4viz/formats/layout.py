"""Where a block scale lies in memory.

Linear is row-major ``(M, C)``.  The tensor core reads scales in tiles of 128 rows × 4 columns ("128x4 swizzle");
FlashInfer's small-batch kernels use tiles of 8 × 4.  Formulas: vLLM ``cvt_quant_to_fp4_get_sf_out_offset`` with
C = K/16 scale columns (K/32 for MXFP4).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError

U8 = npt.NDArray[np.uint8]


def offset_128x4(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column) in the 128x4 layout of a tensor with ``columns`` scale columns.

    >>> offset_128x4(33, 5, 8)
    533
    """
    tiles = -(-columns // 4)
    return ((row >> 7) * tiles + (column >> 2)) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3)


def offset_8x4(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column) in the 8x4 layout.

    >>> offset_8x4(9, 5, 8)
    101
    """
    tiles = -(-columns // 4)
    return ((row >> 3) * tiles + (column >> 2)) * 32 + (row & 7) * 4 + (column & 3)


def swizzled_size(rows: int, columns: int) -> int:
    """Bytes that the 128x4 layout takes: rows up to a multiple of 128, columns to a multiple of 4."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def swizzle_128x4(scales: npt.ArrayLike) -> U8:
    """Scales ``(M, C)`` in 128x4 order as flat bytes; padding is 0, as the dense kernel writes it.

    Raises
    ------
    FormatError
        ``format.layout-rank``: not a matrix.
    """
    array = np.asarray(scales, np.uint8)
    if array.ndim != 2:
        raise FormatError("format.layout-rank", shape=array.shape)
    rows, columns = array.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), np.uint8)
    padded[:rows, :columns] = array
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def unswizzle_128x4(flat: npt.ArrayLike, rows: int, columns: int) -> U8:
    """Scales ``(rows, columns)`` from 128x4 bytes; inverse of :func:`swizzle_128x4`, padding dropped.

    Raises
    ------
    FormatError
        ``format.layout-size``: the byte count is not that of this shape.
    """
    array = np.asarray(flat, np.uint8).reshape(-1)
    if array.size != swizzled_size(rows, columns):
        raise FormatError(
            "format.layout-size", size=array.size, rows=rows, columns=columns, expected=swizzled_size(rows, columns)
        )
    tiles = array.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns])
