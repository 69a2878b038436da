"""Where one thing lies, and what lies in one place: block scales in their layouts, rows in their orders.

Every function here takes one row, column or byte and is the formula of its source written down.
``layout_reference.py`` moves whole arrays by them, element by element, and pages draw with them.

Block scales of a matrix are M rows × C columns, C = K/16 (K/32 for MXFP4).  *Linear* is row-major.  The tensor core
reads tiles of 128 rows × 4 columns ("128x4 swizzle"), FlashInfer's small-batch kernels tiles of 8 × 4; rows and columns
that fill the last tiles up are *padding*: they have bytes as well, what lies beyond has none.  Formulas: vLLM
``cvt_quant_to_fp4_get_sf_out_offset``.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Literal, SupportsIndex, get_args

from nvfp4viz.errors import FormatError

ScaleLayout = Literal["linear", "128x4", "8x4"]
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = get_args(ScaleLayout)
TILE_ROWS = {"linear": 1, "128x4": 128, "8x4": 8}
"""Rows are padded to a multiple of this."""
TILE_COLUMNS = {"linear": 1, "128x4": 4, "8x4": 4}
ATOM_CODES, ATOM_BYTES, GAP_BYTES = 16, 16, 8
"""Of TMA's padded FP4: codes of an atom, its bytes, and those of them that hold nothing."""
UTCCP_ROWS = 128
"""Rows of scales that one ``tcgen05.cp.32x128b.warpx4`` brings to tensor memory."""


# ------------------------------------------------------------------ block scales


def _whole(value: SupportsIndex) -> int:
    """A row, column, byte or number of them as Python counts, of whatever type of whole number."""
    try:
        return index(value)
    except TypeError:
        raise FormatError("format.layout-whole", given=repr(value)[:40]) from None


