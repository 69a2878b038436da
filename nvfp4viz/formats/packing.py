"""Codes in memory: two to a byte, eight to a 32-bit word, the even element always in the low nibble."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError

U8 = npt.NDArray[np.uint8]


def pack_nibbles(codes: npt.ArrayLike) -> U8:
    """Pack codes ``(…, K)`` into bytes ``(…, K//2)``: element 2j in the low nibble of byte j, 2j+1 in the high one.

    Raises
    ------
    FormatError
        ``format.pack-odd``: K is odd, or there is no axis to pack.

    Examples
    --------
    >>> [hex(b) for b in pack_nibbles([1, 2, 3, 15])]
    ['0x21', '0xf3']
    """
    array = np.asarray(codes, np.uint8)
    if array.ndim == 0 or array.shape[-1] % 2:
        raise FormatError("format.pack-odd", shape=array.shape, multiple=2)
    return (array[..., 0::2] & np.uint8(15)) | (array[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.ArrayLike) -> U8:
    """Codes ``(…, 2·B)`` of bytes ``(…, B)``; inverse of :func:`pack_nibbles`."""
    array = np.asarray(packed, np.uint8)
    out = np.empty((*array.shape[:-1], array.shape[-1] * 2), np.uint8)
    out[..., 0::2] = array & np.uint8(15)
    out[..., 1::2] = array >> np.uint8(4)
    return out


def pack_u32(codes: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Pack codes ``(…, K)`` into words ``(…, K//8)``: element i of eight at bits 4i to 4i+3.

    Raises
    ------
    FormatError
        ``format.pack-odd``: K is not a multiple of 8.

    Examples
    --------
    >>> hex(pack_u32([1, 2, 3, 4, 5, 6, 7, 8])[0])
    '0x87654321'
    """
    array = np.asarray(codes, np.uint8)
    if array.ndim == 0 or array.shape[-1] % 8:
        raise FormatError("format.pack-odd", shape=array.shape, multiple=8)
    groups = array.reshape(*array.shape[:-1], -1, 8).astype(np.uint32) & np.uint32(15)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words: npt.NDArray[np.uint32] = np.bitwise_or.reduce(groups << shifts, axis=-1)
    return words


def unpack_u32(words: npt.ArrayLike) -> U8:
    """Codes ``(…, 8·W)`` of words ``(…, W)``; inverse of :func:`pack_u32`."""
    array = np.asarray(words, np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = (array[..., None] >> shifts) & np.uint32(15)
    return codes.astype(np.uint8).reshape(*array.shape[:-1], -1)
