"""Codes in bytes and words, and scales in the layouts that kernels read."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import formats
from nvfp4viz.errors import FormatError


def test_the_even_element_is_the_low_nibble() -> None:
    assert formats.pack_nibbles(np.array([0x1, 0xF], np.uint8)).tolist() == [0xF1]
    assert formats.unpack_nibbles(np.array([0xF1], np.uint8)).tolist() == [0x1, 0xF]


def test_packing_round_trips_and_words_are_little_endian_bytes() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 5, 32), dtype=np.uint8)
    packed = formats.pack_nibbles(codes)
    assert packed.shape == (3, 5, 16)
    assert np.array_equal(formats.unpack_nibbles(packed), codes)
    words = formats.pack_u32(codes)
    assert words.shape == (3, 5, 4)
    assert np.array_equal(formats.unpack_u32(words), codes)
    assert np.array_equal(words.astype("<u4").view(np.uint8), packed)
    assert all(int(words[0, 0, 0]) >> (4 * i) & 15 == codes[0, 0, i] for i in range(8))


@pytest.mark.parametrize("shape", [(3,), (2, 7), ()])
def test_an_odd_number_of_codes_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError) as error:
        formats.pack_nibbles(np.zeros(shape, np.uint8))
    assert error.value.code == "format.pack-odd"


def test_a_word_needs_eight_codes() -> None:
    with pytest.raises(FormatError) as error:
        formats.pack_u32(np.zeros((2, 12), np.uint8))
    assert error.value.code == "format.pack-odd"
    assert "8" in error.value.why


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (37, 12), (256, 64), (300, 3)])
def test_swizzled_bytes_lie_where_the_offset_says(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = np.random.default_rng(rows).integers(1, 256, shape, dtype=np.uint8)
    flat = formats.swizzle_128x4(scales)
    assert flat.size == formats.swizzled_size(rows, columns)
    offsets = np.array([[formats.offset_128x4(r, c, columns) for c in range(columns)] for r in range(rows)])
    assert len(np.unique(offsets)) == rows * columns
    assert np.array_equal(flat[offsets], scales)
    padding = np.ones(flat.size, bool)
    padding[offsets] = False
    assert (flat[padding] == 0).all()
    assert np.array_equal(formats.unswizzle_128x4(flat, rows, columns), scales)


def test_the_offsets_of_one_tile_follow_the_formula() -> None:
    """Row m of 128 and column k of 4: 16·(m mod 32) + 4·(m div 32) + k."""
    for m in range(128):
        for k in range(4):
            assert formats.offset_128x4(m, k, 4) == 16 * (m % 32) + 4 * (m // 32) + k


def test_8x4_offsets_fill_tiles_of_32_bytes_without_gaps() -> None:
    offsets = {formats.offset_8x4(r, c, 8) for r in range(16) for c in range(8)}
    assert offsets == set(range(16 * 8))
    assert formats.offset_8x4(8, 0, 8) == 64  # the next eight rows come after two tiles of columns


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(FormatError) as error:
        formats.swizzle_128x4(np.zeros(4, np.uint8))
    assert error.value.code == "format.layout-rank"
    with pytest.raises(FormatError) as error:
        formats.unswizzle_128x4(np.zeros(511, np.uint8), 128, 4)
    assert error.value.code == "format.layout-size"
    assert "512" in error.value.why


def test_gate_and_up_rows_lie_where_the_formula_says() -> None:
    """Source row r of half h goes to (r // 8)·16 + 8h + r % 8; three matrices keep apart."""
    w = np.arange(3 * 48 * 5).reshape(3, 48, 5)
    mixed = formats.interleave_gate_up(w)
    for half in range(2):
        for row in range(24):
            np.testing.assert_array_equal(mixed[:, row // 8 * 16 + 8 * half + row % 8], w[:, 24 * half + row])


@pytest.mark.parametrize(("shape", "group"), [((40, 3), 8), ((8,), 4), ((0, 3), 8), ((4, 3), 0)])
def test_rows_that_are_not_halves_of_groups_are_refused(shape: tuple[int, ...], group: int) -> None:
    with pytest.raises(FormatError) as error:
        formats.interleave_gate_up(np.zeros(shape, np.uint8), group)
    assert error.value.code == "format.interleave"


def test_four_exponents_make_a_word() -> None:
    scales = np.random.default_rng(2).integers(0, 256, (3, 2, 8), dtype=np.uint8)
    words = formats.pack_ue8m0(scales)
    assert words.shape == (3, 2, 2)
    assert words.dtype == np.uint32
    for j in range(8):
        np.testing.assert_array_equal(words[..., j // 4] >> np.uint32(8 * (j % 4)) & np.uint32(255), scales[..., j])
    with pytest.raises(FormatError) as error:
        formats.pack_ue8m0(scales[..., :6])
    assert error.value.code == "format.pack-odd"


@pytest.mark.parametrize(("shape", "group"), [((16, 3), 8), ((2, 48, 5), 8), ((3, 2, 12, 1), 2)])
def test_mixing_rows_and_back_keeps_every_byte(shape: tuple[int, ...], group: int) -> None:
    w = np.arange(int(np.prod(shape))).reshape(shape)
    np.testing.assert_array_equal(formats.deinterleave_gate_up(formats.interleave_gate_up(w, group), group), w)
    np.testing.assert_array_equal(formats.interleave_gate_up(formats.deinterleave_gate_up(w, group), group), w)
    with pytest.raises(FormatError) as error:
        formats.deinterleave_gate_up(w[..., :-1, :], group)
    assert error.value.code == "format.interleave"


def test_words_give_their_four_exponents_back() -> None:
    scales = np.random.default_rng(3).integers(0, 256, (3, 2, 8), dtype=np.uint8)
    np.testing.assert_array_equal(formats.unpack_ue8m0(formats.pack_ue8m0(scales)), scales)


def test_utccp_rows_lie_where_the_formula_says() -> None:
    """Inside each 128, row 32j + i goes to 4i + j; and the way back."""
    words = np.arange(2 * 256 * 3).reshape(2, 256, 3)
    moved = formats.utccp_transpose(words)
    for tile in range(2):
        for j in range(4):
            for i in range(32):
                np.testing.assert_array_equal(moved[:, 128 * tile + 4 * i + j], words[:, 128 * tile + 32 * j + i])
    np.testing.assert_array_equal(formats.utccp_untranspose(moved), words)
    for function in (formats.utccp_transpose, formats.utccp_untranspose):
        for wrong in (words[:, :130], words[0, :, 0], words[:, :0]):
            with pytest.raises(FormatError) as error:
                function(wrong)
            assert error.value.code == "format.utccp"


def test_packed_and_transposed_exponents_are_the_bytes_of_the_128x4_layout() -> None:
    scales = np.random.default_rng(4).integers(0, 256, (128, 4), dtype=np.uint8)
    words = formats.utccp_transpose(formats.pack_ue8m0(scales))
    np.testing.assert_array_equal(words.astype("<u4").view(np.uint8).ravel(), formats.swizzle_128x4(scales))
