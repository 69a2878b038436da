"""Casts: the scalar references say what the formats mean, and the array versions must give the same bits."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import formats
from nvfp4viz.errors import FormatError

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def bf16_patterns() -> np.ndarray:
    """All 65,536 BF16 values as float32."""
    return (np.arange(65536, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def around(values: np.ndarray) -> np.ndarray:
    """Each value with its float32 neighbours, both signs."""
    exact = np.asarray(values, np.float32)
    near = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    return np.concatenate([*near, *(-v for v in near)])


def special_patterns() -> np.ndarray:
    """±0, subnormals, the largest numbers, infinities, quiet and signalling NaNs of both signs."""
    bits = [0, 1, 0x400000, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    return np.array(bits + [b | 0x80000000 for b in bits], np.uint32).view(np.float32)


def e4m3_midpoints() -> np.ndarray:
    values = formats.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    return np.concatenate([(values[1:] + values[:-1]) / 2, [448.0, 464.0, 480.0, 512.0]])


def test_every_midpoint_of_e2m1_goes_to_the_even_code() -> None:
    assert formats.encode_e2m1(np.float32(E2M1_MIDPOINTS)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    values = formats.decode_e2m1(np.arange(8, dtype=np.uint8))
    assert ((values[1:] + values[:-1]) / 2).tolist() == list(E2M1_MIDPOINTS)


@pytest.mark.parametrize(
    ("x", "code"),
    [(0.0, 0), (-0.0, 8), (-0.1, 8), (6.0, 7), (5.0, 6), (5.000001, 7), (math.inf, 7), (-math.inf, 15), (math.nan, 7),
     (-math.nan, 7), (1e-45, 0), (-1e-45, 8), (3.4e38, 7)],
)  # fmt: skip
def test_e2m1_edges(x: float, code: int) -> None:
    assert formats.e2m1_code_scalar(x) == code
    assert formats.encode_e2m1(np.float32(x)).item() == code


@pytest.mark.parametrize(
    ("x", "saturated", "plain"),
    [(0.0, 0, 0), (-0.0, 0x80, 0x80), (2.0**-10, 0, 0), (2.0**-10 * 1.0000001, 1, 1), (2.0**-9, 1, 1),
     (3 * 2.0**-10, 2, 2), (2.0**-6, 8, 8), (448.0, 0x7E, 0x7E), (464.0, 0x7E, 0x7E), (464.00003, 0x7E, 0x7F),
     (-465.0, 0xFE, 0xFF), (math.inf, 0x7E, 0x7F), (-math.inf, 0xFE, 0xFF), (math.nan, 0x7F, 0x7F)],
)  # fmt: skip
def test_e4m3_edges(x: float, saturated: int, plain: int) -> None:
    for saturate, byte in ((True, saturated), (False, plain)):
        assert formats.e4m3_byte_scalar(float(np.float32(x)), saturate) == byte
        assert formats.encode_e4m3(np.float32(x), saturate).item() == byte


@pytest.mark.parametrize(
    ("x", "byte"),
    [(0.0, 0), (-0.0, 0), (2.0**-127, 0), (2.0**-127 * 1.5, 1), (2.0**-126, 1), (1.0, 127), (1.0000001, 128),
     (2.0**127, 254), (3e38, 254), (math.inf, 254), (math.nan, 255), (-1.0, 255), (-1e-45, 255)],
)  # fmt: skip
def test_ue8m0_edges(x: float, byte: int) -> None:
    assert formats.ue8m0_byte_scalar(float(np.float32(x))) == byte
    assert formats.encode_ue8m0(np.float32(x)).item() == byte


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e4m3 plain", "ue8m0"])
def test_arrays_equal_scalars_on_all_bf16_and_around_every_midpoint(name: str) -> None:
    array, scalar, ties = {
        "e2m1": (formats.encode_e2m1, formats.e2m1_code_scalar, np.array(E2M1_MIDPOINTS)),
        "e4m3": (formats.encode_e4m3, formats.e4m3_byte_scalar, e4m3_midpoints()),
        "e4m3 plain": (lambda v: formats.encode_e4m3(v, False), lambda v: formats.e4m3_byte_scalar(v, False),
                       e4m3_midpoints()),
        "ue8m0": (formats.encode_ue8m0, formats.ue8m0_byte_scalar, 2.0 ** np.arange(-149, 128)),
    }[name]  # fmt: skip
    x = np.concatenate([bf16_patterns(), around(ties), special_patterns()])
    expected = np.array([scalar(float(v)) for v in x], np.uint8)
    got = array(x)
    where = np.flatnonzero(got != expected)
    assert not where.size, f"{x[where[0]]!r}: {got[where[0]]:#x}, the scalar says {expected[where[0]]:#x}"


def test_encoding_is_the_inverse_of_decoding() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert np.array_equal(formats.encode_e2m1(formats.decode_e2m1(codes)), codes)
    every = np.arange(256, dtype=np.uint8)
    back = formats.encode_e4m3(formats.decode_e4m3(every))
    assert np.array_equal(back, np.where(every == 0xFF, 0x7F, every))  # both NaN codes become the canonical one
    assert np.array_equal(formats.encode_ue8m0(formats.decode_ue8m0(every)), every)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_rounding_is_the_scalars(low) -> None:
    """Every sign, exponent and upper fraction, and the lower halves that decide: exact, just off, ties, beyond."""
    x = ((np.arange(65536, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)).view(np.float32)
    ours = formats.f32_to_bf16(x).view(np.uint16)
    numbers = ~np.isnan(x)
    assert ours[numbers].tolist() == [formats.bf16_bits_scalar(float(value)) for value in x[numbers]]
    assert np.array_equal(ours[~numbers], (x[~numbers].view(np.uint32) >> 16 | 0x40).astype(np.uint16))


def test_a_signalling_nan_becomes_quiet_and_keeps_its_sign() -> None:
    signalling = np.array([0x7F800001, 0xFFA00000], np.uint32).view(np.float32)
    assert formats.f32_to_bf16(signalling).view(np.uint16).tolist() == [0x7FC0, 0xFFE0]


def test_every_bf16_survives_the_way_to_f32_and_back() -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = formats.bf16_to_f32(patterns)
    assert np.array_equal(wide.view(np.uint32) >> 16, np.arange(65536))
    numbers = ~np.isnan(wide)
    assert np.array_equal(formats.f32_to_bf16(wide).view(np.uint16)[numbers], np.arange(65536)[numbers])


@pytest.mark.parametrize("encode", [formats.encode_e2m1, formats.encode_e4m3, formats.encode_ue8m0])
def test_shapes_are_kept_and_inputs_left_alone(encode) -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    before = x.copy()
    assert encode(x[:, ::2]).shape == (2, 2, 4)
    assert encode(np.float32(1)).shape == ()
    assert np.array_equal(x, before)


@pytest.mark.parametrize("info", formats.FORMATS.values(), ids=lambda info: info.name)
def test_a_card_agrees_with_its_own_codes(info: formats.FormatInfo) -> None:
    """The numbers on the card are recomputed from all codes."""
    explained = [formats.explain(info, code) for code in range(1 << info.bits)]
    finite = [e for e in explained if math.isfinite(e.value)]
    assert max(e.value for e in finite) == info.max_value
    assert min(e.value for e in finite if e.value > 0) == info.min_subnormal
    assert min(e.value for e in finite if e.value > 0 and e.klass == "normal") == info.min_normal
    assert any(e.klass == "infinite" for e in explained) == info.has_infinity
    assert any(e.klass == "zero" for e in explained) == info.has_zero
    nans = {e.code for e in explained if e.klass == "nan"}
    assert set(info.nan_codes) <= nans
    assert info.name == "bf16" or nans == set(info.nan_codes)
    assert info.bits == info.exponent_bits + info.mantissa_bits + info.signed


def test_explained_values_are_the_decoded_ones() -> None:
    for info, decode in ((formats.E2M1, formats.decode_e2m1), (formats.E4M3, formats.decode_e4m3),
                         (formats.UE8M0, formats.decode_ue8m0)):  # fmt: skip
        codes = np.arange(1 << info.bits, dtype=np.uint8)
        values = np.array([formats.explain(info, int(c)).value for c in codes], np.float32)
        decoded = decode(codes)
        assert np.array_equal(values.view(np.uint32)[~np.isnan(values)], decoded.view(np.uint32)[~np.isnan(values)])
        assert np.array_equal(np.isnan(values), np.isnan(decoded))


def test_explained_bf16_is_the_hardware_value() -> None:
    for code in [*range(0, 65536, 13), 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8000]:
        value = struct.unpack("<f", struct.pack("<I", code << 16))[0]
        explained = formats.explain(formats.BF16, code).value
        assert (math.isnan(value) and math.isnan(explained)) or struct.pack("<d", value) == struct.pack("<d", explained)


def test_a_formula_evaluates_to_the_value() -> None:
    """The left side of the formula is arithmetic; Python computes it."""
    for info in (formats.E2M1, formats.E4M3, formats.UE8M0):
        for code in range(1 << info.bits):
            explained = formats.explain(info, code)
            if math.isfinite(explained.value):
                left = explained.formula.split(" = ")[0].replace("×", "*").replace("^", "**")
                assert eval(left) == explained.value, (info.name, code, explained.formula)


@pytest.mark.parametrize("code", [-1, 16, 999])
def test_a_code_outside_the_format_is_refused(code: int) -> None:
    with pytest.raises(FormatError) as error:
        formats.explain(formats.E2M1, code)
    assert error.value.code == "format.code-range"
    assert "15" in str(error.value)
