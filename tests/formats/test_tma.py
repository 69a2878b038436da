"""FP4 in TMA's padded layout, its widening to E4M3, and the demands of a tensor map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz import formats
from nvfp4viz.errors import FormatError
from nvfp4viz.formats.tma import LOADABLE, SWIZZLES, MapRule, TensorMap, check_tensor_map

GOOD = TensorMap(rows=256, codes=256, stride=128)


def broken(wanted: TensorMap) -> list[str]:
    return [rule.id for rule in check_tensor_map(wanted) if not rule.holds]


def test_sixteen_codes_are_eight_bytes_and_eight_bytes_of_gap() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 2, 64), dtype=np.uint8)
    padded = formats.pad_align16b(packed)
    assert padded.shape == (3, 2, 128)
    for atom in range(8):
        np.testing.assert_array_equal(padded[..., 16 * atom : 16 * atom + 8], packed[..., 8 * atom : 8 * atom + 8])
        assert not padded[..., 16 * atom + 8 : 16 * atom + 16].any()
    padded[..., 8::16] = 0xAA  # what stands in a gap does not matter
    np.testing.assert_array_equal(formats.unpad_align16b(padded), packed)


def test_every_code_lies_where_its_place_says() -> None:
    codes = np.random.default_rng(1).integers(0, 16, 128, dtype=np.uint8)
    padded = formats.pad_align16b(formats.pack_nibbles(codes))
    places = [formats.padded_place(k) for k in range(128)]
    assert [padded[byte] >> (4 * nibble) & 15 for byte, nibble in places] == codes.tolist()
    assert len(set(places)) == 128


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 5), st.integers(0, 2**32))
def test_both_paths_pad_and_unpad_the_same(lead: list[int], atoms: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*lead, 8 * atoms), dtype=np.uint8)
    padded = formats.pad_align16b(packed)
    np.testing.assert_array_equal(padded, formats.pad_align16b(packed, path="reference"))
    noisy = rng.integers(0, 256, padded.shape, dtype=np.uint8)  # as shared memory is found
    for path in ("numpy", "reference"):
        np.testing.assert_array_equal(formats.unpad_align16b(padded, path=path), packed)
        np.testing.assert_array_equal(formats.unpad_align16b(noisy, path=path), formats.unpad_align16b(noisy))


def test_an_empty_side_is_named_whichever_it_is() -> None:
    assert "size" in broken(TensorMap(rows=256, codes=0, stride=128))
    assert check_tensor_map(replace(GOOD, rows=0))[2] == MapRule("size", "0 × 256", 2**32, False)


@pytest.mark.parametrize("size", [4, 12])
def test_half_an_atom_is_refused(size: int) -> None:
    for function in (formats.pad_align16b, formats.unpad_align16b):
        with pytest.raises(FormatError) as error:
            function(np.zeros((2, size), np.uint8))
        assert error.value.code == "format.pack-odd"


def test_widening_keeps_the_value_of_all_sixteen_codes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    widened = formats.widen_e2m1(codes)
    values = formats.decode_e2m1(codes)
    np.testing.assert_array_equal(
        formats.decode_e4m3(widened).view(np.uint32), values.view(np.uint32)
    )  # signs of zeros
    np.testing.assert_array_equal(widened, formats.encode_e4m3(values))
    assert formats.widen_e2m1(codes.reshape(2, 8)).shape == (2, 8)


def test_the_usual_map_is_accepted_and_each_demand_can_fail_alone() -> None:
    assert broken(GOOD) == []
    for change, rule in (
        ({"address": 16}, "address"),
        ({"codes": 192, "stride": 96}, "width"),
        ({"codes": 0}, "size"),
        ({"rows": 0}, "size"),
        ({"rows": 2**32 + 1}, "size"),
        ({"stride": 144}, "stride"),
        ({"stride": 96}, "row"),
        ({"stride": 2**40}, "stride"),
        ({"box_codes": 64}, "box"),
        ({"box_codes": 256}, "box"),
        ({"box_rows": 257}, "lines"),
        ({"box_rows": 0}, "lines"),
        ({"swizzle": "64B"}, "swizzle"),
    ):
        assert broken(replace(GOOD, **change)) == [rule], change


def test_the_limits_themselves_are_allowed() -> None:
    assert broken(TensorMap(rows=2**32, codes=128, stride=2**40 - 32, address=32, box_rows=256)) == []
    assert [swizzle for swizzle in SWIZZLES if not broken(replace(GOOD, swizzle=swizzle))] == list(LOADABLE)


def test_a_rule_tells_what_it_compared() -> None:
    assert check_tensor_map(replace(GOOD, stride=144))[3] == MapRule("stride", 144, 32, False)
