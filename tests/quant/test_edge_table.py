"""The edge table of the activation kernel, row by row, and the bytes an H200 gave for garbage global scales.

Rows: what ``cvt_warp_fp16_to_fp4`` does by derivation from its source (facts page, section 1.4).  Bytes: measured on an
H200 with the kernel in vLLM's order (section 6 of the kernels page).  Every path must reproduce both.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.formats import encode_e2m1
from tests.quant.recipe_cases import PATHS

INF, NAN = np.inf, np.nan
MIXED = (0.0, -0.0, 1.0, -1.0, 0.25, -6.0, 3.0, 0.5, -0.5, 2.0, -3.0, 4.0, 5.0, -0.25, 6.0, 1.5)
SIGNED_ZEROS = tuple(8 if np.signbit(v) else 0 for v in MIXED)
ALL_SEVEN = (7,) * 16
# Multiplied by infinity: every number saturates with its sign, and zeros become 0·∞ = NaN, which is +6.
BY_INFINITY = tuple(7 if v == 0 else (15 if v < 0 else 7) for v in MIXED)


def with_element(value: float, at: int = 2) -> tuple[float, ...]:
    return (*MIXED[:at], value, *MIXED[at + 1 :])


def with_code(codes: tuple[int, ...], code: int, at: int = 2) -> tuple[int, ...]:
    return (*codes[:at], code, *codes[at + 1 :])


def codes_at(multiplier: float, x: tuple[float, ...] = MIXED) -> tuple[int, ...]:
    with np.errstate(invalid="ignore"):
        return tuple(encode_e2m1(np.float32(x) * np.float32(multiplier)).tolist())


MAX_G = float(np.float32(2.0**126))
NEXT_G = float(np.nextafter(np.float32(2.0**126), np.float32(INF)))
ZEROS, MINUS_ZEROS = (0.0,) * 16, (-0.0,) * 16
NAN_FACTOR = "nan"

# (row of the table, global scale, block, scale byte, multiplier o, codes)
ROWS = [
    ("normal scale, zero block", 1.0, ZEROS, 0x00, 0.0, (0,) * 16),
    ("normal scale, block of minus zeros", 1.0, MINUS_ZEROS, 0x00, 0.0, (8,) * 16),
    ("tiny block, at the limit", 2.0**-10, MIXED, 0x00, 0.0, SIGNED_ZEROS),
    ("tiny block, just above it", float(np.nextafter(np.float32(2.0**-10), np.float32(1))), MIXED, 0x01, None, None),
    ("g = 0", 0.0, MIXED, 0x00, 0.0, SIGNED_ZEROS),
    ("g = 0, a NaN element", 0.0, with_element(NAN), 0x00, 0.0, with_code(SIGNED_ZEROS, 7)),
    ("g = 0, an Inf element", 0.0, with_element(INF), 0x7F, NAN, ALL_SEVEN),
    ("g = -0", -0.0, MIXED, 0x80, 0.0, SIGNED_ZEROS),
    ("g = +Inf", INF, MIXED, 0x7E, INF, BY_INFINITY),
    ("g = +Inf, zero block", INF, ZEROS, 0x7F, NAN, ALL_SEVEN),
    ("g = NaN", NAN, MIXED, 0x7F, NAN, ALL_SEVEN),
    ("g = NaN, zero block", NAN, ZEROS, 0x7F, NAN, ALL_SEVEN),
    ("g negative, as positive with the sign bit", -448.0, MIXED, 0xFE, 1.0, codes_at(1.0)),
    ("g positive", 448.0, MIXED, 0x7E, 1.0, codes_at(1.0)),
    ("g subnormal", 1e-38, MIXED, 0x00, 0.0, SIGNED_ZEROS),
    ("g subnormal, an Inf element", 1e-38, with_element(INF), 0x7E, 0.0, with_code(SIGNED_ZEROS, 7)),
    ("g = 1e38, the inner reciprocal flushed", 1e38, MIXED, 0x7E, INF, BY_INFINITY),
    ("g = 1e38, zero block", 1e38, ZEROS, 0x00, 0.0, (0,) * 16),
    ("g = 8.5e37, still a number", 8.5e37, MIXED, 0x7E, None, None),
    ("g just above 2^126", NEXT_G, MIXED, 0x7E, INF, BY_INFINITY),
    ("a NaN element becomes +6 of its block", 1.0, with_element(NAN), 0x38, 1.0, with_code(codes_at(1.0), 7)),
    ("a negative NaN as well", 1.0, with_element(-NAN), 0x38, 1.0, with_code(codes_at(1.0), 7)),
    ("an Inf element", 1.0, with_element(INF), 0x7E, 1 / 448, None),
    ("all 16 NaN", 1.0, (NAN,) * 16, 0x7F, NAN, ALL_SEVEN),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("g", "block", "byte", "codes"), [(r[1], r[2], r[3], r[5]) for r in ROWS],
                         ids=[r[0] for r in ROWS])  # fmt: skip
def test_row(path: str, g: float, block: tuple[float, ...], byte: int, codes: tuple[int, ...] | None) -> None:
    for dtype in (ml_dtypes.bfloat16, np.float32):
        q = quant.quantize(np.array([block], dtype), recipe="vllm-cuda", global_scale=np.float32(g), path=path)
        assert q.scales.item() == byte
        if codes is not None:
            assert tuple(q.codes()[0].tolist()) == codes


@pytest.mark.parametrize(("g", "block", "factor"), [(r[1], r[2], r[4]) for r in ROWS if r[4] is not None],
                         ids=[r[0] for r in ROWS if r[4] is not None])  # fmt: skip
def test_multiplier_of_the_row(g: float, block: tuple[float, ...], factor: float) -> None:
    traced = quant.trace_block(np.array(block, np.float32), np.float32(g), "vllm-cuda")
    if np.isnan(factor):
        assert np.isnan(traced.factor)
    else:
        assert traced.factor == np.float32(factor)
        assert not np.signbit(traced.factor)  # a negative global scale meets a negative block scale


def test_the_cliff_lies_exactly_at_two_to_the_126() -> None:
    below = quant.trace_block(np.array(MIXED, np.float32), np.float32(MAX_G), "vllm-cuda")
    above = quant.trace_block(np.array(MIXED, np.float32), np.float32(NEXT_G), "vllm-cuda")
    assert np.isfinite(below.factor)
    assert np.isinf(above.factor)
    assert float(quant.trace_block(np.array(MIXED, np.float32), 8.5e37, "vllm-cuda").factor) == pytest.approx(
        1.9e35, rel=0.01  # the page gives two digits
    )  # fmt: skip


def test_one_infinity_scales_the_others_down() -> None:
    """o = g/448: the largest of them, 6, becomes 6/448 and so a signed zero."""
    q = quant.quantize(np.float32([with_element(INF)]), recipe="vllm-cuda", global_scale=1)
    assert tuple(q.codes()[0].tolist()) == with_code(SIGNED_ZEROS, 7)


def test_signalling_nans_are_dropped_from_the_maximum_like_quiet_ones() -> None:
    x = np.array([MIXED], np.float32)
    x.view(np.uint32)[0, 2] = 0x7F800001
    for path in PATHS:
        q = quant.quantize(x, recipe="vllm-cuda", global_scale=1, path=path)
        assert q.scales.item() == 0x38
        assert q.codes()[0, 2] == 7


# ------------------------------------------------------------------------- bytes from an H200, garbage global scales

BLOCK_A = (6, -6, 5, 4, 3.5, 3, 2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, -0.5, 0.25, 0)
DEVICE = [
    # global scale, scale byte, packed A, zero block: scale byte, packed; NaN in element 0: scale byte
    (1.0, 0x38, "f766564434229200", 0x00, "00" * 8, 0x38),
    (0.0, 0x00, "8000000000008000", 0x00, "00" * 8, 0x00),
    (1e-38, 0x00, "8000000000008000", 0x00, "00" * 8, 0x00),
    (1e-39, 0x00, "8000000000008000", 0x00, "00" * 8, 0x00),
    (1e-6, 0x00, "8000000000008000", 0x00, "00" * 8, 0x00),
    (INF, 0x7E, "f77777777777f777", 0x7F, "77" * 8, 0x7E),
    (NAN, 0x7F, "7777777777777777", 0x7F, "77" * 8, 0x7F),
    (-1.0, 0xB8, "f766564434229200", 0x80, "00" * 8, 0xB8),
    (-INF, 0xFE, "f77777777777f777", 0x7F, "77" * 8, 0xFE),
    (1e38, 0x7E, "f77777777777f777", 0x00, "00" * 8, 0x7E),
    (3.4e38, 0x7E, "f77777777777f777", 0x00, "00" * 8, 0x7E),
    (1e6, 0x7E, "f77777777777f707", 0x00, "00" * 8, 0x7E),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", DEVICE, ids=[f"g={row[0]}" for row in DEVICE])
def test_bytes_of_the_device(row: tuple[float, int, str, int, str, int], path: str) -> None:
    g, byte, packed, zero_byte, zero_packed, nan_byte = row
    nan_block = (NAN, *BLOCK_A[1:])
    for dtype in (ml_dtypes.bfloat16, np.float32):
        x = np.array([BLOCK_A, ZEROS, nan_block], dtype)
        q = quant.quantize(x, recipe="vllm-cuda", global_scale=np.float32(g), path=path)
        assert q.scales[:, 0].tolist() == [byte, zero_byte, nan_byte]
        assert q.packed[0].tobytes().hex() == packed
        assert q.packed[1].tobytes().hex() == zero_packed
        # Only element 0 became NaN: its nibble is 7, all others are those of block A, whose largest is still 6.
        assert q.packed[2].tobytes().hex() == f"{packed[0]}7{packed[2:]}"
