"""Inputs at which recipes part ways, shared by the tests of this folder."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nvfp4viz import quant

PATHS = ("reference", "numpy", "numba")
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
     0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFA00000, 0x7FFFFFFF],
    np.uint32,
).view(np.float32)  # fmt: skip
"""±0, subnormals, the largest numbers, ±Inf, quiet and signalling NaNs of both signs."""
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)

GLOBAL_SCALES = {
    "one": 1.0,
    "usual": 2688 / 3.7,
    "tiny": 1.7e-6,
    "zero": 0.0,
    "minus zero": -0.0,
    "inf": np.inf,
    "minus inf": -np.inf,
    "nan": np.nan,
    "negative": -0.37,
    "subnormal": 1e-39,
    "smallest": 1e-45,
    "1e-38": 1e-38,
    "1e38": 1e38,
    "2^126": 2.0**126,
    "above 2^126": float(np.nextafter(np.float32(2.0**126), np.float32(np.inf))),
    "largest": 3.4028235e38,
}


def bf16_patterns(shuffled: bool) -> np.ndarray:
    """All 65,536 BF16 patterns, (2048, 32): in order (one exponent a block), or mixed."""
    patterns = np.arange(65536, dtype=np.uint16)
    if shuffled:
        patterns = np.random.default_rng(7).permutation(patterns)
    return patterns.view(ml_dtypes.bfloat16).reshape(-1, 32)


def finite_bf16_patterns() -> np.ndarray:
    """All finite BF16 patterns in random order, so that numbers of every size meet in a block."""
    patterns = np.arange(65536, dtype=np.uint16)
    finite = patterns[(patterns & 0x7FFF) < 0x7F80]
    return np.random.default_rng(8).permutation(finite).view(ml_dtypes.bfloat16)[: 65536 // 32 * 31].reshape(-1, 32)


def edge_blocks() -> np.ndarray:
    """(n, 32) float32: each special value alone in a zero block, among numbers, and filling a block; midpoints with
    their neighbours under scales of several sizes; blocks around the points where scales die and saturate."""
    mixed = np.resize(np.array([0.0, -0.0, 1.0, -1.0, 0.25, -6.0, 3.0, -0.25, 2.5, 5.0], np.float32), 32)
    rows = []
    for value in SPECIAL:
        for base in (np.zeros(32, np.float32), mixed):
            row = base.copy()
            row[[5, 21]] = value
            rows.append(row)
        rows.append(np.full(32, value, np.float32))
    for power in (-140, -127, -120, -20, -9, -6, -1, 0, 3, 9, 60, 120):
        for step in (0, 1, -1):
            near = (MIDPOINTS.view(np.int32) + step).view(np.float32)
            row = np.resize(np.concatenate([near, -near]), 32)
            row[[0, 16]] = 6.0
            with np.errstate(under="ignore", over="ignore"):
                rows.append(np.ldexp(row, power).astype(np.float32))
    for top in (6 * 2.0**-10, 6 * 2.0**-9, 6 * 2.0**-6, 2688.0, 2688.0 * 464 / 448, 6.0, 7.0, 1e-4, 6e-4):
        for step in (0, 1, -1):
            row = mixed.copy()
            row[[5, 21]] = (np.array([top], np.float32).view(np.int32) + step).view(np.float32)
            rows.append(row)
    return np.array(rows, np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """BF16 by truncation: keeps every NaN a NaN (signalling ones too, where their high bits survive)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    high = (bits >> np.uint32(16)).astype(np.uint16)
    lost = ((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)) & ((high & 0x7F) == 0)
    return (high | lost.astype(np.uint16)).view(ml_dtypes.bfloat16)


def scale_for(recipe: str, name: str) -> np.float32 | None:
    """A global scale by name, as NVFP4 recipes are given it; None for MXFP4."""
    if quant.RECIPES[recipe].scheme == "mxfp4":
        return None
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(GLOBAL_SCALES[name])


def assert_same(x: np.ndarray, recipe: str, name: str, first: str, *others: str) -> None:
    """All paths give the same bytes for every block of ``x``."""
    given = scale_for(recipe, name)
    a = quant.quantize(x, recipe=recipe, global_scale=given, path=first)
    for other in others:
        b = quant.quantize(x, recipe=recipe, global_scale=given, path=other)
        for what, left, right in (("scale", a.scales, b.scales), ("packed", a.packed, b.packed)):
            where = np.argwhere(left != right)
            assert not len(where), (
                f"{len(where)} {what} bytes differ; {first} {left[tuple(where[0])]:#04x}, "
                f"{other} {right[tuple(where[0])]:#04x} at {where[0]} of row {x[where[0][0]].tolist()}"
            )
