"""The input tensors of the golden vectors, regenerated from seeds to the same bits everywhere.

NumPy promises the raw 64-bit stream of ``PCG64`` and nothing about ``normal()``, so everything here is built from
raw integers, exact integer arithmetic and single IEEE operations (``+ - * / sqrt``, correctly rounded on every
machine).  BF16 is kept as its ``uint16`` bits, so that this file needs NumPy alone and runs inside every peer's
environment.  ``manifest.json`` records the SHA-256 of each input; a test regenerates them all and compares.

Names and intent of the sets follow the list in ``README.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

ROWS, COLUMNS = 32, 512
BLOCK = 16
DTYPES = ("f32", "bf16")


def raw64(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """``n`` raw words of PCG64: the only source of randomness in this file."""
    return np.random.PCG64(seed).random_raw(n)


def uniform(seed: int, n: int) -> F64:
    """``n`` odd multiples of 2^-53 in (0, 1): never 0, never 1, exact in f64."""
    return ((raw64(seed, n) >> np.uint64(12)).astype(np.float64) * 2 + 1) * 2.0**-53


def normal(seed: int, n: int) -> F64:
    """Sum of twelve 32-bit uniforms minus six (Irwin-Hall): near-normal, computed in integers, so exact."""
    words = raw64(seed, 6 * n).reshape(n, 6)
    low = (words & np.uint64(0xFFFFFFFF)).astype(np.int64)
    high = (words >> np.uint64(32)).astype(np.int64)
    return (low.sum(axis=1) + high.sum(axis=1) - (6 << 32)).astype(np.float64) * 2.0**-32


def to_f32(x: F64) -> F32:
    return x.astype(np.float32)


def bf16_bits(x: F32) -> U16:
    """Round f32 to BF16 (ties to even); NaN keeps its sign and becomes quiet."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def bf16_values(bits: U16) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# ---------------------------------------------------------------------------------------------------- the sets


