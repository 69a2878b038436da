"""Where a block scale lies in memory; and two more orders that kernels ask for, mixed rows and scales in words.

Linear is row-major ``(M, C)``.  The tensor core reads scales in tiles of 128 rows × 4 columns ("128x4 swizzle");
FlashInfer's small-batch kernels use tiles of 8 × 4.  Formulas: vLLM ``cvt_quant_to_fp4_get_sf_out_offset`` with
C = K/16 scale columns (K/32 for MXFP4).
"""

from __future__ import annotations

from typing import Any

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


def interleave_gate_up(w: npt.NDArray[Any], group: int = 8) -> npt.NDArray[Any]:
    """Rows of a fused gate-and-up weight, `group` of each in turn: ``(…, 2I, C)``, gate first, to the same shape.

    Row r of gate goes to ``(r // group) * 2 * group + r % group``, row r of up `group` rows further.  With 8, a warp's
    16-row tile holds both halves of eight outputs.  Scales of a weight are mixed in the same way.  Source: DeepGEMM as
    vLLM calls it (`numerics-vllm.md` section 10).

    Raises
    ------
    FormatError
        ``format.interleave``: the rows are not two halves of whole groups.

    >>> interleave_gate_up(np.array([[0], [1], [2], [3], [10], [11], [12], [13]]), group=2).ravel().tolist()
    [0, 1, 10, 11, 2, 3, 12, 13]
    """
    array = np.asarray(w)
    rows = array.shape[-2] if array.ndim >= 2 else 0
    if group < 1 or rows == 0 or rows % (2 * group):
        raise FormatError("format.interleave", shape=array.shape, multiple=2 * group)
    halves = array.reshape(*array.shape[:-2], 2, rows // (2 * group), group, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(halves, -4, -3)).reshape(array.shape)


def deinterleave_gate_up(w: npt.NDArray[Any], group: int = 8) -> npt.NDArray[Any]:
    """Gate rows first, then up rows, from rows mixed in groups; inverse of :func:`interleave_gate_up`, same errors.

    >>> deinterleave_gate_up(np.array([[0], [1], [10], [11], [2], [3], [12], [13]]), group=2).ravel().tolist()
    [0, 1, 2, 3, 10, 11, 12, 13]
    """
    array = np.asarray(w)
    rows = array.shape[-2] if array.ndim >= 2 else 0
    if group < 1 or rows == 0 or rows % (2 * group):
        raise FormatError("format.interleave", shape=array.shape, multiple=2 * group)
    groups = array.reshape(*array.shape[:-2], rows // (2 * group), 2, group, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(groups, -4, -3)).reshape(array.shape)


def pack_ue8m0(scales: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Four UE8M0 bytes to a word: ``(…, C)`` to ``(…, C//4)``, byte j of four at bits 8j to 8j+7.

    Raises
    ------
    FormatError
        ``format.pack-odd``: C is not a multiple of 4.

    >>> [hex(word) for word in pack_ue8m0([0x7F, 0x80, 0x81, 0x82])]
    ['0x8281807f']
    """
    array = np.asarray(scales, np.uint8)
    if array.ndim == 0 or array.shape[-1] % 4:
        raise FormatError("format.pack-odd", shape=array.shape, multiple=4)
    words: npt.NDArray[np.uint32] = np.ascontiguousarray(array).view("<u4").astype(np.uint32)
    return words


def unpack_ue8m0(words: npt.ArrayLike) -> U8:
    """Bytes ``(…, 4·W)`` of words ``(…, W)``; inverse of :func:`pack_ue8m0`."""
    array = np.ascontiguousarray(words, "<u4")
    return np.array(array.view(np.uint8).reshape(*array.shape[:-1], -1))


UTCCP_ROWS = 128
"""Rows of scales that one ``tcgen05.cp.32x128b.warpx4`` brings to tensor memory."""


def utccp_transpose(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows ``(…, M, C)`` in the order that UTCCP wants: inside each 128, row ``32j + i`` moves to ``4i + j``.

    The copy writes 32 lanes of 128 bits; a lane then holds the words of rows i, i+32, i+64 and i+96.  For one column
    of words the bytes are those of the 128×4 layout.  Source: DeepGEMM (`numerics-vllm.md` section 10).

    Raises
    ------
    FormatError
        ``format.utccp``: the rows are not a multiple of 128.

    >>> utccp_transpose(np.arange(128)[:, None]).ravel()[:6].tolist()
    [0, 32, 64, 96, 1, 33]
    """
    return _regroup_rows(words, 4, 32)


def utccp_untranspose(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows in their own order again; inverse of :func:`utccp_transpose`, same errors."""
    return _regroup_rows(words, 32, 4)


def _regroup_rows(words: npt.NDArray[Any], outer: int, inner: int) -> npt.NDArray[Any]:
    array = np.asarray(words)
    rows = array.shape[-2] if array.ndim >= 2 else 0
    if rows == 0 or rows % UTCCP_ROWS:
        raise FormatError("format.utccp", shape=array.shape, multiple=UTCCP_ROWS)
    tiles = array.reshape(*array.shape[:-2], rows // UTCCP_ROWS, outer, inner, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(tiles, -3, -2)).reshape(array.shape)
