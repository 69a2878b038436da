"""The tensor-core step against an independent C++ restatement of the seven rules.

No package computes this on a CPU, and no Blackwell GPU was used: what is checked is that two programs written from
``tensor-core.md`` with different arithmetic (ours in integers, the other in 64-bit-significand floating point) agree
in every bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz.quant import mma_k32, mma_matmul, mma_step_k32_reference, mma_step_reference
from tests.host.restatement import Restatement

pytestmark = pytest.mark.host
BLOCK = {"nvfp4": 16, "mxfp4": 32}
KINDS = tuple(BLOCK)
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def pack(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def compare(host: Restatement, a, b, a_scales, b_scales, c, kind: str) -> None:
    """Ours on all pairs ``(m, n)`` in one matmul of K=64, the restatement on the same pairs one by one."""
    m, n = len(a), len(b)
    ours = mma_matmul(pack(a), a_scales, pack(b), b_scales, c=c, kind=kind).view(np.uint32)
    rows, columns = (index.ravel() for index in np.indices((m, n)))
    theirs = host.steps(a[rows], b[columns], a_scales[rows], b_scales[columns], c.ravel(), kind)
    differing = np.flatnonzero(ours.ravel() != theirs)
    assert not differing.size, (
        f"{differing.size} of {m * n} differ; first at {differing[0]}: "
        f"{ours.ravel()[differing[0]]:#010x} != {theirs[differing[0]]:#010x}"
    )


def random_operand(rng: np.random.Generator, rows: int, kind: str, scales) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, (rows, 64), dtype=np.uint8)
    return codes, rng.choice(np.asarray(scales, np.uint8), (rows, 64 // BLOCK[kind]))


# Scale bytes that matter: everything, ordinary ones, subnormal and zero ones, with and without the ignored sign bit.
SCALES = {
    "nvfp4": {
        "ordinary": range(0x30, 0x50),
        "finite": [b for b in range(256) if b % 128 != 127],
        "subnormal": [0, 1, 2, 7, 8, 0x80, 0x81, 0x87],
        "zero": [0, 0x80],
    },
    "mxfp4": {
        "ordinary": range(117, 138),
        "finite": range(255),
        "subnormal": [0, 1, 2, 60, 63, 64],
        "zero": [0],
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["ordinary", "finite", "subnormal", "zero"])
def test_random_operands_and_accumulators_agree(host: Restatement, kind: str, which: str) -> None:
    rng = np.random.default_rng(7)
    a, sa = random_operand(rng, 96, kind, SCALES[kind][which])
    b, sb = random_operand(rng, 96, kind, SCALES[kind][which])
    c = (rng.standard_normal((96, 96)) * 2.0 ** rng.integers(-30, 30, (96, 96))).astype(np.float32)
    compare(host, a, b, sa, sb, c, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_any_accumulator_bits_agree(host: Restatement, kind: str) -> None:
    """Random f32 patterns: NaN, infinities, subnormals and both zeros come along."""
    rng = np.random.default_rng(8)
    a, sa = random_operand(rng, 64, kind, SCALES[kind]["finite"])
    b, sb = random_operand(rng, 64, kind, SCALES[kind]["finite"])
    c = rng.integers(0, 1 << 32, (64, 64), dtype=np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1.1754942e-38, 3.4e38, -3.4e38], np.float32)
    c[0, : len(special)] = special
    compare(host, a, b, sa, sb, c, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_all_scale_byte_pairs_agree(host: Restatement, kind: str) -> None:
    """256 x 256 pairs of scale bytes, NaN included."""
    rng = np.random.default_rng(9)
    a = rng.integers(0, 16, (256, 64), dtype=np.uint8)
    b = rng.integers(0, 16, (256, 64), dtype=np.uint8)
    every = np.arange(256, dtype=np.uint8)[:, None]
    scales = np.repeat(every, 64 // BLOCK[kind], 1)
    c = rng.standard_normal((256, 256)).astype(np.float32)
    compare(host, a, b, scales, scales, c, kind)


def test_all_pairs_of_codes_agree(host: Restatement) -> None:
    a = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 64, 1)
    scales = np.full((16, 4), 0x38, np.uint8)
    compare(host, a, a, scales, scales, np.zeros((16, 16), np.float32), "nvfp4")


@pytest.mark.parametrize("kind", KINDS)
def test_cancellation_agrees(host: Restatement, kind: str) -> None:
    """The accumulator cancels the dots, exactly or but for the last bits: what truncation threw away shows."""
    rng = np.random.default_rng(10)
    ordinary = list(SCALES[kind]["ordinary"])
    a, sa = random_operand(rng, 96, kind, ordinary)
    b, sb = random_operand(rng, 96, kind, ordinary)
    dots = mma_matmul(pack(a), sa, pack(b), sb, c=None, kind=kind)
    compare(host, a, b, sa, sb, -dots, kind)
    compare(host, a, b, sa, sb, np.nextafter(-dots, INF), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scalar_reference_agrees_too(host: Restatement, kind: str) -> None:
    rng = np.random.default_rng(11)
    a, sa = random_operand(rng, 400, kind, range(256))
    b, sb = random_operand(rng, 400, kind, range(256))
    # NaN scales in every second step only, or nearly all steps would answer NaN
    keep = [byte for byte in range(256) if byte != 255 and (kind == "mxfp4" or byte != 127)]
    sa[::2], sb[::2] = rng.choice(keep, sa[::2].shape), rng.choice(keep, sb[::2].shape)
    c = rng.integers(0, 1 << 32, 400, dtype=np.uint32).view(np.float32)
    c[::3] = 0
    ours = [
        int(np.float32(mma_step_reference(a[i], b[i], sa[i], sb[i], c[i], kind=kind)).view(np.uint32))
        for i in range(400)
    ]
    assert ours == host.steps(a, b, sa, sb, c, kind).tolist()


# ------------------------------------------------------------------------------ K = 32: E4M3 times E2M1


def compare_k32(host: Restatement, a, b, a_scales, b_scales, c) -> None:
    """Ours on all pairs ``(m, n)`` in one step, the restatement on the same pairs one by one."""
    ours = mma_k32(a, a_scales[:, None], pack(b), b_scales[:, None], c).view(np.uint32)
    rows, columns = (index.ravel() for index in np.indices(ours.shape))
    theirs = host.steps_k32(a[rows], b[columns], a_scales[rows], b_scales[columns], c.ravel())
    np.testing.assert_array_equal(ours.ravel(), theirs)


def random_k32(rng: np.random.Generator, rows: int, nan: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    a = rng.integers(0, 256, (rows, 32), dtype=np.uint8)
    a[(a & 0x7F) == 0x7F] = 0x38
    a[rng.random(a.shape) < nan] = 0xFF
    return a, rng.integers(0, 16, (rows, 32), dtype=np.uint8)


@pytest.mark.parametrize("scales", [(117, 138), (0, 256), (0, 70)], ids=["ordinary", "any", "tiny"])
def test_k32_steps_agree(host: Restatement, scales: tuple[int, int]) -> None:
    rng = np.random.default_rng(12)
    a, b = random_k32(rng, 128)
    sa, sb = (rng.integers(*scales, 128).astype(np.uint8) for _ in range(2))
    c = (rng.standard_normal((128, 128)) * 2.0 ** rng.integers(-30, 30, (128, 128))).astype(np.float32)
    compare_k32(host, a, b, sa, sb, c)
    c = rng.integers(0, 1 << 32, (128, 128), dtype=np.uint32).view(np.float32)
    c[0, :8] = np.array([0.0, -0.0, INF, -INF, NAN, 1e-45, 3.4e38, -3.4e38], np.float32)
    compare_k32(host, random_k32(rng, 128, nan=0.01)[0], b, sa, sb, c)


def test_k32_scale_pairs_codes_and_cancellation_agree(host: Restatement) -> None:
    rng = np.random.default_rng(13)
    a, b = random_k32(rng, 256)
    every = np.arange(256, dtype=np.uint8)
    compare_k32(host, a, b, every, every, rng.standard_normal((256, 256)).astype(np.float32))
    ones = np.full(256, 127, np.uint8)
    alike = np.repeat(every[:, None], 32, 1), np.repeat(every[:16, None], 32, 1)
    compare_k32(host, *alike, ones, ones[:16], np.zeros((256, 16), np.float32))
    dots = mma_k32(a, ones[:, None], pack(b), ones[:, None])
    compare_k32(host, a, b, ones, ones, -dots)
    compare_k32(host, a, b, ones, ones, np.nextafter(-dots, INF))


def test_the_k32_scalar_reference_agrees_too(host: Restatement) -> None:
    rng = np.random.default_rng(14)
    a, b = random_k32(rng, 300, nan=0.002)
    sa, sb = (rng.integers(0, 256, 300).astype(np.uint8) for _ in range(2))
    c = rng.integers(0, 1 << 32, 300, dtype=np.uint32).view(np.float32)
    c[::3] = 0
    ours = [int(mma_step_k32_reference(a[i], b[i], sa[i], sb[i], c[i]).view(np.uint32)) for i in range(300)]
    assert ours == host.steps_k32(a, b, sa, sb, c).tolist()