def make_normal() -> F32:
    return to_f32(normal(1, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def make_weightlike() -> F32:
    return to_f32(0.02 * normal(2, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def make_student2() -> F32:
    """Student's t with two degrees of freedom by its closed quantile ``(2u-1) / sqrt(2u(1-u))``: heavy tails."""
    u = uniform(3, ROWS * COLUMNS)
    return to_f32((2 * u - 1) / np.sqrt(2 * u * (1 - u))).reshape(ROWS, COLUMNS)


def make_mild() -> F32:
    """Blocks scaled by 2^0 … 2^-14: the small ones need subnormal E4M3 scales, or fall below them."""
    x = normal(4, ROWS * COLUMNS).reshape(-1, BLOCK)
    power = np.ldexp(1.0, -(np.arange(len(x)) % 15))
    return to_f32(x * power[:, None]).reshape(ROWS, COLUMNS)


def make_blockmax() -> F32:
    """Every BF16 value in [2^-12, 2^12) is the maximum of one block; its 15 companions are smaller, random sign."""
    maxima = bf16_values(np.arange((127 - 12) << 7, (127 + 12) << 7, dtype=np.uint16))
    u = 2 * uniform(5, len(maxima) * BLOCK).reshape(-1, BLOCK) - 1
    x = to_f32(u * maxima[:, None].astype(np.float64))
    place = (raw64(6, len(maxima)) % np.uint64(BLOCK)).astype(np.int64)
    sign = np.where(raw64(7, len(maxima)) & np.uint64(1), np.float32(-1), np.float32(1))
    x[np.arange(len(x)), place] = sign * maxima
    return x.reshape(-1, COLUMNS)


def make_allbf16() -> F32:
    """All 65,536 BF16 patterns in order, NaN and infinities replaced by 0."""
    values = bf16_values(np.arange(65536, dtype=np.uint16))
    return np.where(np.isfinite(values), values, np.float32(0)).reshape(128, COLUMNS)


def make_zeroblocks() -> F32:
    """Three quarters of the 32-blocks are zero: half of those all +0, half +0 and -0 mixed."""
    x = to_f32(normal(8, ROWS * COLUMNS)).reshape(-1, 32).copy()
    kind = np.arange(len(x)) % 4
    x[kind == 0] = 0.0
    x[kind == 2] = 0.0
    x[kind == 1] = np.copysign(np.float32(0), x[kind == 1])
    return x.reshape(ROWS, COLUMNS)


def make_tiny() -> F32:
    return to_f32(1e-30 * normal(9, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def make_huge() -> F32:
    return to_f32(1e30 * normal(10, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def make_ties() -> F32:
    """E2M1 midpoints, and their BF16 neighbours, in blocks whose scale is a power of two.

    The tensor's maximum is 2688 = 6 x 448, so the global scale is 1; each block holds 6 x 2^k, so its scale is 2^k
    exactly and every midpoint lands on a tie.
    """
    middle = bf16_bits(np.array(MIDPOINTS, np.float32))
    near = np.stack([bf16_values(middle), bf16_values(middle - 1), bf16_values(middle + 1)]).ravel()
    pool = np.concatenate([near, -near, np.array([0.0, -0.0, 6.0, -6.0], np.float32)])
    pick = (raw64(11, 8 * COLUMNS) % np.uint64(len(pool))).astype(np.int64)
    x = pool[pick].reshape(-1, BLOCK).copy()
    x[:, 0] = 6.0
    power = (np.arange(len(x)) // 2 % 15 - 6).astype(np.int32)  # 2^-6 … 2^8, the same for both halves of a 32-block
    x = np.ldexp(x, power[:, None]).astype(np.float32)
    x[0] = bf16_values(np.full(BLOCK, bf16_bits(np.float32(2688.0)[None])[0], np.uint16))
    return x.reshape(8, COLUMNS)


def make_sixes() -> F32:
    """32-blocks whose maximum is 6 x 2^k or a few f32 ulps from it: where ``ceil(log2(amax / 6))`` changes its value.

    A logarithm rounded to f32 returns exactly k a little above 2^k, so packages that take one round some blocks down.
    """
    powers = [*range(-8, 9), *list(range(-126, 124, 8))[:31]]
    ulps = np.array([-2, -1, 0, 1, 2, 4, 9, 20, 40, 63, 70])
    exact = np.ldexp(np.float32(6), np.array(powers, np.int32)).astype(np.float32).view(np.uint32).astype(np.int64)
    maxima = (exact[:, None] + ulps).ravel().astype(np.uint32).view(np.float32)
    u = 2 * uniform(13, len(maxima) * 32).reshape(-1, 32) - 1
    x = to_f32(u * maxima[:, None].astype(np.float64))
    x[:, 7] = maxima
    return x.reshape(-1, COLUMNS)


def make_nan() -> F32:
    """``normal`` with quiet NaNs: one lone +NaN, one lone -NaN, one whole block of NaN."""
    x = make_normal()[:2].copy()
    x[0, 3] = np.nan
    x.view(np.uint32)[0, 37] = 0xFFC00000
    x[1, 64:80] = np.nan
    return x


def make_inf() -> F32:
    """``normal`` with one +Inf and one -Inf, in different blocks."""
    x = make_normal()[:2].copy()
    x[0, 3] = np.inf
    x[1, 70] = -np.inf
    return x


def make_allzero() -> F32:
    return np.zeros((2, 128), np.float32)


MAKERS: dict[str, Callable[[], F32]] = {
    "normal": make_normal,
    "weightlike": make_weightlike,
    "student2": make_student2,
    "mild": make_mild,
    "blockmax": make_blockmax,
    "allbf16": make_allbf16,
    "zeroblocks": make_zeroblocks,
    "tiny1e-30": make_tiny,
    "huge1e30": make_huge,
    "ties": make_ties,
    "sixes": make_sixes,
    "nan": make_nan,
    "inf": make_inf,
    "allzero": make_allzero,
}
NAMES = tuple(MAKERS)


# Sets quantised once more with a global scale that is not the tensor's own, as activations are: three decode scales.
GIVEN_SETS = ("normal", "mild", "student2")
GIVEN_SCALES = np.array([0x3AB0C3A7, 0x3F800000, 0x3C1E55B3], np.uint32).view(np.float32)


def make_fresh(seed: int) -> F32:
    """Data that no file records: Student-t blocks at random powers of two, a tenth of the blocks zero."""
    u = uniform(seed, ROWS * COLUMNS)
    x = ((2 * u - 1) / np.sqrt(2 * u * (1 - u))).reshape(-1, BLOCK)
    word = raw64(seed + 1, len(x))
    power = (word % np.uint64(25)).astype(np.int32) - 12
    x = np.where((word >> np.uint64(32)) % np.uint64(10) == 0, 0.0, np.ldexp(x, power[:, None]).T).T
    return to_f32(x).reshape(ROWS, COLUMNS)


def make(name: str, dtype: str) -> F32 | U16:
    """The set ``name`` as f32, or as BF16 bits (``uint16``) rounded from the same f32 values.

    ``fresh:<seed>`` is a set of its own for every seed: see ``make_fresh``.
    """
    x = make_fresh(int(name[6:])) if name.startswith("fresh:") else MAKERS[name]()
    return bf16_bits(x) if dtype == "bf16" else x


def cast_inputs() -> F32:
    """Inputs for the element casts: all BF16, the midpoints with f32 neighbours, and random f32 patterns.

    Random patterns are spread over the exponents in which E2M1, E4M3 and E8M0 round, plus the whole f32 range.
    """
    every_bf16 = bf16_values(np.arange(65536, dtype=np.uint16))
    e4m3 = (np.arange(0, 480 * 1024, 1, dtype=np.float64) / 1024)[:: 64 * 3]
    ties = np.concatenate([np.array(MIDPOINTS), [464.0, 448.0, 480.0, 2.0**-10, 3 * 2.0**-10, 1.0625], e4m3])
    exact = to_f32(ties)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    words = raw64(12, 12288)
    anywhere = (words[:4096] & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    rounding = ((words[4096:] >> np.uint64(8)) & np.uint64(0x7FFFFF)).astype(np.uint32)
    exponent = (words[4096:] % np.uint64(24)).astype(np.uint32) + np.uint32(115)
    sign = ((words[4096:] >> np.uint64(40)) & np.uint64(1)).astype(np.uint32) << np.uint32(31)
    inside = (sign | (exponent << np.uint32(23)) | rounding).view(np.float32)
    return np.concatenate([every_bf16, near, -near, anywhere, inside])


# Decode scales for the dequantisation tables.  Full significands on purpose: with trailing zero bits both orders of
# multiplication give the same product, and the test would prove nothing.
DEQUANT_SCALES = np.array([0x3A8B1F35, 0x38027D6B, 0x3F7B2A4D, 0x42F6E979], np.uint32).view(np.float32)


def table_codes_and_scales(block: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """One block per scale byte 0…255, each holding all 16 codes: packed ``(256, block//2)`` and scales ``(256, 1)``."""
    pair = np.arange(16, dtype=np.uint8)
    codes = np.tile(pair, block // 16)
    packed = (codes[0::2] | (codes[1::2] << 4)).astype(np.uint8)
    return np.tile(packed, (256, 1)), np.arange(256, dtype=np.uint8)[:, None]


def sha256(array: npt.NDArray[np.generic]) -> str:
    """SHA-256 of the bytes, little-endian, C order."""
    little = np.ascontiguousarray(array)
    return hashlib.sha256(little.astype(little.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()
