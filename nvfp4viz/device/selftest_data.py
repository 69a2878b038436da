"""What the self-test and ``tests/gpu`` compute on: ordinary and hostile blocks, and both devices' answers.

Hostile are NaN of every kind (signalling ones among them), infinities, subnormals, blocks of zeros, values on the
rounding grid of their own scale, and global scales that no calibration would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import pack_nibbles, swizzle_128x4
from nvfp4viz.quant.api import quantize_rows_numpy
from nvfp4viz.quant.recipes import RECIPES

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Answer = tuple[U8, U8]
"""Packed bytes (M, K//2), and scale bytes in whatever layout was asked for."""

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
GARBAGE = (
    1.0, 0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1e-39, 1e-38, 1e-6, 1e6, 2.0**126,
    float(np.nextafter(np.float32(2.0**126), np.float32(np.inf))), 1e38, 3.4028235e38, 2688 / 3.7, 1.7e-9,
)  # fmt: skip
"""Global scales: ordinary ones, and what uninitialised memory or a wrong file may hold."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def global_scales(recipe: str) -> tuple[float | None, ...]:
    """`GARBAGE` for NVFP4; nothing to choose for MXFP4."""
    return (None,) if RECIPES[recipe].scheme == "mxfp4" else GARBAGE


def as_dtype(x: Array, dtype: str) -> Array:
    """Rounded to a dtype, contiguous, no complaints about overflow."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(np.asarray(x).astype(np.float32).astype(DTYPES[dtype]))


def patterns(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random bit patterns: every kind of NaN, infinities and subnormals come along."""
    rng = np.random.default_rng(seed)
    unsigned = np.uint32 if dtype == "f32" else np.uint16
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    return bits.view(DTYPES[dtype])


def coarse(dtype: str, shape: tuple[int, int], seed: int) -> Array:
    """Multiples of 1/16 up to 6 times a power of two for each row: many ties, all codes."""
    rng = np.random.default_rng(seed)
    spread = 12 if dtype == "f16" else 60
    exponents = rng.integers(-spread, spread + 1, (shape[0], 1))
    return as_dtype(np.ldexp(rng.integers(-96, 97, shape) / 16, exponents), dtype)


def edges(dtype: str, columns: int = 32) -> Array:
    """Rows of one special value, alone or among zeros or numbers; midpoints with their neighbours."""
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    mixed = np.resize(np.array([0.0, -0.0, 1.0, -1.0, 0.25, -6.0, 3.0, -0.25], np.float32), columns)
    rows = [np.zeros(columns, np.float32), np.full(columns, -0.0, np.float32), mixed]
    for value in (nan, -nan, inf, -inf, np.float32(1e-45), np.float32(1.1754942e-38), np.float32(3.4028235e38)):
        rows.append(np.full(columns, value, np.float32))
        for base in (mixed, np.zeros(columns, np.float32)):
            for at in (0, 5, 15, columns - 1):
                row = base.copy()
                row[at] = value
                rows.append(row)
    middle = np.array(MIDPOINTS, np.float32)
    for toward in (None, inf, -inf):
        near = middle if toward is None else np.nextafter(middle, toward)
        row = np.resize(np.concatenate([near, -near]), columns)
        row[0] = 6.0
        rows.append(row)
    x = as_dtype(np.array(rows), dtype)
    signalling = np.resize(as_dtype(mixed, dtype), (32, columns)).copy()
    raw = signalling.view(np.uint32 if dtype == "f32" else np.uint16)
    quiet_bit_clear = {"bf16": 0x7F81, "f16": 0x7C01, "f32": 0x7F800001}[dtype]
    for i in range(32):
        raw[i, i % columns] = quiet_bit_clear | (i % 2) << (8 * raw.dtype.itemsize - 1)
    return np.concatenate([x, signalling])


def grid(dtype: str) -> Array:
    """Values on the midpoints of a block's own scale at G = 2688/3.7: one ulp in a reciprocal flips a code."""
    values = np.array([*MIDPOINTS, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 2.75], np.float32)
    scales = np.arange(8, 126, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = scales[:, None] * np.float32(3.7 / 2688) * values
    return as_dtype(np.concatenate([x, x], axis=1), dtype)


@cache
def matrices(dtype: str) -> tuple[Array, ...]:
    """A few small matrices of odd row counts, K a multiple of 32."""
    return (
        edges(dtype),
        patterns(dtype, (67, 32 * 9), 1),
        coarse(dtype, (130, 32 * 5), 2),
        grid(dtype),
        coarse(dtype, (1, 32), 3),
        coarse(dtype, (5, 16 * 2 * 131), 4),
    )


def on_cpu(x: Array, recipe: str, g: float | None) -> Answer:
    """NumPy's answer, scales linear."""
    packed, scales = quantize_rows_numpy(x, recipe, np.float32(1 if g is None else g))
    return packed, scales


def on_gpu(x: Array, recipe: str, g: Any, layout: str = "linear", soft: bool = False, offsets: Any = None) -> Answer:
    """The GPU's answer, scales as asked."""
    from nvfp4viz.device import ops
    from nvfp4viz.device.dispatch import to_cuda

    q = ops.quantize(to_cuda(x), recipe=recipe, global_scale=g, layout=layout, soft=soft, offsets=offsets)  # type: ignore[arg-type]
    return q.packed.cpu().numpy(), q.scales.cpu().numpy()


def differing_bytes(found: Answer, expected: Answer, layout: str) -> int:
    """How many bytes differ; ``expected`` has linear scales."""
    scales = expected[1] if layout == "linear" else swizzle_128x4(expected[1])
    if found[0].shape != expected[0].shape or found[1].shape != scales.shape:
        raise AssertionError("the shapes differ")
    return int((found[0] != expected[0]).sum()) + int((found[1] != scales).sum())


def differing_floats(a: Array, b: Array) -> Array:
    """Indices of float32 values whose bits differ; a NaN equals a NaN."""
    a, b = np.ascontiguousarray(a).ravel(), np.ascontiguousarray(b).ravel()
    differ = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    return np.flatnonzero(differ)


def decoded_pairs() -> Iterator[tuple[Array, Array]]:
    """Bit patterns of decoded values, GPU's and CPU's, for every recipe, pair of bytes and global scale."""
    import torch

    from nvfp4viz import quant
    from nvfp4viz.device import ops
    from nvfp4viz.device.dispatch import to_cuda

    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))  # every packed byte under every scale byte
    shape = (256, 512)
    for recipe, found in RECIPES.items():
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], shape[1] // found.block_size, 1)
        for g in GARBAGE if found.scheme == "nvfp4" else (1.0,):
            theirs = quant.QuantizedTensor(packed, scales, np.float32(g), recipe, found.block_size, shape)
            for layout in ("linear", "swizzled"):
                bytes_ = scales if layout == "linear" else swizzle_128x4(scales)
                ours = ops.DeviceQuantized(to_cuda(packed), to_cuda(bytes_), g, recipe, shape, layout)  # type: ignore[arg-type]
                wide = ops.dequantize(ours, torch.float32).cpu().numpy().view(np.uint32)
                yield wide, quant.dequantize(theirs, np.float32, path="numpy").view(np.uint32)
                narrow = ops.dequantize(ours, torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
                yield narrow, quant.dequantize(theirs, ml_dtypes.bfloat16, path="numpy").view(np.uint16)


def activated_pairs(activation: str) -> Iterator[tuple[Answer, Answer]]:
    """All BF16 gates with ups of several sizes, and random patterns as ups: GPU's bytes and CPU's."""
    from nvfp4viz.device import ops
    from nvfp4viz.device.dispatch import to_cuda
    from nvfp4viz.moe.experts import activate

    gates = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(512, 128)
    shuffled = np.random.default_rng(8).permutation(gates.ravel()).reshape(512, 128)
    for g, up in ((1.0, 1.0), (2688 / 3.7, -0.66015625), (1e6, 2.0**-60), (1.0, None)):
        ups = patterns("bf16", gates.shape, 9) if up is None else np.full(gates.shape, up, ml_dtypes.bfloat16)
        for order in (gates, shuffled):
            x = np.concatenate([order, ups], axis=1)
            expected = activate(x, activation, fused=True)  # type: ignore[arg-type]
            for recipe in ("ieee", "vllm-cuda"):
                q = ops.activation_quantize(to_cuda(x), activation=activation, recipe=recipe, global_scale=g)  # type: ignore[arg-type]
                yield (q.packed.cpu().numpy(), q.scales.cpu().numpy()), on_cpu(expected, recipe, g)


def mma_operands(kind: str, shape: tuple[int, ...], k: int) -> Iterator[tuple[U8, U8]]:
    """Packed codes ``(*shape, k//2)`` and scales of one side: ordinary, all finite, subnormal and zero, any scales."""
    block = 16 if kind == "nvfp4" else 32
    every = np.arange(256, dtype=np.uint8)
    ordinary = np.arange(0x30, 0x50, dtype=np.uint8) if kind == "nvfp4" else np.arange(117, 138, dtype=np.uint8)
    small = np.array([0, 1, 2, 7, 8, 0x80, 0x81, 0x87] if kind == "nvfp4" else [0, 1, 2, 60, 63, 64], np.uint8)
    finite = every[(every & 0x7F) != 0x7F] if kind == "nvfp4" else every[:255]
    rng = np.random.default_rng(sum(shape) + k)
    for scales in (ordinary, finite, small, every):
        codes = rng.integers(0, 16, (*shape, k), dtype=np.uint8)
        yield pack_nibbles(codes), rng.choice(scales, (*shape, k // block))


def mma_accumulators(tiles: int) -> Iterator[F32]:
    """``(tiles, 16, 8)``: nothing, numbers over 60 binades, any bits."""
    rng = np.random.default_rng(11)
    shape = (tiles, 16, 8)
    yield np.zeros(shape, np.float32)
    yield np.ldexp(rng.standard_normal(shape), rng.integers(-30, 31, shape)).astype(np.float32)
    yield rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
