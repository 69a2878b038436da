"""Operands for the grouped GEMMs and what the CPU says they must give; shared by the host and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from nvfp4viz.formats import decode_e2m1, decode_e4m3, f32_to_bf16, swizzle_128x4, unpack_nibbles
from nvfp4viz.quant import mma_grouped, mma_matmul
from nvfp4viz.quant.gemm import scale_and_round

BLOCK = {"nvfp4": 16, "mxfp4": 32}
RAGGED = (0, 1, 127, 128, 129)
"""Rows of the experts: none, one, and around a tile of 128 block-scale rows."""


def offsets_of(counts: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@dataclass(frozen=True)
class W4A4Case:
    """One grouped product: rows sorted by expert, weights of all experts, factors of the epilogue."""

    kind: str
    a: np.ndarray  # (R, K//2)
    a_scales: np.ndarray  # (R, K//block)
    b: np.ndarray  # (E, N, K//2)
    b_scales: np.ndarray  # (E, N, K//block)
    counts: tuple[int, ...]
    alphas: np.ndarray  # (E,)

    @property
    def offsets(self) -> np.ndarray:
        return offsets_of(self.counts)

    @property
    def row_expert(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    def expected(self, dtype, row_alphas: np.ndarray | None = None) -> np.ndarray:
        """``round(alpha * acc)`` by `nvfp4viz.quant`: (R, N)."""
        acc = mma_grouped(self.a, self.a_scales, self.row_expert, self.b, self.b_scales, kind=self.kind)
        factor = self.alphas[self.row_expert] if row_alphas is None else row_alphas
        return scale_and_round(acc, factor[:, None], dtype)

    def swizzled(self, padding: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scales of A and B in 128x4 order, every expert in tiles of its own, and A's first tile row by expert.

        `padding` is the byte that fills rows and columns of the tiles that hold no scale.
        """
        padded = [-(-count // 128) * 128 for count in self.counts]
        starts = offsets_of(self.counts)
        columns = -(-self.a_scales.shape[1] // 4) * 4

        def tiles(scales: np.ndarray) -> np.ndarray:
            whole = np.full((-(-len(scales) // 128) * 128, columns), padding, np.uint8)
            whole[: len(scales), : scales.shape[1]] = scales
            return swizzle_128x4(whole)

        parts = [tiles(self.a_scales[s : s + c]) for s, c in zip(starts[:-1], self.counts, strict=True)]
        flat = np.concatenate([*parts, np.zeros(0, np.uint8)])
        assert flat.size == sum(padded) * columns
        weights = np.concatenate([tiles(scales) for scales in self.b_scales])
        return flat, weights, offsets_of(tuple(padded))


def w4a4_case(kind: str, counts: tuple[int, ...], n: int, k: int, *, garbage: bool = False, seed: int = 0) -> W4A4Case:
    """Random codes; scales near one, or (`garbage`) any byte, one in fifty a NaN, with alphas to match."""
    rng = np.random.default_rng(seed)
    rows, experts, block = sum(counts), len(counts), BLOCK[kind]
    near = np.arange(0x30, 0x48) if kind == "nvfp4" else np.arange(120, 134)
    nans = (0x7F, 0xFF) if kind == "nvfp4" else (0xFF,)
    finite = np.array([byte for byte in range(256) if byte not in nans])

    def scales(*shape: int) -> np.ndarray:
        if not garbage:
            return rng.choice(near, shape).astype(np.uint8)
        out = rng.choice(finite, shape).astype(np.uint8)
        hit = rng.random(shape[:-1]) < 0.02  # a NaN scale answers NaN for its whole row: few rows only
        out[hit, 0] = rng.choice(nans)
        return out

    alphas = (rng.standard_normal(experts) * 0.01).astype(np.float32)
    if garbage:
        special = np.array([0.0, np.inf, -np.inf, np.nan, -1.0, 1e-40, 3e38], np.float32)
        alphas[: min(len(special), experts)] = special[:experts]
    return W4A4Case(
        kind,
        rng.integers(0, 256, (rows, k // 2), dtype=np.uint8),
        scales(rows, k // block),
        rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8),
        scales(experts, n, k // block),
        counts,
        alphas,
    )


@dataclass(frozen=True)
class MmaTiles:
    """Operands of many single instructions, and their results: T tiles of 16 x 8, K = 64."""

    kind: str
    a: np.ndarray  # (T, 16, 32)
    a_scales: np.ndarray  # (T, 16, S)
    b: np.ndarray  # (T, 8, 32)
    b_scales: np.ndarray  # (T, 8, S)
    c: np.ndarray  # (T, 16, 8)

    def expected(self) -> np.ndarray:
        tiles = zip(self.a, self.a_scales, self.b, self.b_scales, self.c, strict=True)
        return np.stack([mma_matmul(*tile, kind=self.kind) for tile in tiles])


def mma_tiles_case(kind: str, tiles: int, seed: int = 0) -> MmaTiles:
    """Random codes; scales of any byte in a third of the tiles, tiny in another; sums of any bits, or that cancel."""
    rng = np.random.default_rng(seed)
    each = 64 // BLOCK[kind]
    nans = (0x7F, 0xFF) if kind == "nvfp4" else (0xFF,)
    finite = np.array([byte for byte in range(256) if byte not in nans], np.uint8)
    near = np.arange(0x30, 0x48, dtype=np.uint8) if kind == "nvfp4" else np.arange(120, 134, dtype=np.uint8)
    tiny = np.array([0, 1, 2, 7, 0x80, 0x81], np.uint8)

    def scales(rows: int) -> np.ndarray:
        out = rng.choice(near, (tiles, rows, each))
        out[0::3] = rng.choice(finite, out[0::3].shape)
        out[1::3] = rng.choice(tiny, out[1::3].shape)
        out[0::9, 0, 0] = nans[0]
        return out

    c = rng.standard_normal((tiles, 16, 8)).astype(np.float32)
    c[0::2] = rng.integers(0, 1 << 32, c[0::2].shape, dtype=np.uint32).view(np.float32)
    a, b = (rng.integers(0, 256, (tiles, rows, 32), dtype=np.uint8) for rows in (16, 8))
    case = MmaTiles(kind, a, scales(16), b, scales(8), c)
    case.c[2::3] = -replace(case, c=np.zeros_like(c)).expected()[2::3]  # what truncation lost is left
    return case


@dataclass(frozen=True)
class W4A16Case:
    """BF16 rows sorted by expert, NVFP4 weights, one decode scale an expert."""

    x: np.ndarray  # (R, K) bfloat16
    packed: np.ndarray  # (E, N, K//2)
    scales: np.ndarray  # (E, N, K//16)
    decode: np.ndarray  # (E,)
    counts: tuple[int, ...]

    @property
    def offsets(self) -> np.ndarray:
        return offsets_of(self.counts)

    def weights(self) -> np.ndarray:
        """``code * block scale``, (E, N, K) float32; every value is exact in BF16."""
        values = decode_e2m1(unpack_nibbles(self.packed)) * np.repeat(decode_e4m3(self.scales), 16, axis=-1)
        return values.astype(np.float32)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The product in float64, (R, N), and how far a result may be from it.

        Products of two BF16 are exact in f32; the sums are not.  Hardware adds 16 products and the accumulator with an
        alignment that may cut each term off below 2^-23 of the largest, so K terms lose at most K * 2^-22 of the sum of
        magnitudes (twice that bound is allowed for the two ways an addition can go).  The BF16 store then rounds to
        nearest: 2^-9 of the value.
        """
        out = np.zeros((len(self.x), self.packed.shape[1]))
        sizes = np.zeros_like(out)
        x, weights, offsets = self.x.astype(np.float64), self.weights().astype(np.float64), self.offsets
        for expert, decode in enumerate(self.decode.astype(np.float64)):
            rows = slice(offsets[expert], offsets[expert + 1])
            out[rows] = x[rows] @ weights[expert].T * decode
            sizes[rows] = np.abs(x[rows]) @ np.abs(weights[expert]).T * abs(decode)
        k = self.x.shape[1]
        return out, sizes * (k * 2.0**-22) + np.abs(out) * 2.0**-8 + 1e-38


def w4a16_case(counts: tuple[int, ...], n: int, k: int, *, seed: int = 0, any_scale: bool = False) -> W4A16Case:
    """Random activations and weights; `any_scale` takes every finite E4M3 byte, subnormal and negative ones too."""
    rng = np.random.default_rng(seed)
    experts = len(counts)
    finite = np.array([byte for byte in range(256) if byte % 128 != 127])
    bytes_ = finite if any_scale else np.arange(0x50, 0x7F)
    return W4A16Case(
        f32_to_bf16(rng.standard_normal((sum(counts), k)).astype(np.float32)),
        rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8),
        rng.choice(bytes_, (experts, n, k // 16)).astype(np.uint8),
        (2.0 ** rng.uniform(-12, -8, experts)).astype(np.float32),
        counts,
    )


def bits(array: np.ndarray) -> np.ndarray:
    """Floats as integers, so that NaN equals NaN and -0 is not +0."""
    return np.ascontiguousarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


BFLOAT16 = ml_dtypes.bfloat16
