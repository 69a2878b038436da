"""Numba kernels that quantise and dequantise; ``quant/fast.py`` says what they are given.

Quantising works on chunks of 64 blocks, in stages that each vectorise: block maxima, scale bytes, codes, packing.
Given the global scale, everything that follows the scale byte depends on that byte alone, so the factor that elements
are multiplied or divided by comes from a table of 256, computed by the NumPy recipe itself.

A block that holds a NaN or an infinity, or whose table entry is no ordinary number, is only flagged here (``odd``); the
caller gives it to the NumPy path.  So this file needs no NaN rules, and no recipe has two sets of them.

Dequantising is one look-up an element: a tensor has at most 256 * 16 different values.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numba as nb
import numpy as np

from nvfp4viz.quant.jit import inline, kernel, read_only

BLOCK = 16
CHUNK = 64
"""Blocks worked on together."""
SIZE = CHUNK * BLOCK
"""Their elements: 4 KiB as f32."""

# Numba adds two int32 as int64; the int32() around each step keeps eight lanes in a vector register instead of four.


@inline
def _e4m3_bits(s):
    """E4M3 byte of an f32: ties to even, saturating; NaN becomes 0x7F."""
    bits = np.float32(s).view(np.int32)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    odd = np.int32(np.int32(size >> np.int32(20)) & np.int32(1))
    normal = np.int32(np.int32(np.int32(size + np.int32(0x7FFFF)) + odd) >> np.int32(20))
    normal = np.int32(normal - np.int32(120 << 3))  # the exponent's bias falls from 127 to 7
    normal = normal if normal < np.int32(0x7E) else np.int32(0x7E)
    # Below 2^-6 the step is 2^-9, which is the last place of a number just above 2^14.
    small = np.int32(np.float32(np.float32(abs(s)) + np.float32(16384.0)).view(np.int32) - np.int32(0x46800000))
    byte = small if size < np.int32(0x3C800000) else normal
    byte = byte if size <= np.int32(0x7F800000) else np.int32(0x7F)
    sign = np.int32(np.int32(bits >> np.int32(24)) & np.int32(0x80))
    sign = sign if size <= np.int32(0x7F800000) else np.int32(0)
    return np.int32(byte | sign)


@inline
def _e2m1_code(y):
    """E2M1 code of a number that is not NaN: ties to even, saturating, a zero keeps its sign."""
    bits = np.float32(y).view(np.int32)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    odd = np.int32(np.int32(size >> np.int32(22)) & np.int32(1))
    # From 1 up: keep one fraction bit; the bias falls from 127 to 1.
    large = np.int32(np.int32(np.int32(size + np.int32(0x1FFFFF - (252 << 22))) + odd) >> np.int32(22))
    large = large if large < np.int32(7) else np.int32(7)
    # Below 1 the step is 0.5, which is the last place of a number just above 2^22.  From 1 up these two bits are at
    # most the code, and below 1 ``large`` is, so the greater of the two is right everywhere.
    moved = np.float32(np.int32(size).view(np.float32) + np.float32(4194304.0))
    small = np.int32(np.float32(moved).view(np.int32) & np.int32(3))
    code = large if large > small else small
    return np.uint8(np.int32(code | np.int32(np.int32(bits >> np.int32(28)) & np.int32(8))))


@inline
def _bf16(x):
    """Round a finite f32 to BF16, ties to even, and give it back as f32."""
    bits = np.float32(x).view(np.int32)
    odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    return np.int32(np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) & np.int32(-65536)).view(np.float32)


@inline
def _maxima(x, half, quarter):
    """Largest magnitude of each 16 of flat ``x``, as f32 bits: four rounds of pairwise maxima, left in ``quarter``."""
    blocks = len(x) // BLOCK
    for i in range(blocks * 8):
        left = np.int32(np.float32(x[2 * i]).view(np.int32) & np.int32(0x7FFFFFFF))
        right = np.int32(np.float32(x[2 * i + 1]).view(np.int32) & np.int32(0x7FFFFFFF))
        half[i] = left if left > right else right
    for i in range(blocks * 4):
        quarter[i] = half[2 * i] if half[2 * i] > half[2 * i + 1] else half[2 * i + 1]
    for i in range(blocks * 2):
        half[i] = quarter[2 * i] if quarter[2 * i] > quarter[2 * i + 1] else quarter[2 * i + 1]
    for i in range(blocks):
        quarter[i] = half[2 * i] if half[2 * i] > half[2 * i + 1] else half[2 * i + 1]


@inline
def _scale_bytes(maxima, divide_first, p, round_bf16, divide_then, q, zero_is, low, zero_byte, scales):
    for b in range(len(scales)):
        amax = np.int32(maxima[b]).view(np.float32)
        s = amax / p if divide_first else amax * p
        s = _bf16(s) if round_bf16 else s
        s = s / q if divide_then else s * q
        s = zero_is if s == np.float32(0) and zero_is != np.float32(0) else s
        s = low if s < low else s
        byte = _e4m3_bits(s)
        zero = np.int32(byte & np.int32(0x7F)) == np.int32(0)
        scales[b] = np.uint8(zero_byte if zero and zero_byte != np.int32(0) else byte)


@inline
def _repeat(factors, half, full):
    """Each factor 16 times, by doubling four times, into ``full``."""
    for i in range(len(factors)):
        half[2 * i] = factors[i]
        half[2 * i + 1] = factors[i]
    for i in range(len(factors) * 2):
        full[2 * i] = half[i]
        full[2 * i + 1] = half[i]
    for i in range(len(factors) * 4):
        half[2 * i] = full[i]
        half[2 * i + 1] = full[i]
    for i in range(len(factors) * 8):
        full[2 * i] = half[i]
        full[2 * i + 1] = half[i]


@inline
def _pack(pairs, packed):
    """Two codes in the bytes of a u16 become one byte, the first in the low nibble (little-endian machines only)."""
    for i in range(len(packed)):
        pair = np.int32(pairs[i])
        packed[i] = np.uint8(np.int32(pair | np.int32(pair >> np.int32(4))))


# All loops of a chunk are flat, with unit or constant stride, over slices that start at 0.  An index like first + i
# might be negative for all that LLVM knows, and Python's rule for negative indices would then keep the loop scalar; a
# short inner loop would be unrolled before it could be vectorised.
@inline
def _quantize_chunk(
    x, divide_first, p, round_bf16, divide_then, q, zero_is, low, zero_byte, table, bad, divide, zero, maxima_half,
    maxima, factors, factors_half, factors_full, codes, pairs, packed, scales, odd,
):  # fmt: skip
    """One chunk of flat f32 ``x``; returns how many of its blocks are odd."""
    _maxima(x, maxima_half, maxima)
    _scale_bytes(maxima, divide_first, p, round_bf16, divide_then, q, zero_is, low, zero_byte, scales)
    count = 0
    for b in range(len(scales)):
        byte = scales[b]
        odd[b] = maxima[b] >= 0x7F800000 or bad[byte]
        count += odd[b]
        factors[b] = table[byte]
    _repeat(factors[: len(scales)], factors_half, factors_full)
    # Adding +0 turns -0 into +0 and leaves everything else; adding -0 changes nothing.
    if divide:
        for i in range(len(x)):
            codes[i] = _e2m1_code(x[i] / factors_full[i] + zero)
    else:
        for i in range(len(x)):
            codes[i] = _e2m1_code(x[i] * factors_full[i] + zero)
    _pack(pairs, packed)
    return count


_F4, _B1 = read_only(nb.f4, 1), read_only(nb.b1, 1)
_RULE = (nb.b1, nb.f4, nb.b1, nb.b1, nb.f4, nb.f4, nb.f4, nb.i4, _F4, _B1, nb.b1, nb.f4)
_OUT = (nb.u1[::1], nb.u1[::1], nb.b1[::1])


@kernel(nb.i8(read_only(nb.f4, 1), read_only(nb.u2, 1), *_RULE, *_OUT))
def quantize_flat(
    x, narrow, divide_first, p, round_bf16, divide_then, q, zero_is, low, zero_byte, table, bad, divide, zero, packed,
    scales, odd,
):  # fmt: skip
    """Quantise flat f32 ``x`` or, if that is empty, flat BF16 bits ``narrow``; returns how many blocks are odd."""
    maxima_half, maxima = np.empty(CHUNK * 8, np.int32), np.empty(CHUNK * 4, np.int32)
    factors, halves, full = np.empty(CHUNK, np.float32), np.empty(CHUNK * 8, np.float32), np.empty(SIZE, np.float32)
    codes = np.empty(SIZE, np.uint8)
    pairs = codes.view(np.uint16)
    wide = np.empty(SIZE, np.float32)
    count = 0
    for first in range(0, len(scales), CHUNK):
        end = min(first + CHUNK, len(scales))
        chunk = wide[: (end - first) * BLOCK]
        if len(x):
            chunk[:] = x[first * BLOCK : end * BLOCK]
        else:
            bits = narrow[first * BLOCK : end * BLOCK]
            for i in range(len(chunk)):
                chunk[i] = np.int32(np.int32(bits[i]) << np.int32(16)).view(np.float32)
        count += _quantize_chunk(
            chunk, divide_first, p, round_bf16, divide_then, q, zero_is, low, zero_byte, table, bad, divide, zero,
            maxima_half, maxima, factors, halves, full, codes, pairs, packed[first * 8 : end * 8], scales[first:end],
            odd[first:end],
        )  # fmt: skip
    return count


@inline
def _e2m1_code_down(y):
    """E2M1 magnitude code of a number that is not NaN, ties toward zero."""
    size = np.int32(np.float32(y).view(np.int32) & np.int32(0x7FFFFFFF))
    # As in _e2m1_code, without the odd bit that carries a tie up.
    large = np.int32(np.int32(size + np.int32(0x1FFFFF - (252 << 22))) >> np.int32(22))
    large = large if large < np.int32(7) else np.int32(7)
    moved = np.float32(np.int32(size).view(np.float32) + np.float32(4194304.0))
    small = np.int32(np.float32(moved).view(np.int32) & np.int32(3))
    # Below 1 only the tie at 0.75 would go up to the even code.
    small = np.int32(1) if size == np.int32(0x3F400000) else small
    return large if large > small else small


@inline
def _mx_codes(x, factors, down, zero_sign, codes):
    """Codes of flat ``x``; ``zero_sign``: 0 a code keeps its number's sign, 1 no zero has one, 2 every zero has one."""
    if not down:
        for i in range(len(x)):
            codes[i] = _e2m1_code(x[i] * factors[i])
    elif zero_sign == 1:
        for i in range(len(x)):
            y = x[i] * factors[i]
            code = _e2m1_code_down(y)
            codes[i] = np.uint8(np.int32(code | np.int32(8)) if y < np.float32(0) and code > np.int32(0) else code)
    else:
        for i in range(len(x)):
            y = x[i] * factors[i]
            code = _e2m1_code_down(y)
            codes[i] = np.uint8(code if y > np.float32(0) else np.int32(code | np.int32(8)))


