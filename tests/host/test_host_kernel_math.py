"""The kernels' arithmetic on the CPU: every float32 against a statement of the formats, every recipe against NumPy.

What is compiled here by g++ is the text that NVRTC compiles for a GPU; what a GPU has instructions for, `make selftest`
compares there.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.quant.api import quantize_rows_numpy
from tests.golden import golden_sets as sets
from tests.host.kernel_math import ALL, DTYPES, MXFP4, NVFP4, KernelMath
from tests.host.test_host_blocks import BLOCK_A, DEVICE_TABLE, GARBAGE, edge_blocks, packed_hex

pytestmark = pytest.mark.host
LENGTH = dict.fromkeys(NVFP4, 16) | dict.fromkeys(MXFP4, 32)
SHARDS = 4


@pytest.fixture(scope="module")
def math(tmp_path_factory: pytest.TempPathFactory) -> KernelMath:
    return KernelMath(tmp_path_factory.mktemp("kernel_math"))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", ["e2m1", "e2m1_small", "e4m3"])
def test_every_float_rounds_to_the_nearest_value(math: KernelMath, name: str, shard: int) -> None:
    """All 2^32 patterns of float32, a quarter at a time."""
    differing, example = math.sweep(name, ALL // SHARDS * shard, ALL // SHARDS)
    assert differing == 0, f"{differing} floats differ, such as {example:#010x}"


@pytest.mark.parametrize("name", ["e2m1", "e2m1_small", "e4m3"])
def test_floats_around_every_midpoint_round_to_the_nearest_value(math: KernelMath, name: str) -> None:
    """The quick part of the sweep: 64 patterns on both sides of every value and midpoint, both signs."""
    values = formats.decode_e4m3(np.arange(127)) if name == "e4m3" else formats.decode_e2m1(np.arange(8))
    middle = (values[1:].astype(np.float64) + values[:-1]) / 2
    centres = np.concatenate([values, middle.astype(np.float32), np.float32([np.inf, 3.4e38, 1e-40])]).view(np.uint32)
    for sign in (0, 1 << 31):
        for centre in centres.tolist():
            assert math.sweep(name, max(centre - 64, 0) + sign, 128, 1)[0] == 0, hex(centre)


def test_the_sweep_can_fail(math: KernelMath) -> None:
    """E2M1 codes held against the list of E4M3 values: everything from 2^-9 on differs."""
    x = np.arange(0x3B000000, 0x3B000000 + 1000, dtype=np.uint32).view(np.float32)
    assert (math.each("encode_e4m3", x, np.uint8) != formats.encode_e2m1(x)).all()


def test_decoding_gives_the_values_of_the_format_cards(math: KernelMath) -> None:
    e2m1, e4m3, ue8m0 = (table.view(np.uint32) for table in math.decoded())
    assert (e2m1 == formats.decode_e2m1(np.arange(16)).view(np.uint32)).all()
    nan = np.isnan(formats.decode_e4m3(np.arange(256)))
    assert (e4m3 == np.where(nan, 0x7FC00000, formats.decode_e4m3(np.arange(256)).view(np.uint32))).all()
    assert (ue8m0[:255] == formats.decode_ue8m0(np.arange(255)).view(np.uint32)).all()
    assert ue8m0[255] == 0x7FC00000


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_every_gate_is_that_of_moe(math: KernelMath, activation: str) -> None:
    """Inside of the table and outside: 65536 gates, and ``up`` as a BF16 that keeps the last bits apart."""
    pytest.importorskip("torch", reason="the table is made beside the op, which is torch's")
    from nvfp4viz.device.ops.activation import activation_table
    from nvfp4viz.moe.experts import activate

    found = math.activated(activation_table(activation), activation == "gelu_tanh")
    gates = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    for factor in (1.0, 0.66015625, -197.0, 2.0**-120, 3e38):
        up = np.full_like(gates, factor)
        x = np.stack([gates, up], axis=1)
        expected = activate(x, activation, fused=True)[:, 0]
        with np.errstate(all="ignore"):
            product = formats.f32_to_bf16(found * up.astype(np.float32))
        nan = np.isnan(expected.astype(np.float32))
        assert (nan == np.isnan(product.astype(np.float32))).all()
        assert (product.view(np.uint16) == expected.view(np.uint16))[~nan].all()


def some_floats() -> np.ndarray:
    """Every top half of a float32 with low halves that matter for a rounding to 16 bits, and a million at random."""
    top = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    anything = np.random.default_rng(1).integers(0, ALL, 1 << 20, dtype=np.uint32)
    return np.concatenate([(top | low).ravel(), anything]).view(np.float32)


def test_the_other_formats_agree(math: KernelMath) -> None:
    x = some_floats()
    assert (math.each("encode_ue8m0", x, np.uint8) == formats.encode_ue8m0(x)).all()
    assert (math.each("encode_e4m3", x, np.uint8) == formats.encode_e4m3(x)).all()
    assert (math.each("encode_bf16", x, np.uint16) == formats.f32_to_bf16(x).view(np.uint16)).all()
    number = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        assert (math.each("encode_f16", number, np.uint16) == number.astype(np.float16).view(np.uint16)).all()
    nan = math.each("encode_f16", x[np.isnan(x)], np.uint16)
    assert np.isnan(nan.view(np.float16)).all()
    half = np.arange(1 << 16, dtype=np.uint16)
    widened, expected = math.each("decode_f16", half, np.float32), half.view(np.float16).astype(np.float32)
    assert (np.isnan(widened) == np.isnan(expected)).all()
    assert (widened.view(np.uint32) == expected.view(np.uint32))[~np.isnan(expected)].all()


def test_the_reciprocal_agrees_on_the_whole_table_and_at_its_edges(math: KernelMath) -> None:
    one_binade = np.arange(127 << 23, 128 << 23, dtype=np.uint32)
    every_exponent = ((np.arange(256, dtype=np.uint32) << 23)[:, None] | one_binade[:: 1 << 13] & 0x7FFFFF).ravel()
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7E800000, 0x7E800001, 0x7F7FFFFF, 0x7F800000, 0x7F800001], np.uint32)
    positive = np.concatenate([one_binade, every_exponent, edges])
    for x in (positive.view(np.float32), (positive | np.uint32(1 << 31)).view(np.float32)):
        assert (math.reciprocals(x) == quant.rcp_approx_ftz(x).view(np.uint32)).all()


# ------------------------------------------------------------------------------------------------- blocks


def of_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return np.ascontiguousarray(x).astype(DTYPES[dtype])


def patterns(dtype: str, blocks: int, length: int, seed: int) -> np.ndarray:
    """Random bit patterns of a dtype: NaN of every kind, infinities and subnormals come along."""
    rng = np.random.default_rng(seed)
    unsigned = np.uint32 if dtype == "f32" else np.uint16
    return rng.integers(0, np.iinfo(unsigned).max, (blocks, length), unsigned, endpoint=True).view(DTYPES[dtype])


def ordinary(dtype: str, blocks: int, length: int, seed: int) -> np.ndarray:
    """Numbers of one block within a few binades, blocks far apart: many ties and all codes."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(-96, 97, (blocks, length)) / 16
    spread = rng.integers(-12, 13, (blocks, 1)) if dtype == "f16" else rng.integers(-60, 60, (blocks, 1))
    return of_dtype(np.ldexp(coarse, spread), dtype)