def _in_layout(row: int, column: int, columns: int, layout: ScaleLayout) -> tuple[int, int, int]:
    """A place and the tensor's columns, refused where no byte of the layout stands for it."""
    row, column, columns = _whole(row), _whole(column), _whole(columns)
    across = -(-columns // TILE_COLUMNS[layout]) * TILE_COLUMNS[layout]
    if row < 0 or not 0 <= column < across:
        raise FormatError(
            "format.layout-place", row=row, column=column, columns=columns, layout=layout, across=max(across, 0)
        )
    return row, column, columns


def offset_linear(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column), row after row.

    Raises
    ------
    FormatError
        As `offset_128x4`; there is no padding here.

    >>> offset_linear(33, 5, 8)
    269
    """
    row, column, columns = _in_layout(row, column, columns, "linear")
    return row * columns + column


def offset_128x4(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column) in the 128x4 layout of a tensor with ``columns`` scale columns.

    A column of the padding has its byte too: `scale_at` finds the way back from it.

    Raises
    ------
    FormatError
        ``format.layout-place``: a row below 0, or a column beyond the padding; ``format.layout-whole``: no integer.

    >>> offset_128x4(33, 5, 8)
    533
    """
    row, column, columns = _in_layout(row, column, columns, "128x4")
    tiles = -(-columns // 4)
    return ((row >> 7) * tiles + (column >> 2)) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3)


def offset_8x4(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column) in the 8x4 layout.

    Raises
    ------
    FormatError
        As `offset_128x4`.

    >>> offset_8x4(9, 5, 8)
    101
    """
    row, column, columns = _in_layout(row, column, columns, "8x4")
    tiles = -(-columns // 4)
    return ((row >> 3) * tiles + (column >> 2)) * 32 + (row & 7) * 4 + (column & 3)


OFFSETS = {"linear": offset_linear, "128x4": offset_128x4, "8x4": offset_8x4}
"""``(row, column, columns) -> byte`` of each layout."""


def padded_shape(rows: int, columns: int, layout: ScaleLayout = "128x4") -> tuple[int, int]:
    """Rows and columns of scales with the padding of a layout.

    Raises
    ------
    FormatError
        ``format.layout-name``: no such layout; ``format.layout-whole``, ``format.layout-shape``: a number of rows or
        columns that is no integer, or below 0.

    >>> [padded_shape(150, 6, layout) for layout in SCALE_LAYOUTS]
    [(150, 6), (256, 8), (152, 8)]
    """
    if layout not in SCALE_LAYOUTS:
        raise FormatError("format.layout-name", layout=layout, known=", ".join(SCALE_LAYOUTS))
    rows, columns = _whole(rows), _whole(columns)
    if rows < 0 or columns < 0:
        raise FormatError("format.layout-shape", rows=rows, columns=columns)
    return -(-rows // TILE_ROWS[layout]) * TILE_ROWS[layout], -(-columns // TILE_COLUMNS[layout]) * TILE_COLUMNS[layout]


def swizzled_size(rows: int, columns: int, layout: ScaleLayout = "128x4") -> int:
    """Bytes that ``(rows, columns)`` scales take in a layout, padding included.

    >>> [swizzled_size(150, 6, layout) for layout in SCALE_LAYOUTS]
    [900, 2048, 1216]
    """
    padded = padded_shape(rows, columns, layout)
    return padded[0] * padded[1]


@dataclass(frozen=True, slots=True)
class ScalePlace:
    """The row and column that a byte stands for; ``padding`` says that it lies outside the tensor."""

    row: int
    column: int
    padding: bool


def scale_at(byte: int, rows: int, columns: int, layout: ScaleLayout = "128x4") -> ScalePlace:
    """What a byte of ``(rows, columns)`` scales in a layout stands for; the way back from the offsets.

    Raises
    ------
    FormatError
        ``format.layout-byte``: not a byte of this tensor, padding included; ``format.layout-name``,
        ``format.layout-shape``, ``format.layout-whole``.

    >>> scale_at(533, 150, 6), scale_at(2047, 150, 6)
    (ScalePlace(row=33, column=5, padding=False), ScalePlace(row=255, column=7, padding=True))
    """
    byte, rows, columns = _whole(byte), _whole(rows), _whole(columns)
    size = swizzled_size(rows, columns, layout)
    if not 0 <= byte < size:
        raise FormatError("format.layout-byte", byte=byte, rows=rows, columns=columns, layout=layout, size=size)
    if layout == "linear":
        return ScalePlace(*divmod(byte, columns), False)
    tile, inside = divmod(byte, TILE_ROWS[layout] * 4)
    down, across = divmod(tile, -(-columns // 4))
    row = down * TILE_ROWS[layout] + _row_in_tile(inside, layout)
    column = across * 4 + inside % 4
    return ScalePlace(row, column, row >= rows or column >= columns)


def _row_in_tile(inside: int, layout: ScaleLayout) -> int:
    """128x4: lines of 16 bytes, in each the rows i, i + 32, i + 64 and i + 96; 8x4: lines of 4 bytes, one a row."""
    if layout == "8x4":
        return inside // 4
    return inside // 16 + inside // 4 % 4 * 32


# ------------------------------------------------------------------ rows and words of the mega-kernel


def interleaved_row(row: int, rows: int, group: int = 8) -> int:
    """Where a row of a fused gate-and-up weight goes when `group` rows of each take turns; ``rows`` are both halves'.

    Row r of gate goes to ``r // group · 2·group + r % group``, row r of up `group` rows further.  Source: DeepGEMM as
    vLLM calls it (`numerics-vllm.md` section 10).

    >>> [interleaved_row(row, 32) for row in (0, 7, 8, 16, 24)]
    [0, 7, 16, 8, 24]
    """
    half, r = divmod(row, rows // 2)
    return r // group * 2 * group + half * group + r % group


def interleaved_row_at(place: int, rows: int, group: int = 8) -> int:
    """Which row, gate first and then up, lies in a place; the way back from :func:`interleaved_row`.

    >>> [interleaved_row_at(place, 32) for place in (0, 7, 16, 8, 24)]
    [0, 7, 8, 16, 24]
    """
    turn, inside = divmod(place, 2 * group)
    half, r = divmod(inside, group)
    return half * (rows // 2) + turn * group + r


def utccp_row(row: int) -> int:
    """Where a row of scale words goes for UTCCP: inside each 128, row ``32j + i`` to ``4i + j``.

    >>> [utccp_row(row) for row in (0, 1, 32, 127, 128)]
    [0, 4, 1, 127, 128]
    """
    return row // UTCCP_ROWS * UTCCP_ROWS + row % 32 * 4 + row % UTCCP_ROWS // 32


def utccp_row_at(place: int) -> int:
    """Which row lies in a place of UTCCP's order; the way back from :func:`utccp_row`.

    >>> [utccp_row_at(place) for place in (0, 4, 1, 127, 128)]
    [0, 1, 32, 127, 128]
    """
    return place // UTCCP_ROWS * UTCCP_ROWS + place % 4 * 32 + place % UTCCP_ROWS // 4


def ue8m0_place(column: int) -> tuple[int, int]:
    """Word of four exponents, and its lowest bit there, of the exponent of a column.

    >>> ue8m0_place(0), ue8m0_place(6)
    ((0, 0), (1, 16))
    """
    return column // 4, 8 * (column % 4)


# ------------------------------------------------------------------ FP4 in shared memory


def padded_place(k: int) -> tuple[int, int]:
    """Byte in its padded line, and nibble (0 low, 1 high), of code ``k``.

    >>> padded_place(15), padded_place(16), padded_place(127)
    ((7, 1), (16, 0), (119, 1))
    """
    return k // ATOM_CODES * ATOM_BYTES + k % ATOM_CODES // 2, k % 2


def padded_code(byte: int, nibble: int) -> int | None:
    """Which code lies in a nibble of a padded line, None in a gap; the way back from :func:`padded_place`.

    >>> padded_code(7, 1), padded_code(8, 0), padded_code(16, 0)
    (15, None, 16)
    """
    atom, inside = divmod(byte, ATOM_BYTES)
    return None if inside >= ATOM_BYTES - GAP_BYTES else atom * ATOM_CODES + 2 * inside + nibble