_I4 = read_only(nb.i4, 1)


@kernel(nb.i8(read_only(nb.f4, 1), read_only(nb.u2, 1), _I4, _I4, _F4, nb.b1, nb.i4, *_OUT))
def quantize_flat_mx(x, narrow, base, step, table, down, zero_sign, packed, scales, odd):
    """The same for MXFP4's blocks of 32.

    A block's byte is ``base[e]``, one more from significand ``step[e]`` on, for a maximum with exponent field ``e``;
    ``table`` holds the power of two that its elements are multiplied by.  A block with a NaN or an infinity is odd.
    """
    chunk_blocks = CHUNK // 2
    half, maxima = np.empty(CHUNK * 8, np.int32), np.empty(CHUNK * 4, np.int32)
    factors, halves, full = np.empty(CHUNK, np.float32), np.empty(CHUNK * 8, np.float32), np.empty(SIZE, np.float32)
    codes = np.empty(SIZE, np.uint8)
    pairs = codes.view(np.uint16)
    wide = np.empty(SIZE, np.float32)
    count = 0
    for first in range(0, len(scales), chunk_blocks):
        end = min(first + chunk_blocks, len(scales))
        chunk = wide[: (end - first) * 32]
        if len(x):
            chunk[:] = x[first * 32 : end * 32]
        else:
            bits = narrow[first * 32 : end * 32]
            for i in range(len(chunk)):
                chunk[i] = np.int32(np.int32(bits[i]) << np.int32(16)).view(np.float32)
        _maxima(chunk, half, maxima)
        for b in range(end - first):
            top = max(maxima[2 * b], maxima[2 * b + 1])
            strange = top >= 0x7F800000
            field = 0 if strange else top >> 23
            byte = np.uint8(base[field] + ((top & 0x7FFFFF) >= step[field]))
            odd[first + b] = strange
            count += strange
            scales[first + b] = byte
            factors[2 * b] = table[byte]
            factors[2 * b + 1] = table[byte]
        _repeat(factors[: 2 * (end - first)], halves, full)
        _mx_codes(chunk, full, down, zero_sign, codes)
        _pack(pairs, packed[first * 16 : end * 16])
    return count


def _look_up(packed, scales, shift, table, out):
    """``out[b, i] = table[16 * scale byte + code]``: NaN, signs and rounding are already in the table.

    ``packed (blocks,)`` holds the 16 codes of a block as one little-endian u64, the first in the lowest bits; ``out``
    is ``(blocks, 16)``; ``2**shift`` such blocks share a scale; ``table`` has 256 * 16 values.
    """
    for b in range(len(packed)):
        row = np.uint64(np.uint64(scales[b >> shift]) << np.uint64(4))
        word = packed[b]
        for j in range(BLOCK):
            out[b, j] = table[row | ((word >> np.uint64(4 * j)) & np.uint64(15))]


_PACKED = (read_only(nb.u8, 1), read_only(nb.u1, 1), nb.i8)
look_up_f32 = kernel(nb.void(*_PACKED, read_only(nb.f4, 1), nb.f4[:, ::1]))(_look_up)
look_up_bf16 = kernel(nb.void(*_PACKED, read_only(nb.u2, 1), nb.u2[:, ::1]))(_look_up)
