"""Recipes without a CPU package, against the spec's tables and an independent C++ restatement.

``vllm-cuda``, ``vllm-even``, ``flashinfer-ceil`` and ``deepgemm-ceil`` live in CUDA kernels (DeepGEMM's in a GPU
repository's Python).  What is checked here is that two programs written from the same pages, by different means, agree
in every bit; **no package and no GPU took part**.  ``ieee`` is included: it has a definition and no namesake.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from tests.golden import golden_sets as sets
from tests.host.restatement import Restatement

pytestmark = pytest.mark.host
NVFP4 = ("vllm-cuda", "ieee")
MXFP4 = ("vllm-even", "flashinfer-ceil", "deepgemm-ceil")
PATHS = ("numpy", "numba")
GARBAGE = {
    "one": 1.0,
    "zero": 0.0,
    "minus zero": -0.0,
    "inf": np.inf,
    "minus inf": -np.inf,
    "nan": np.nan,
    "minus one": -1.0,
    "subnormal": 1e-39,
    "1e-38": 1e-38,
    "1e-6": 1e-6,
    "1e6": 1e6,
    "2^126": 2.0**126,
    "just above 2^126": float(np.nextafter(np.float32(2.0**126), np.float32(np.inf))),
    "1e38": 1e38,
    "f32 max": 3.4028235e38,
    "2688/3.7": 2688 / 3.7,
}


def compare(host: Restatement, recipe: str, x: np.ndarray, global_scale: float = 1.0) -> None:
    """``x (n, block)`` in f32 or BF16: on every path our scale bytes and codes are the restatement's, all of them."""
    given = np.float32(global_scale) if recipe in NVFP4 else None
    scales, codes = host.blocks(recipe, x.astype(np.float32), np.float32(global_scale))
    for path in PATHS:
        ours = quant.quantize(x, recipe=recipe, global_scale=given, path=path)
        where = np.flatnonzero(ours.scales.ravel() != scales)
        assert not where.size, (
            f"{path}: {where.size} of {len(x)} scale bytes differ; block {where[0]}: "
            f"{ours.scales.ravel()[where[0]]:#04x} != {scales[where[0]]:#04x} for {x[where[0]].tolist()}"
        )
        bad = np.flatnonzero((ours.codes() != codes).any(axis=1))
        assert not bad.size, (
            f"{path}: {bad.size} of {len(x)} blocks differ in codes; block {bad[0]} (scale {scales[bad[0]]:#04x}): "
            f"{ours.codes()[bad[0]].tolist()} != {codes[bad[0]].tolist()} for {x[bad[0]].tolist()}"
        )


def golden_blocks(name: str, dtype: str, block: int) -> np.ndarray:
    x = sets.make(name, dtype)
    return (x.view(ml_dtypes.bfloat16) if dtype == "bf16" else x).reshape(-1, block)


def own_global_scale(x: np.ndarray) -> np.float32:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.float32(2688) / np.float32(np.abs(x.astype(np.float32)).max())


@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_nvfp4_recipes_agree_on_every_golden_set(host: Restatement, recipe: str, dtype: str) -> None:
    for name in sets.NAMES:
        x = golden_blocks(name, dtype, 16)
        compare(host, recipe, x, own_global_scale(x))


@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("recipe", MXFP4)
def test_mxfp4_recipes_agree_on_every_golden_set(host: Restatement, recipe: str, dtype: str) -> None:
    for name in sets.NAMES:
        compare(host, recipe, golden_blocks(name, dtype, 32))


def edge_blocks(block: int) -> np.ndarray:
    """Zeros, subnormals, infinities, NaN of both signs, alone and among numbers; every midpoint with its neighbours."""
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    mixed = np.resize(np.array([0.0, -0.0, 1.0, -1.0, 0.25, -6.0, 3.0, -0.25], np.float32), block)
    rows = [np.zeros(block, np.float32), np.full(block, -0.0, np.float32), mixed]
    for value in (nan, -nan, inf, -inf, np.float32(1e-45), np.float32(1.1754942e-38), np.float32(3.4028235e38)):
        rows.append(np.full(block, value, np.float32))
        for base in (mixed, np.zeros(block, np.float32)):
            row = base.copy()
            row[5] = value
            rows.append(row)
    middle = np.array(sets.MIDPOINTS, np.float32)
    for toward in (None, inf, -inf):
        near = middle if toward is None else np.nextafter(middle, toward)
        row = np.resize(np.concatenate([near, -near]), block)
        row[0] = 6.0
        rows.append(row)
    return np.array(rows, np.float32)


@pytest.mark.parametrize("scale", GARBAGE)
@pytest.mark.parametrize("recipe", NVFP4)
def test_garbage_global_scales_agree(host: Restatement, recipe: str, scale: str) -> None:
    rng = np.random.default_rng(3)
    with np.errstate(over="ignore", under="ignore"):
        powers = np.ldexp(edge_blocks(16)[None], rng.integers(-20, 20, (12, 1, 1))).reshape(-1, 16)
    compare(host, recipe, np.concatenate([edge_blocks(16), powers.astype(np.float32)]), GARBAGE[scale])


@pytest.mark.parametrize("recipe", MXFP4)
def test_mxfp4_edges_agree_at_every_exponent(host: Restatement, recipe: str) -> None:
    edges = edge_blocks(32)
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(edges[None], np.arange(-150, 130, dtype=np.int32)[:, None, None]).reshape(-1, 32)
    compare(host, recipe, x.astype(np.float32))


