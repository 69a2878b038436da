"""The K = 32 tensor-core product of whole matrices (FP8 times FP4 or FP8), in int64 arrays or a Numba kernel.

``quant/tensor_core_k32_step.py`` states the rules; a test forces the same bits from all three.  As in the K = 64
product, a GEMM applies the step to slices of K in increasing k; K is a multiple of 32, the block of the scales.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import unpack_nibbles
from nvfp4viz.formats.paths import ArrayPath, by_numpy
from nvfp4viz.quant.tensor_core import I64, accumulate_int64, scale_tables
from nvfp4viz.quant.tensor_core_k32_step import (
    FRACTION_BITS_K32,
    STEP_K32,
    Element,
    known_element,
    split_element,
)
from nvfp4viz.quant.tensor_core_step import CANONICAL_NAN, F32, U8
from nvfp4viz.quant.threads import run_parts

I16 = npt.NDArray[np.int16]
UNIT_BITS = 6
"""Significands are counted in eighths, so products in 64ths."""
THREADING_PAYS = 1 << 17
"""Multiply-adds below which a second thread costs more than it saves."""
_AT_ONCE = 1 << 18
"""Outputs that the array path works on together: its 33 terms are int64."""


@cache
def element_tables(element: Element) -> tuple[I16, I16, U8]:
    """For all 256 bytes: eight times the signed significand, the exponent, and 0 (finite), 1 (infinite) or 2 (NaN).

    An infinity's significand is its sign.  E2M1 codes are 0 to 15; the rest of its table repeats them.

    >>> significands, exponents, special = element_tables("e4m3")
    >>> int(significands[0xFE]), int(exponents[0xFE]), [hex(byte) for byte in special.nonzero()[0]]
    (-14, 8, ['0x7f', '0xff'])
    """
    significands, exponents, special = np.zeros(256, np.int16), np.zeros(256, np.int16), np.zeros(256, np.uint8)
    for byte in range(256):
        part = split_element(byte & 15 if element == "e2m1" else byte, element)
        if isinstance(part, float):
            special[byte] = 2 if np.isnan(part) else 1
            significands[byte] = 0 if np.isnan(part) else np.sign(part)
        else:
            significands[byte], exponents[byte] = int(part[0] * 8), part[1]
    for table in (significands, exponents, special):
        table.flags.writeable = False
    return significands, exponents, special


def _codes(operand: U8, scales: U8, element: Element, side: str) -> U8:
    """One byte an element, ``(rows, K)``; refuses what does not fit its scales."""
    known_element(element)
    if operand.dtype != np.uint8 or scales.dtype != np.uint8:
        raise FormatError("mma.dtype", side=side, packed=operand.dtype, scales=scales.dtype)
    codes = unpack_nibbles(operand) if element == "e2m1" else operand
    k = codes.shape[-1]
    if codes.ndim != 2 or k % STEP_K32 or scales.shape != (len(codes), k // STEP_K32):
        raise FormatError(
            "mma.scales", side=side, packed=operand.shape, scales=scales.shape, block=STEP_K32, kind="mxf8f6f4"
        )
    return codes


def mma_k32(
    a: U8,
    a_scales: U8,
    b: U8,
    b_scales: U8,
    c: F32 | None = None,
    elements: tuple[Element, Element] = ("e4m3", "e2m1"),
    path: ArrayPath = "auto",
) -> F32:
    """``c + A @ B.T`` as ``kind::mxf8f6f4`` computes it, in 32-element steps of increasing k.

    Parameters
    ----------
    a : (M, K) uint8
        FP8 bytes; an ``"e2m1"`` side is packed, ``(M, K//2)``, the even element in the low nibble.
    a_scales : (M, K//32) uint8
        UE8M0 bytes.
    b, b_scales : (N, K//2) or (N, K), (N, K//32) uint8
        The other operand, K-major like the first.
    c : (M, N) float32, optional
        The first accumulator; zero when omitted.
    elements
        Formats of the sides: ``"e4m3"``, ``"e5m2"``, ``"e2m1"``.
    path
        ``"numpy"`` (int64 arrays), ``"numba"`` (the kernel), or ``"auto"``, which takes the kernel.  Equal bits.

    Returns
    -------
    (M, N) float32

    Raises
    ------
    FormatError
        ``mma.element``, ``mma.dtype``, ``mma.scales``, ``mma.shape``, ``mma.accumulator`` or ``path.unknown``.

    >>> ones, one = np.full((1, 32), 0x38, np.uint8), np.full((1, 1), 127, np.uint8)
    >>> float(mma_k32(ones, one, np.full((1, 16), 0x22, np.uint8), one, path="numpy")[0, 0])
    32.0
    """
    left, right = _codes(a, a_scales, elements[0], "a"), _codes(b, b_scales, elements[1], "b")
    if left.shape[1] != right.shape[1]:
        raise FormatError("mma.shape", a=a.shape, b=b.shape)
    if c is not None and (c.shape != (len(left), len(right)) or c.dtype != np.float32):
        raise FormatError("mma.accumulator", shape=c.shape, dtype=c.dtype, m=len(left), n=len(right))
    start = np.zeros((len(left), len(right)), np.float32) if c is None else np.ascontiguousarray(c)
    if not by_numpy(path):
        return _numba(left, a_scales, right, b_scales, start, elements)
    rows = max(1, _AT_ONCE // max(1, len(right)))
    parts = [
        _numpy(left[m : m + rows], a_scales[m : m + rows], right, b_scales, start[m : m + rows], elements)
        for m in range(0, len(left), rows)
    ]
    return np.concatenate(parts) if parts else start


def _numba(a: U8, a_scales: U8, b: U8, b_scales: U8, c: F32, elements: tuple[Element, Element]) -> F32:
    from nvfp4viz.quant.tensor_core_k32_kernels import product_k32

    out = np.empty(c.shape, np.float32)
    sides = []
    _, scale_exponents, scale_nan = scale_tables("mxfp4")
    for codes, scales, element in ((a, a_scales, elements[0]), (b, b_scales, elements[1])):
        significands, exponents, kinds = element_tables(element)
        special = kinds[codes]
        sides += [significands[codes].astype(np.int32), exponents[codes].astype(np.int32), special]
        sides += [special.reshape(*scales.shape, STEP_K32).max(axis=-1)]
        sides += [scale_exponents[scales].astype(np.int32), scale_nan[scales].astype(np.uint8)]

    def part(index: int, count: int) -> None:
        product_k32(*sides, c, True, out, index, count)

    run_parts(part, a.shape[0] * b.size >= THREADING_PAYS)
    return out


def _numpy(a: U8, a_scales: U8, b: U8, b_scales: U8, start: F32, elements: tuple[Element, Element]) -> F32:
    _, scale_exponents, scale_nan = scale_tables("mxfp4")
    a_tables, b_tables = element_tables(elements[0]), element_tables(elements[1])
    sa, ea, xa = a_tables[0][a], a_tables[1][a], a_tables[2][a]
    sb, eb, xb = b_tables[0][b], b_tables[1][b], b_tables[2][b]
    acc = start.copy()
    bad_a, bad_b = (np.any(scale_nan[scales], axis=1, keepdims=True) for scales in (a_scales, b_scales))
    nan = np.isnan(start) | bad_a | bad_b.T
    for step in range(a_scales.shape[1]):
        ks = range(step * STEP_K32, (step + 1) * STEP_K32)
        scale = scale_exponents[a_scales[:, step], None] + scale_exponents[b_scales[:, step]]
        terms: list[I64] = [sa[:, k, None].astype(np.int64) * sb[:, k] for k in ks]
        exponents: list[I64] = [ea[:, k, None].astype(np.int64) + eb[:, k] + scale for k in ks]
        infinite = _infinite_sum(sa, xa, sb, xb, ks)
        before = acc
        acc = accumulate_int64(terms, exponents, acc, unit_bits=UNIT_BITS, fraction_bits=FRACTION_BITS_K32)
        if infinite is not None:
            with np.errstate(invalid="ignore"):
                both = infinite + np.where(np.isfinite(before), np.float32(0), before)
            acc = np.where(infinite == 0, acc, both)
            nan |= np.isnan(acc)
    acc[nan] = np.uint32(CANONICAL_NAN).view(np.float32)
    return acc


def _infinite_sum(sa: I16, xa: U8, sb: I16, xb: U8, ks: range) -> F32 | None:
    """Sum of the products with an element that is not finite, 0 where there is none; None if there is none at all."""
    if not (xa[:, ks].any() or xb[:, ks].any()):
        return None
    sides = []
    with np.errstate(invalid="ignore"):
        for significand, special in ((sa, xa), (sb, xb)):
            values, kind = significand[:, ks].astype(np.float32), special[:, ks]
            sides.append(np.where(kind == 0, values, np.where(kind == 1, values * np.inf, np.nan)))
        products = sides[0][:, None, :] * sides[1][None]
        finite = (xa[:, None, ks] == 0) & (xb[None, :, ks] == 0)
        total: F32 = np.where(finite, np.float32(0), products).sum(axis=-1, dtype=np.float32)
    return total
