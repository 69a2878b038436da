"""Codes in bytes and words, and scales in the layouts that kernels read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


SWIZZLES = {
    "128x4": (formats.swizzle_128x4, formats.unswizzle_128x4),
    "8x4": (formats.swizzle_8x4, formats.unswizzle_8x4),
}
RAGGED = {
    "128x4": [(rows, columns) for rows in (1, 31, 32, 33, 127, 128, 129, 257) for columns in range(1, 10)],
    "8x4": [(rows, columns) for rows in range(1, 18) for columns in range(1, 10)],
}


def both_ways(scales: np.ndarray, layout: formats.ScaleLayout) -> None:
    """Both paths give the same bytes, those of the offsets and zeros; and both find their way back."""
    swizzle, unswizzle = SWIZZLES[layout]
    rows, columns = scales.shape
    flat = swizzle(scales)
    np.testing.assert_array_equal(flat, swizzle(scales, path="reference"))
    places = [formats.scale_at(byte, rows, columns, layout) for byte in range(len(flat))]
    assert flat.tolist() == [0 if at.padding else scales[at.row, at.column] for at in places]
    flat[[at.padding for at in places]] = 0xEE  # what stands in the padding does not matter
    for path in ("numpy", "reference"):
        np.testing.assert_array_equal(unswizzle(flat, rows, columns, path=path), scales)


@pytest.mark.parametrize("layout", SWIZZLES)
def test_swizzles_of_every_small_shape(layout: formats.ScaleLayout) -> None:
    rng = np.random.default_rng(0)
    for shape in RAGGED[layout]:
        both_ways(rng.integers(1, 256, shape, dtype=np.uint8), layout)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.integers(1, 24), st.sampled_from(list(SWIZZLES)), st.integers(0, 2**32))
def test_swizzles_of_ragged_shapes(rows: int, columns: int, layout: formats.ScaleLayout, seed: int) -> None:
    both_ways(np.random.default_rng(seed).integers(0, 256, (rows, columns), dtype=np.uint8), layout)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(FormatError) as error:
        formats.swizzle_128x4(np.zeros(4, np.uint8))
    assert error.value.code == "format.layout-rank"
    for unswizzle, size, rows in ((formats.unswizzle_128x4, 512, 128), (formats.unswizzle_8x4, 64, 16)):
        with pytest.raises(FormatError) as error:
            unswizzle(np.zeros(size - 1, np.uint8), rows, 4)
        assert error.value.code == "format.layout-size"
        assert str(size) in error.value.why


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


def every_path(function, *arguments) -> np.ndarray:
    """The result, of the same dtype and bytes on both paths."""
    fast, slow = function(*arguments), function(*arguments, path="reference")
    assert fast.dtype == slow.dtype
    np.testing.assert_array_equal(fast, slow)
    return fast


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_gate_and_up_take_turns_on_both_paths(lead: tuple[int, ...], columns: int, group: int) -> None:
    for groups in (1, 2, 3):
        w = np.arange(int(np.prod(lead)) * 2 * group * groups * columns).reshape(*lead, -1, columns)
        mixed = every_path(formats.interleave_gate_up, w, group)
        np.testing.assert_array_equal(every_path(formats.deinterleave_gate_up, mixed, group), w)
        np.testing.assert_array_equal(every_path(formats.interleave_gate_up, w.astype(np.uint8), group), mixed & 255)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("columns", [1, 3])
def test_utccp_s_order_on_both_paths(lead: tuple[int, ...], tiles: int, columns: int) -> None:
    words = np.random.default_rng(5).integers(0, 2**32, (*lead, 128 * tiles, columns), dtype=np.uint32)
    moved = every_path(formats.utccp_transpose, words)
    np.testing.assert_array_equal(every_path(formats.utccp_untranspose, moved), words)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), max_size=2), st.integers(0, 9), st.integers(0, 2**32))
def test_exponents_become_words_on_both_paths(lead: list[int], words: int, seed: int) -> None:
    scales = np.random.default_rng(seed).integers(0, 256, (*lead, 4 * words), dtype=np.uint8)
    packed = every_path(formats.pack_ue8m0, scales)
    assert packed.shape == (*lead, words)
    np.testing.assert_array_equal(every_path(formats.unpack_ue8m0, packed), scales)


def test_every_byte_in_every_place_of_a_word() -> None:
    scales = np.zeros((4, 256, 4), np.uint8)
    for place in range(4):
        scales[place, :, place] = np.arange(256)
    words = every_path(formats.pack_ue8m0, scales)
    for place in range(4):
        assert words[place, :, 0].tolist() == [byte << 8 * place for byte in range(256)]
    np.testing.assert_array_equal(every_path(formats.unpack_ue8m0, words), scales)


def test_packed_and_transposed_exponents_are_the_bytes_of_the_128x4_layout() -> None:
    scales = np.random.default_rng(4).integers(0, 256, (128, 4), dtype=np.uint8)
    words = formats.utccp_transpose(formats.pack_ue8m0(scales))
    np.testing.assert_array_equal(words.astype("<u4").view(np.uint8).ravel(), formats.swizzle_128x4(scales))
