"""Where scales, rows and codes lie: there and back for every byte, padding included."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz import formats
from nvfp4viz.errors import FormatError
from nvfp4viz.formats.places import OFFSETS, SCALE_LAYOUTS, TILE_ROWS, padded_shape

SHAPES = [(1, 1), (8, 4), (9, 5), (32, 4), (128, 4), (129, 5), (150, 6), (256, 8), (300, 3)]


def there_and_back(rows: int, columns: int, layout: formats.ScaleLayout) -> None:
    """The padded matrix and the bytes are the same things, one to one; what lies outside the tensor is padding."""
    offset = OFFSETS[layout]
    padded = padded_shape(rows, columns, layout)
    found = [formats.scale_at(byte, rows, columns, layout) for byte in range(padded[0] * padded[1])]
    assert [offset(place.row, place.column, columns) for place in found] == list(range(len(found)))
    assert {(place.row, place.column) for place in found} == set(product(range(padded[0]), range(padded[1])))
    assert all(place.padding == (place.row >= rows or place.column >= columns) for place in found)
    assert formats.swizzled_size(rows, columns, layout) == len(found)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_stands_for_one_place_of_the_padded_tensor(layout, shape):
    there_and_back(*shape, layout)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from(SCALE_LAYOUTS))
def test_ragged_shapes_go_there_and_back(rows, columns, layout):
    there_and_back(rows, columns, layout)


def test_padding_is_what_the_last_tiles_lack():
    for layout, rows, columns in (("linear", 150, 6), ("8x4", 152, 8), ("128x4", 256, 8)):
        assert padded_shape(150, 6, layout) == (rows, columns)
        assert rows % TILE_ROWS[layout] == 0
        padding = sum(formats.scale_at(byte, 150, 6, layout).padding for byte in range(rows * columns))
        assert padding == rows * columns - 150 * 6


def test_the_offsets_of_one_tile_follow_the_formula():
    """128x4, row m and column k of a tile: 16·(m mod 32) + 4·(m div 32) + k.  8x4: 4·m + k."""
    for m in range(128):
        for k in range(4):
            assert formats.offset_128x4(m, k, 4) == 16 * (m % 32) + 4 * (m // 32) + k
            assert formats.offset_8x4(m % 8, k, 4) == 4 * (m % 8) + k


def test_tiles_follow_one_another_along_the_columns_first():
    assert formats.offset_128x4(0, 4, 8) == 512
    assert formats.offset_128x4(128, 0, 8) == 1024
    assert formats.offset_8x4(0, 4, 8) == 32
    assert formats.offset_8x4(8, 0, 8) == 64


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: formats.scale_at(-1, 8, 4, "8x4"), "format.layout-byte"),
        (lambda: formats.scale_at(32, 8, 4, "8x4"), "format.layout-byte"),
        (lambda: formats.scale_at(32, 8, 4, "linear"), "format.layout-byte"),
        (lambda: formats.scale_at(512, 8, 4), "format.layout-byte"),
        (lambda: formats.scale_at(1.5, 8, 4), "format.layout-whole"),
        (lambda: formats.scale_at(1.0, 8, 4, "linear"), "format.layout-whole"),
        (lambda: formats.scale_at(0, 8.0, 4, "8x4"), "format.layout-whole"),
        (lambda: formats.scale_at(0, -8, -4, "8x4"), "format.layout-shape"),
        (lambda: formats.swizzled_size(-8, -4, "linear"), "format.layout-shape"),
        (lambda: formats.scale_at(0, 8, 4, "4x128"), "format.layout-name"),
        (lambda: formats.swizzled_size(8, 4, ""), "format.layout-name"),
    ],
)
def test_what_is_no_place_is_refused(call, code):
    with pytest.raises(FormatError) as error:
        call()
    assert error.value.code == code


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("columns", [1, 4, 6, 8])
def test_an_offset_is_for_rows_and_columns_that_have_a_byte(layout, columns):
    offset, across = OFFSETS[layout], padded_shape(1, columns, layout)[1]
    for row, column in ((-1, 0), (0, -1), (0, across), (5, across + 3)):
        with pytest.raises(FormatError) as error:
            offset(row, column, columns)
        assert (error.value.code, error.value.params["across"]) == ("format.layout-place", across)
    for row, column, of in ((1.5, 0, columns), (0, 0.0, columns), (0, 0, float(columns)), ("0", 0, columns)):
        with pytest.raises(FormatError) as error:
            offset(row, column, of)
        assert error.value.code == "format.layout-whole"
    with pytest.raises(FormatError):
        offset(0, 0, 0)


def test_whole_numbers_of_numpy_count_as_python_s():
    """An 8-bit row would overflow in the formula."""
    assert formats.offset_128x4(np.uint8(200), np.uint8(5), np.uint8(8)) == formats.offset_128x4(200, 5, 8)
    assert formats.scale_at(np.int16(533), 150, np.uint8(6)) == formats.scale_at(533, 150, 6)


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_rows_of_gate_and_up_take_turns(group, groups):
    """Group by group: `group` rows of gate, then as many of up."""
    half = group * groups
    order = [
        row for g in range(groups) for first in (0, half) for row in range(first + g * group, first + (g + 1) * group)
    ]
    assert [formats.interleaved_row_at(place, 2 * half, group) for place in range(2 * half)] == order
    assert [order[formats.interleaved_row(row, 2 * half, group)] for row in range(2 * half)] == list(range(2 * half))


def test_a_lane_of_utccp_holds_four_rows_32_apart():
    for tile in range(3):
        lanes = [[formats.utccp_row_at(128 * tile + 4 * lane + j) for j in range(4)] for lane in range(32)]
        assert lanes == [[128 * tile + 32 * j + lane for j in range(4)] for lane in range(32)]
    assert [formats.utccp_row_at(formats.utccp_row(row)) for row in range(384)] == list(range(384))


def test_four_exponents_share_a_word():
    assert [formats.ue8m0_place(column) for column in range(5)] == [(0, 0), (0, 8), (0, 16), (0, 24), (1, 0)]


def test_a_padded_line_holds_every_code_once_and_gaps():
    found = [formats.padded_code(byte, nibble) for byte in range(64) for nibble in range(2)]
    assert [code for code in found if code is not None] == list(range(64))
    assert [byte for byte in range(64) if formats.padded_code(byte, 0) is None] == [
        16 * atom + at for atom in range(4) for at in range(8, 16)
    ]
    assert all(formats.padded_code(*formats.padded_place(k)) == k for k in range(256))
