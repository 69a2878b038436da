"""Whole arrays in the orders that kernels ask for: block scales in tiles, rows of gate and up in turn, words of scales.

Where a single scale, row or word goes is said in ``places.py``.  Every function has two paths in equal bytes:
``"numpy"`` moves the whole array, ``"reference"`` (``layout_reference.py``) goes element by element through those
formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import layout_reference
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.formats.places import TILE_ROWS, UTCCP_ROWS, ScaleLayout, padded_shape

U8 = npt.NDArray[np.uint8]
_BANDS = {"128x4": (4, 32), "8x4": (1, 8)}
"""Bands of rows in a tile, which lie side by side in memory, and the rows of a band."""


def swizzle_128x4(scales: npt.ArrayLike, path: NumpyPath = "numpy") -> U8:
    """Scales ``(M, C)`` in 128x4 order as flat bytes; padding is 0, as the dense kernel writes it.

    Raises
    ------
    FormatError
        ``format.layout-rank``: not a matrix.

    >>> flat = swizzle_128x4(np.arange(150 * 6).reshape(150, 6) % 251)
    >>> flat.size, int(flat[533])                      # row 33, column 5
    (2048, 203)
    """
    return _swizzle(scales, "128x4", path)


def swizzle_8x4(scales: npt.ArrayLike, path: NumpyPath = "numpy") -> U8:
    """Scales ``(M, C)`` in 8x4 order as flat bytes, padding 0; same errors as :func:`swizzle_128x4`.

    >>> swizzle_8x4(np.arange(1, 11).reshape(2, 5)).tolist()[:8], swizzle_8x4(np.ones((9, 5))).size
    ([1, 2, 3, 4, 6, 7, 8, 9], 128)
    """
    return _swizzle(scales, "8x4", path)


def unswizzle_128x4(flat: npt.ArrayLike, rows: int, columns: int, path: NumpyPath = "numpy") -> U8:
    """Scales ``(rows, columns)`` from 128x4 bytes; inverse of :func:`swizzle_128x4`, padding dropped.

    Raises
    ------
    FormatError
        ``format.layout-size``: the byte count is not that of this shape.
    """
    return _unswizzle(flat, rows, columns, "128x4", path)


def unswizzle_8x4(flat: npt.ArrayLike, rows: int, columns: int, path: NumpyPath = "numpy") -> U8:
    """Scales ``(rows, columns)`` from 8x4 bytes; inverse of :func:`swizzle_8x4`, errors of :func:`unswizzle_128x4`."""
    return _unswizzle(flat, rows, columns, "8x4", path)


def _swizzle(scales: npt.ArrayLike, layout: ScaleLayout, path: NumpyPath) -> U8:
    array = np.asarray(scales, np.uint8)
    if array.ndim != 2:
        raise FormatError("format.layout-rank", shape=array.shape, layout=layout)
    if by_reference(path):
        return layout_reference.swizzle(array, layout)
    rows, columns = array.shape
    padded = np.zeros(padded_shape(rows, columns, layout), np.uint8)
    padded[:rows, :columns] = array
    tiles = padded.reshape(padded.shape[0] // TILE_ROWS[layout], *_BANDS[layout], padded.shape[1] // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def _unswizzle(flat: npt.ArrayLike, rows: int, columns: int, layout: ScaleLayout, path: NumpyPath) -> U8:
    array = np.asarray(flat, np.uint8).reshape(-1)
    padded = padded_shape(rows, columns, layout)
    if array.size != padded[0] * padded[1]:
        raise FormatError(
            "format.layout-size",
            size=array.size,
            rows=rows,
            columns=columns,
            layout=layout,
            tile=TILE_ROWS[layout],
            expected=padded[0] * padded[1],
        )
    if by_reference(path):
        return layout_reference.unswizzle(array, rows, columns, layout)
    bands, high = _BANDS[layout]
    tiles = array.reshape(padded[0] // TILE_ROWS[layout], padded[1] // 4, high, bands, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(padded)[:rows, :columns])


def interleave_gate_up(w: npt.NDArray[Any], group: int = 8, path: NumpyPath = "numpy") -> npt.NDArray[Any]:
    """Rows of a fused gate-and-up weight, `group` of each in turn: ``(…, 2I, C)``, gate first, to the same shape.

    :func:`nvfp4viz.formats.interleaved_row` says where a row goes.  With 8, a warp's 16-row tile holds both halves of
    eight outputs.  Scales of a weight are mixed in the same way.

    Raises
    ------
    FormatError
        ``format.interleave``: the rows are not two halves of whole groups.

    >>> interleave_gate_up(np.array([[0], [1], [2], [3], [10], [11], [12], [13]]), group=2).ravel().tolist()
    [0, 1, 10, 11, 2, 3, 12, 13]
    """
    array = _halves(w, group)
    if by_reference(path):
        return layout_reference.interleave_gate_up(array, group)
    rows = array.shape[-2]
    halves = array.reshape(*array.shape[:-2], 2, rows // (2 * group), group, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(halves, -4, -3)).reshape(array.shape)


def deinterleave_gate_up(w: npt.NDArray[Any], group: int = 8, path: NumpyPath = "numpy") -> npt.NDArray[Any]:
    """Gate rows first, then up rows, from rows mixed in groups; inverse of :func:`interleave_gate_up`, same errors.

    >>> deinterleave_gate_up(np.array([[0], [1], [10], [11], [2], [3], [12], [13]]), group=2).ravel().tolist()
    [0, 1, 2, 3, 10, 11, 12, 13]
    """
    array = _halves(w, group)
    if by_reference(path):
        return layout_reference.deinterleave_gate_up(array, group)
    rows = array.shape[-2]
    groups = array.reshape(*array.shape[:-2], rows // (2 * group), 2, group, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(groups, -4, -3)).reshape(array.shape)


def _halves(w: npt.NDArray[Any], group: int) -> npt.NDArray[Any]:
    """``w`` as an array, its rows two halves of whole groups."""
    array = np.asarray(w)
    rows = array.shape[-2] if array.ndim >= 2 else 0
    if group < 1 or rows == 0 or rows % (2 * group):
        raise FormatError("format.interleave", shape=array.shape, multiple=2 * group)
    return array


def pack_ue8m0(scales: npt.ArrayLike, path: NumpyPath = "numpy") -> npt.NDArray[np.uint32]:
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
    if by_reference(path):
        return layout_reference.pack_ue8m0(array)
    words: npt.NDArray[np.uint32] = np.ascontiguousarray(array).reshape(-1).view("<u4").astype(np.uint32)
    return words.reshape(*array.shape[:-1], array.shape[-1] // 4)


def unpack_ue8m0(words: npt.ArrayLike, path: NumpyPath = "numpy") -> U8:
    """Bytes ``(…, 4·W)`` of words ``(…, W)``; inverse of :func:`pack_ue8m0`."""
    array = np.ascontiguousarray(words, "<u4")
    if by_reference(path):
        return layout_reference.unpack_ue8m0(array)
    return np.array(array.reshape(-1).view(np.uint8).reshape(*array.shape[:-1], 4 * array.shape[-1]))


def utccp_transpose(words: npt.NDArray[Any], path: NumpyPath = "numpy") -> npt.NDArray[Any]:
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
    array = _whole_tiles(words)
    return layout_reference.utccp_transpose(array) if by_reference(path) else _regroup_rows(array, 4, 32)


def utccp_untranspose(words: npt.NDArray[Any], path: NumpyPath = "numpy") -> npt.NDArray[Any]:
    """Rows in their own order again; inverse of :func:`utccp_transpose`, same errors."""
    array = _whole_tiles(words)
    return layout_reference.utccp_untranspose(array) if by_reference(path) else _regroup_rows(array, 32, 4)


def _whole_tiles(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.asarray(words)
    rows = array.shape[-2] if array.ndim >= 2 else 0
    if rows == 0 or rows % UTCCP_ROWS:
        raise FormatError("format.utccp", shape=array.shape, multiple=UTCCP_ROWS)
    return array


def _regroup_rows(array: npt.NDArray[Any], outer: int, inner: int) -> npt.NDArray[Any]:
    tiles = array.reshape(*array.shape[:-2], array.shape[-2] // UTCCP_ROWS, outer, inner, array.shape[-1])
    return np.ascontiguousarray(np.swapaxes(tiles, -3, -2)).reshape(array.shape)