@pytest.mark.parametrize("recipe", NVFP4 + MXFP4)
def test_random_bits_agree(host: Restatement, recipe: str) -> None:
    """Random f32 patterns (NaN and Inf among them), and random BF16 blocks around one exponent."""
    rng = np.random.default_rng(4)
    block = 16 if recipe in NVFP4 else 32
    anything = rng.integers(0, 1 << 32, (2000, block), dtype=np.uint32).view(np.float32)
    exponent = rng.integers(90, 160, (4000, 1), dtype=np.uint16) << 7
    pattern = rng.integers(0, 1 << 9, (4000, block), dtype=np.uint16)
    near = (((pattern & 0x100) << 7) | (exponent + (pattern & 0xFF))).astype(np.uint16).view(ml_dtypes.bfloat16)
    for scale in (1.0, 2688 / 3.7, 1.7e-9):
        compare(host, recipe, anything, scale)
        compare(host, recipe, near, scale)


def test_scales_on_the_rounding_grid_agree(host: Restatement) -> None:
    """Every BF16 significand as amax with g = 2688/amax: where the approximate reciprocal shows itself (kernels.md 3).

    The values are E2M1 midpoints of the block's own scale, so one ulp in a reciprocal flips a code.
    """
    grid = np.array([*sets.MIDPOINTS, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 2.75], np.float32)
    scale_values = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    maxima = sets.bf16_values((127 << 7 | np.arange(128)).astype(np.uint16))
    encode, decode = np.float32(2688) / maxima, maxima / np.float32(2688)
    x = (scale_values[None, :, None] * decode[:, None, None] * grid).astype(np.float32)
    per_block = np.repeat(encode, len(scale_values))
    expected_scales, expected_codes = host.blocks("vllm-cuda", x.reshape(-1, 16), per_block)
    differing = 0
    for path in PATHS:
        for i, g in enumerate(encode):
            approximate = quant.quantize(x[i], recipe="vllm-cuda", global_scale=g, path=path)
            here = slice(i * len(scale_values), (i + 1) * len(scale_values))
            assert np.array_equal(approximate.scales.ravel(), expected_scales[here])
            assert np.array_equal(approximate.codes(), expected_codes[here])
            exact = quant.quantize(x[i], recipe="ieee", global_scale=g, path=path)
            differing += int((exact.packed != approximate.packed).sum())
    assert differing > 0, "the set no longer separates the two recipes, so it proves nothing about the reciprocal"


def test_reciprocal_agrees_on_the_whole_table_and_at_its_edges(host: Restatement) -> None:
    rng = np.random.default_rng(5)
    every_exponent = ((np.arange(256, dtype=np.uint32) << 23)[:, None] | rng.integers(0, 1 << 23, (1, 64))).ravel()
    one_binade = np.arange(127 << 23, 128 << 23, 5, dtype=np.uint32)
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7E800000, 0x7E800001, 0x7F7FFFFF, 0x7F800000], np.uint32)
    positive = np.concatenate([every_exponent, one_binade, edges]).astype(np.uint32)
    x = np.concatenate([positive, positive | np.uint32(1 << 31)]).view(np.float32)
    ours = quant.rcp_approx_ftz(x).view(np.uint32)
    theirs = host.reciprocals(x)
    assert (np.where(np.isnan(x), 0x7FFFFFFF, ours) == theirs).all()
    assert np.isnan(quant.rcp_approx_ftz(x)[np.isnan(x)]).all()


# kernels.md section 6: the device's answers for block A, an all-zero block, and a NaN in element 0 of block A.
BLOCK_A = np.array([[6, -6, 5, 4, 3.5, 3, 2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, -0.5, 0.25, 0]], np.float32)
DEVICE_TABLE = [
    (1.0, "38", "f766564434229200", "00", "0000000000000000", "38"),
    (0.0, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-38, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-39, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-6, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (np.inf, "7e", "f77777777777f777", "7f", "7777777777777777", "7e"),
    (np.nan, "7f", "7777777777777777", "7f", "7777777777777777", "7f"),
    (-1.0, "b8", "f766564434229200", "80", "0000000000000000", "b8"),
    (-np.inf, "fe", "f77777777777f777", "7f", "7777777777777777", "fe"),
    (1e38, "7e", "f77777777777f777", "00", "0000000000000000", "7e"),
    (3.4e38, "7e", "f77777777777f777", "00", "0000000000000000", "7e"),
    (1e6, "7e", "f77777777777f707", "00", "0000000000000000", "7e"),
]


def packed_hex(codes: np.ndarray) -> str:
    return (codes[0::2] | (codes[1::2] << 4)).astype(np.uint8).tobytes().hex()


@pytest.mark.parametrize("row", DEVICE_TABLE, ids=lambda row: f"g={row[0]}")
def test_both_reproduce_the_device_table(host: Restatement, row: tuple) -> None:
    """The table was read off an H200: here the restatement itself is checked, and ours with it."""
    g, scale, packed, zero_scale, zero_packed, nan_scale = row
    with_nan = BLOCK_A.copy()
    with_nan[0, 0] = np.nan
    x = np.concatenate([BLOCK_A, np.zeros((1, 16), np.float32), with_nan])
    expected = [bytes.fromhex(s)[0] for s in (scale, zero_scale, nan_scale)]

    def check(scales: np.ndarray, codes: np.ndarray) -> None:
        assert scales.ravel().tolist() == expected
        assert packed_hex(codes[0]) == packed
        assert packed_hex(codes[1]) == zero_packed
        assert codes[2, 0] == 7
        assert packed_hex(codes[2])[2:] == packed[2:]

    check(*host.blocks("vllm-cuda", x, np.float32(g)))
    for path in (*PATHS, "reference"):
        ours = quant.quantize(x, recipe="vllm-cuda", global_scale=np.float32(g), path=path)
        check(ours.scales, ours.codes())