def compare(math: KernelMath, recipe: str, x: np.ndarray, global_scale: float = 1.0) -> None:
    """The header and NumPy give the same scale byte and codes for every row."""
    scales, codes = math.blocks(recipe, x, global_scale)
    packed, expected = quantize_rows_numpy(x, recipe, np.float32(global_scale))
    wrong = np.flatnonzero(expected.ravel() != scales)
    assert not wrong.size, f"{wrong.size} of {len(x)} scale bytes differ, first {x[wrong[0]].tolist()}"
    expected_codes = formats.unpack_nibbles(packed)
    wrong = np.flatnonzero((expected_codes != codes).any(axis=1))
    assert not wrong.size, (
        f"{wrong.size} of {len(x)} blocks differ in codes, first {x[wrong[0]].tolist()}: "
        f"{codes[wrong[0]].tolist()} is not {expected_codes[wrong[0]].tolist()}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", [*NVFP4, *MXFP4])
def test_recipes_agree_with_numpy(math: KernelMath, recipe: str, dtype: str) -> None:
    for global_scale in (1.0, 2688 / 3.7, 1.7e-9) if recipe in NVFP4 else (1.0,):
        compare(math, recipe, patterns(dtype, 4000, LENGTH[recipe], 2), global_scale)
        compare(math, recipe, ordinary(dtype, 4000, LENGTH[recipe], 3), global_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", GARBAGE)
@pytest.mark.parametrize("recipe", NVFP4)
def test_garbage_global_scales_agree_with_numpy(math: KernelMath, recipe: str, scale: str, dtype: str) -> None:
    compare(math, recipe, of_dtype(edge_blocks(16), dtype), GARBAGE[scale])
    compare(math, recipe, patterns(dtype, 500, 16, 4), GARBAGE[scale])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", MXFP4)
def test_mxfp4_edges_agree_with_numpy(math: KernelMath, recipe: str, dtype: str) -> None:
    with np.errstate(over="ignore", under="ignore"):
        powers = np.ldexp(edge_blocks(32)[None], np.arange(-148, 128)[:, None, None]).reshape(-1, 32)
    compare(math, recipe, of_dtype(powers, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", [*NVFP4, *MXFP4])
def test_signalling_nans_lose_or_win_as_quiet_ones_do(math: KernelMath, recipe: str, dtype: str) -> None:
    """``np.fmax`` lets a signalling NaN through, or drops a number beside it; neither path may."""
    x = ordinary(dtype, 64, LENGTH[recipe], 5)
    nan = {"bf16": 0x7F81, "f16": 0x7C01, "f32": 0x7F800001}[dtype]
    raw = x.view(np.uint32 if dtype == "f32" else np.uint16)
    for i in range(64):
        raw[i, i % LENGTH[recipe]] = nan | (i % 2) << (8 * raw.dtype.itemsize - 1)
    compare(math, recipe, x)


@pytest.mark.parametrize("row", DEVICE_TABLE, ids=lambda row: f"g={row[0]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_read_off_an_h200_is_reproduced(math: KernelMath, dtype: str, row: tuple) -> None:
    g, scale, packed, zero_scale, zero_packed, nan_scale = row
    with_nan = BLOCK_A.copy()
    with_nan[0, 0] = np.nan
    x = of_dtype(np.concatenate([BLOCK_A, np.zeros((1, 16), np.float32), with_nan]), dtype)
    scales, codes = math.blocks("vllm-cuda", x, np.float32(g))
    assert [f"{byte:02x}" for byte in scales] == [scale, zero_scale, nan_scale]
    assert [packed_hex(codes[0]), packed_hex(codes[1])] == [packed, zero_packed]
    assert codes[2, 0] == 7
    assert packed_hex(codes[2])[2:] == packed[2:]


def test_the_rounding_grid_separates_the_recipes_and_both_agree_with_numpy(math: KernelMath) -> None:
    """G = 2688/amax and values on the midpoints of a block's own scale: one ulp in a reciprocal flips a code."""
    grid = np.array([*sets.MIDPOINTS, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 2.75], np.float32)
    scale_values = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    differing = 0
    for fraction in range(128):
        top = np.float32(1 + fraction / 128)
        x = (scale_values[:, None] * (top / np.float32(2688)) * grid).astype(np.float32)
        for recipe in NVFP4:
            compare(math, recipe, x, np.float32(2688) / top)
        differing += int((math.blocks("ieee", x, 2688 / top)[1] != math.blocks("vllm-cuda", x, 2688 / top)[1]).sum())
    assert differing > 0
