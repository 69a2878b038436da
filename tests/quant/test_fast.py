"""The Numba kernels give the bits of the NumPy path, for every recipe, over inputs that were chosen to be unkind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.quant import MXFP4_RECIPES, NVFP4_RECIPES, amax, dequantize, fast, global_scale, mxfp4, quantize
from nvfp4viz.quant.types import QuantizedTensor

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
ROOT = Path(__file__).parents[2]

# 0, -0, ±Inf, NaN, negative, subnormal, where rcp flushes (2^126 = 8.5e37) and either side of it, and ordinary ones.
GLOBAL_SCALES = [0.0, -0.0, np.inf, -np.inf, np.nan, -2.5, 1e-38, 1e-40, 1e38, 8.5e37, 8.6e37, 3.4e38]
GLOBAL_SCALES += [1.0, 1e6, 1e-6, 371.7, 0.0123]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def bf16(bits) -> np.ndarray:
    return np.asarray(bits, np.uint16).view(BF16)


def f32(bits) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def all_bf16() -> np.ndarray:
    return bf16(np.arange(65536)).reshape(16, -1)


def shuffled_bf16() -> np.ndarray:
    """All patterns in random company: nearly every block has something non-finite in it."""
    return bf16(np.random.default_rng(1).permutation(65536)).reshape(16, -1)


def finite_bf16_each_alone() -> np.ndarray:
    """Every finite BF16 as the maximum of a block, with smaller companions of both signs."""
    maxima = bf16([b for b in range(65536) if b & 0x7F80 != 0x7F80]).astype(np.float32)
    with np.errstate(under="ignore"):
        rest = np.random.default_rng(2).uniform(-1, 1, (len(maxima), 16)).astype(np.float32) * maxima[:, None]
    rest[:, 5] = maxima
    return rest.astype(BF16)


def random_bits() -> np.ndarray:
    return f32(np.random.default_rng(3).integers(0, 1 << 32, 1 << 16, dtype=np.uint64)).reshape(16, -1)


def wide_range() -> np.ndarray:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 512)) * 2.0 ** rng.integers(-30, 30, (64, 32)).repeat(16, axis=1)
    return x.astype(np.float32)


def normal_bf16() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((64, 512)).astype(BF16)


def midpoints_and_neighbours() -> np.ndarray:
    """Under a global scale of 1: blocks whose scale is a power of two, so that E2M1's midpoints are hit exactly."""
    middle = np.array(MIDPOINTS, np.float32)
    near = np.concatenate([middle, np.nextafter(middle, np.float32(9)), np.nextafter(middle, np.float32(0))])
    pool = np.concatenate([near, -near, [0.0, -0.0, 6, -6]]).astype(np.float32)
    x = pool[np.random.default_rng(6).integers(0, len(pool), (512, 16))]
    x[:, 0] = 6
    return (x * 2.0 ** (np.arange(512) % 15 - 6)[:, None]).astype(np.float32)


