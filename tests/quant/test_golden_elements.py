"""Element casts, decode values and layouts against ml_dtypes, gfloat, torch and torchao: their recorded answers.

93,262 inputs: all BF16 patterns, every midpoint with its float32 neighbours, and random float32 patterns.
"""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import formats
from tests.golden import answers
from tests.golden import golden_sets as sets

ELEMENTS = answers.arrays("elements")


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return sets.cast_inputs()


def test_inputs_are_the_ones_the_packages_saw() -> None:
    """Regenerated from seeds, byte for byte: a NumPy that changed its stream would show here."""
    recorded = answers.manifest()["inputs"]
    made = {f"{name}/{dtype}": sets.sha256(sets.make(name, dtype)) for name in sets.NAMES for dtype in sets.DTYPES}
    made["cast_inputs"] = sets.sha256(sets.cast_inputs())
    assert made == recorded


def test_e2m1_cast_is_ml_dtypes_for_every_number(x: np.ndarray) -> None:
    """Numbers, infinities and -0 alike; NaN has no code, so there each side answers what it likes."""
    theirs, ours, nan = ELEMENTS["cast/ml_dtypes/e2m1"], formats.encode_e2m1(x), np.isnan(x)
    assert np.array_equal(ours[~nan], theirs[~nan])
    # exception, asserted as it is: the hardware's answer to NaN is +6; ml_dtypes answers -0 for +NaN and +0 for -NaN
    assert (ours[nan] == 7).all()
    assert np.array_equal(theirs[nan], np.where(np.signbit(x[nan]), 0, 8))


def test_e2m1_cast_is_gfloat_for_every_finite_number(x: np.ndarray) -> None:
    finite = np.isfinite(x)
    assert np.array_equal(formats.encode_e2m1(x)[finite], ELEMENTS["cast/gfloat/e2m1"][finite])


def test_saturating_e4m3_cast_is_torch_and_gfloat(x: np.ndarray) -> None:
    ours, nan = formats.encode_e4m3(x), np.isnan(x)
    assert np.array_equal(ours[~nan], ELEMENTS["cast/torch/e4m3"][~nan])
    finite = np.isfinite(x)
    assert np.array_equal(ours[finite], ELEMENTS["cast/gfloat/e4m3"][finite])
    # exception: CUDA's NaN is canonical, torch's keeps the input's sign
    assert (ours[nan] == 0x7F).all()
    assert np.array_equal(ELEMENTS["cast/torch/e4m3"][nan] & 0x7F, np.full(nan.sum(), 0x7F))


def test_unsaturated_e4m3_cast_is_ml_dtypes(x: np.ndarray) -> None:
    """Above 464 there is no number to round to: NaN on both sides (ours canonical, theirs with the input's sign)."""
    ours, theirs = formats.encode_e4m3(x, saturate=False), ELEMENTS["cast/ml_dtypes/e4m3"]
    number = (theirs & 0x7F) != 0x7F
    assert np.array_equal(ours[number], theirs[number])
    assert np.array_equal((ours & 0x7F) == 0x7F, ~number)


def test_ue8m0_cast_rounds_up_where_the_packages_round_to_nearest(x: np.ndarray) -> None:
    """Same byte for a power of two; otherwise ours is the nearest byte or one more (block scales must not shrink)."""
    theirs = ELEMENTS["cast/ml_dtypes/e8m0"].astype(int)
    normal = (x >= 2.0**-126) & (x <= 2.0**127)
    ours = formats.encode_ue8m0(x).astype(int)
    significand, _ = np.frexp(x[normal])
    down = (significand > 0.5) & (significand < 0.75)  # nearest rounds these down; exactly 1.5 goes up
    assert np.array_equal(ours[normal] - theirs[normal], down.astype(int))


@pytest.mark.parametrize(("name", "package"), [("e2m1", "ml_dtypes"), ("e4m3", "ml_dtypes"), ("e4m3", "torch")])
def test_decode_values_are_the_packages(name: str, package: str) -> None:
    decode = {"e2m1": formats.decode_e2m1, "e4m3": formats.decode_e4m3}[name]
    theirs = ELEMENTS[f"values/{package}/{name}"]
    check_bits(decode(np.arange(len(theirs), dtype=np.uint8)), theirs)


@pytest.mark.parametrize("package", ["ml_dtypes", "torch"])
def test_ue8m0_values_are_the_packages(package: str) -> None:
    check_bits(formats.decode_ue8m0(np.arange(256, dtype=np.uint8)), ELEMENTS[f"values/{package}/e8m0"])


def check_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits, with any NaN equal to any NaN (its payload differs between packages and means nothing)."""
    nan = np.isnan(theirs.view(np.float32))
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs[~nan])


@pytest.mark.parametrize("shape", [(128, 4), (130, 6), (256, 64), (1, 1), (37, 12)])
def test_swizzled_scales_are_torchaos(shape: tuple[int, int]) -> None:
    rows, columns = shape
    data = (sets.raw64(rows, rows * columns) & np.uint64(255)).astype(np.uint8).reshape(shape)
    theirs = ELEMENTS[f"swizzle/torchao/{rows}x{columns}"]
    assert np.array_equal(formats.swizzle_128x4(data), theirs)
    assert np.array_equal(formats.unswizzle_128x4(theirs, rows, columns), data)
