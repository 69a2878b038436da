"""The moves of ``layout.py`` and ``tma.py``, one element after the other, each by the formula of its place.

Slow on purpose: this file is for reading, and the array versions must give the same bytes.  Shapes are checked there,
before a path is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats.places import (
    OFFSETS,
    ScaleLayout,
    interleaved_row,
    interleaved_row_at,
    padded_code,
    padded_place,
    scale_at,
    swizzled_size,
    ue8m0_place,
    utccp_row,
    utccp_row_at,
)

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


def swizzle(scales: U8, layout: ScaleLayout) -> U8:
    """Each scale of ``(M, C)`` to its byte; what no scale goes to is 0."""
    rows, columns = scales.shape
    flat = np.zeros(swizzled_size(rows, columns, layout), np.uint8)
    for row, column in np.ndindex(rows, columns):
        flat[OFFSETS[layout](row, column, columns)] = scales[row, column]
    return flat


def unswizzle(flat: U8, rows: int, columns: int, layout: ScaleLayout) -> U8:
    """Each byte to the scale that it stands for, unless it is padding."""
    scales = np.zeros((rows, columns), np.uint8)
    for byte, value in enumerate(flat.tolist()):
        place = scale_at(byte, rows, columns, layout)
        if not place.padding:
            scales[place.row, place.column] = value
    return scales


def move_rows(array: Array, place: Callable[[int], int]) -> Array:
    """Each element of ``(…, M, C)`` to the row that ``place`` names."""
    moved = np.empty_like(array)
    for *lead, row, column in np.ndindex(array.shape):
        moved[(*lead, place(row), column)] = array[(*lead, row, column)]
    return moved


def interleave_gate_up(w: Array, group: int) -> Array:
    """Rows of gate and up in turn."""
    return move_rows(w, lambda row: interleaved_row(row, w.shape[-2], group))


def deinterleave_gate_up(w: Array, group: int) -> Array:
    """Gate rows first, then up rows."""
    return move_rows(w, lambda place: interleaved_row_at(place, w.shape[-2], group))


def utccp_transpose(words: Array) -> Array:
    """Rows in UTCCP's order."""
    return move_rows(words, utccp_row)


def utccp_untranspose(words: Array) -> Array:
    """Rows in their own order."""
    return move_rows(words, utccp_row_at)


def pack_ue8m0(scales: U8) -> U32:
    """Each exponent shifted to its bits of its word."""
    words = np.zeros((*scales.shape[:-1], scales.shape[-1] // 4), np.uint32)
    for *lead, column in np.ndindex(scales.shape):
        word, bit = ue8m0_place(column)
        words[(*lead, word)] |= np.uint32(int(scales[(*lead, column)]) << bit)
    return words


def unpack_ue8m0(words: U32) -> U8:
    """Each exponent read from its bits of its word."""
    scales = np.zeros((*words.shape[:-1], words.shape[-1] * 4), np.uint8)
    for *lead, column in np.ndindex(scales.shape):
        word, bit = ue8m0_place(column)
        scales[(*lead, column)] = int(words[(*lead, word)]) >> bit & 0xFF
    return scales


def pad_align16b(packed: U8) -> U8:
    """Each code to its nibble of the padded line; the gaps are 0."""
    padded = np.zeros((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    for *lead, k in np.ndindex(padded.shape):  # as many codes as padded bytes
        byte, nibble = padded_place(k)
        code = int(packed[(*lead, k // 2)]) >> 4 * (k % 2) & 0xF
        padded[(*lead, byte)] |= code << 4 * nibble
    return padded


def unpad_align16b(padded: U8) -> U8:
    """Each nibble to its place among the packed codes, unless it is of a gap."""
    packed = np.zeros((*padded.shape[:-1], padded.shape[-1] // 2), np.uint8)
    for *lead, byte, nibble in np.ndindex(*padded.shape, 2):
        k = padded_code(byte, nibble)
        if k is not None:
            code = int(padded[(*lead, byte)]) >> 4 * nibble & 0xF
            packed[(*lead, k // 2)] |= code << 4 * (k % 2)
    return packed