def scale_midpoints() -> np.ndarray:
    """Block maxima whose scale, under a global scale of 1, lies on or beside a boundary of E4M3."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.sort(values[(values >= 0) & np.isfinite(values)])
    edges = np.concatenate([(values[1:] + values[:-1]) / 2, values, [464, 465, 480, 1000]]).astype(np.float32) * 6
    near = np.stack([edges, np.nextafter(edges, np.float32(1e9)), np.nextafter(edges, np.float32(0))]).ravel()
    return np.repeat(near[:, None], 16, axis=1) * np.float32([1, -1] * 8)


def specials() -> np.ndarray:
    """Blocks of ordinary numbers with one or more of everything strange, signalling NaNs included."""
    strange = f32([0, 1 << 31, 1, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000])
    strange = np.concatenate([strange, f32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])])
    x = np.random.default_rng(7).standard_normal((4 * len(strange) + 4, 16)).astype(np.float32)
    for i, value in enumerate(strange):
        x[4 * i, 3] = value
        x[4 * i + 1, :] = value
        x[4 * i + 2, ::2] = value
        x[4 * i + 3, 15] = value
    x[-2] = 0
    x[-1] = f32(1 << 31)
    return x


INPUTS = {
    maker.__name__: maker
    for maker in (
        all_bf16, shuffled_bf16, finite_bf16_each_alone, random_bits, wide_range, normal_bf16,
        midpoints_and_neighbours, scale_midpoints, specials,
    )
}  # fmt: skip


def assert_same(x: np.ndarray, recipe: str, g: np.float32) -> None:
    want = quantize(x, recipe=recipe, global_scale=g, path="numpy")
    packed, scales = fast.quantize_rows(x.reshape(-1, x.shape[-1]), recipe, np.float32(g))
    np.testing.assert_array_equal(scales, want.scales, err_msg=f"scales, g={g}")
    np.testing.assert_array_equal(packed, want.packed, err_msg=f"codes, g={g}")


@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
@pytest.mark.parametrize("name", INPUTS)
def test_quantising_gives_the_bits_of_numpy(name, recipe):
    x = INPUTS[name]()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        finite = x[np.isfinite(x)]
    scales = [*GLOBAL_SCALES, global_scale(amax(finite), recipe, x.dtype)]
    if x.dtype == BF16 and len(x) * x.shape[1] > 1 << 17:
        scales = scales[:8] + scales[-3:]
    for g in scales:
        assert_same(x, recipe, g)
        if x.dtype == F32 and name in ("specials", "wide_range"):
            with np.errstate(invalid="ignore"):
                narrow = x.astype(BF16)
            assert_same(narrow, recipe, g)


@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_chunks_of_64_blocks_have_no_seams(recipe, blocks, dtype):
    x = np.random.default_rng(blocks).standard_normal((3, blocks * 16)).astype(dtype)
    assert_same(x, recipe, global_scale(amax(x), recipe, dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_threads_divide_the_work_without_gap(dtype):
    rows = 2 * fast.THREADING_PAYS // 4112 + 1
    x = np.random.default_rng(8).standard_normal((rows, 4112)).astype(dtype)
    assert x.size > fast.THREADING_PAYS
    assert_same(x, "ieee", np.float32(500))
    x[0, 0], x[-1, -1] = np.nan, np.inf
    assert_same(x, "ieee", np.float32(500))


def test_inputs_may_be_read_only_strided_or_unaligned_and_stay_untouched():
    x = np.random.default_rng(9).standard_normal((8, 64)).astype(np.float32)
    want = fast.quantize_rows(x, "ieee", np.float32(400))
    frozen = x.copy()
    frozen.flags.writeable = False
    shifted = np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert not shifted.flags.aligned
    for variant in (frozen, np.repeat(x, 2, axis=1)[:, ::2], shifted):
        for got, expected in zip(fast.quantize_rows(variant, "ieee", np.float32(400)), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(frozen, x)


def mx_blocks_around(recipe: str) -> np.ndarray:
    """Blocks whose maximum stands at a step of the scale, next to it, or anywhere in its binade, of both signs.

    The other elements lie at E2M1's midpoints under that block's scale, and next to them.
    """
    rng = np.random.default_rng(10)
    _, step = mxfp4.scale_steps(recipe)
    fields = np.repeat(np.arange(255, dtype=np.int64), 12)
    significands = np.stack([step + d for d in (-2, -1, 0, 1)] + [rng.integers(0, 1 << 23, 255) for _ in range(8)], 1)
    tops = (fields << 23 | np.clip(significands.reshape(-1), 0, (1 << 23) - 1)).astype(np.uint32).view(np.float32)
    bare = np.zeros((len(tops), 32), np.float32)
    bare[:, 0] = tops
    bytes_ = quantize(bare, recipe=recipe, path="numpy").scales.reshape(-1).astype(np.int64)
    exact = np.array([m * s for m in mxfp4.MIDPOINTS for s in (1.0, -1.0)])
    with np.errstate(over="ignore", under="ignore"):
        ties = np.ldexp(exact, (bytes_ - 127)[:, None]).astype(np.float32)
    ties = np.clip(ties, -tops[:, None], tops[:, None])
    x = np.zeros((len(tops), 32), np.float32)
    x[:, :14], x[:, 14:28] = ties, np.nextafter(ties, np.float32(0))
    x[:, 28:31] = rng.standard_normal((len(tops), 3)).astype(np.float32).clip(-1, 1) * tops[:, None]
    x[:, 31] = tops * rng.choice(np.float32([-1, 1]), len(tops))
    x[:, 30] = np.float32(-0.0)
    return rng.permuted(x, axis=1)


@pytest.mark.parametrize("recipe", MXFP4_RECIPES)
def test_mxfp4_at_every_step_of_the_scale_and_at_every_tie(recipe):
    x = mx_blocks_around(recipe)
    for values in (x, x.astype(BF16)):
        fast_, numpy = (quantize(values, recipe=recipe, path=path) for path in ("numba", "numpy"))
        np.testing.assert_array_equal(fast_.scales, numpy.scales)
        np.testing.assert_array_equal(fast_.packed, numpy.packed)


@pytest.mark.parametrize("recipe", MXFP4_RECIPES)
def test_mxfp4_scale_has_one_step_in_each_binade(recipe):
    """What the kernel relies on: every BF16 maximum, and a million others."""
    base, step = mxfp4.scale_steps(recipe)
    bits = np.random.default_rng(13).integers(0, 0x7F800000, 1 << 20, dtype=np.uint32)
    bits[: 1 << 15] = np.arange(1 << 15, dtype=np.uint32) << 16
    bits = bits[bits < 0x7F800000]
    x = np.zeros((len(bits), 32), np.float32)
    x[:, 0] = bits.view(np.float32)
    field = bits >> 23
    told = base[field] + ((bits & 0x7FFFFF) >= step[field])
    np.testing.assert_array_equal(quantize(x, recipe=recipe, path="numpy").scales.reshape(-1), told)


@pytest.mark.parametrize("recipe", MXFP4_RECIPES)
def test_mxfp4_in_two_threads(recipe):
    x = np.random.default_rng(14).standard_normal((64, 4096)).astype(np.float32)
    x[3, 100], x[60, 4095], x[9, :32] = np.nan, -np.inf, np.nan
    fast_, numpy = (quantize(x, recipe=recipe, path=path) for path in ("numba", "numpy"))
    np.testing.assert_array_equal(fast_.scales, numpy.scales)
    np.testing.assert_array_equal(fast_.packed, numpy.packed)


# ------------------------------------------------------------------------------------------------- dequantising


@pytest.mark.parametrize("recipe", [*NVFP4_RECIPES, *MXFP4_RECIPES])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dequantising_gives_the_bits_of_numpy(recipe, dtype):
    """All 16 codes under all 256 scale bytes, then random ones, under every global scale."""
    block = 16 if recipe in NVFP4_RECIPES else 32
    every = np.tile(np.arange(16, dtype=np.uint8), block // 16)
    table = np.tile(every[0::2] | every[1::2] << 4, (256, 1))
    rng = np.random.default_rng(11)
    cases = [(table, np.arange(256, dtype=np.uint8)[:, None])]
    cases.append(
        (rng.integers(0, 256, (37, 160), dtype=np.uint8), rng.integers(0, 256, (37, 320 // block)).astype(np.uint8))
    )
    for packed, scales in cases:
        for g in [1.0] if block == 32 else [*GLOBAL_SCALES, 3.14159265e-5]:
            q = QuantizedTensor(packed, scales, np.float32(g), recipe, block, (len(packed), packed.shape[1] * 2))
            want, got = dequantize(q, dtype, path="numpy"), fast.dequantize_tensor(q, dtype)
            assert got.dtype == dtype
            bits = np.uint32 if dtype == F32 else np.uint16
            np.testing.assert_array_equal(got.view(bits), want.view(bits), err_msg=f"g={g}")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dequantising_in_two_threads(dtype):
    rng = np.random.default_rng(12)
    rows = fast.THREADING_PAYS // 1040 + 3
    packed = rng.integers(0, 256, (rows, 520), dtype=np.uint8)
    q = QuantizedTensor(
        packed, rng.integers(0, 256, (rows, 65)).astype(np.uint8), np.float32(0.37), "ieee", 16, (rows, 1040)
    )
    bits = np.uint32 if dtype == F32 else np.uint16
    np.testing.assert_array_equal(
        fast.dequantize_tensor(q, dtype).view(bits), dequantize(q, dtype, path="numpy").view(bits)
    )


# ------------------------------------------------------------------------------------------------- as a citizen


def test_many_threads_at_once_give_the_same_bits():
    """The app runs one thread per visitor; they share one helper thread."""
    x = np.random.default_rng(13).standard_normal((64, 4096)).astype(np.float32)
    want = quantize(x, recipe="ieee", path="numpy")
    wrong: list[str] = []

    def visitor() -> None:
        for _ in range(5):
            got = quantize(x, recipe="ieee", path="numba")
            if not np.array_equal(got.packed, want.packed) or not np.array_equal(got.scales, want.scales):
                wrong.append("bits")
            back = dequantize(got, path="numba")
            if not np.array_equal(back.view(np.uint32), dequantize(want, path="numpy").view(np.uint32)):
                wrong.append("values")

    visitors = [threading.Thread(target=visitor) for _ in range(6)]
    for thread in visitors:
        thread.start()
    for thread in visitors:
        thread.join()
    assert not wrong


def test_kernels_work_where_no_cache_can_be_written(tmp_path):
    """A read-only installation in a container without a home: Numba finds no place for its cache, and we go on."""
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "from nvfp4viz.quant.jit import kernel\n"
        "import numba as nb\n"
        "print(kernel(nb.i8(nb.i8))(lambda x: x + 1)(41))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "42"


def test_a_forked_child_gets_its_own_helper_thread():
    x = np.random.default_rng(14).standard_normal((64, 4096)).astype(np.float32)
    want = quantize(x, recipe="ieee", path="numba").packed
    code = os.fork()
    if code == 0:  # pragma: no cover
        os._exit(0 if np.array_equal(quantize(x, recipe="ieee", path="numba").packed, want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]) == 0
