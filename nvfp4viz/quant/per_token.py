"""``nvfp4_per_token``: one activation scale a row, taken from the row itself; and what a row of zeros becomes.

``p = rowAmax · (1/2688)`` is the row's decode scale and ``g ≈ 1/p`` its encode scale; the blocks then follow the same
routine as elsewhere.  Because every row brings its own scale, no calibration is needed.  Implementations differ where
the row, or a block in it, is zero or nearly so (source: `numerics-vllm.md` section 8; derived there, not run):

====================  =================================  =============================================================
version               encode scale                       factor is 0 where
====================  =================================  =============================================================
``flashinfer-fb28d``  ``rcp.approx(p)``                  the block's **maximum** is 0 (2026-08-22)
``flashinfer-0.7.4``  ``rcp.approx(p)``                  the **rounded** block scale is 0, as in vLLM's own kernel
``flashinfer-ieee``   ``min(1 / p, FLT_MAX)``            the same; ``FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1``
``megamoe``           ``p = max(rowAmax, 1e-12)/2688``   never: block scales are at least 2^-9
====================  =================================  =============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import (
    BLOCK,
    decode_e2m1,
    decode_e4m3,
    e2m1_code_scalar,
    e4m3_byte_scalar,
    encode_e2m1,
    encode_e4m3,
)
from nvfp4viz.formats.cards import E2M1_VALUES
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.quant.nvfp4 import block_max
from nvfp4viz.quant.rcp import rcp_approx_ftz, rcp_approx_ftz_scalar
from nvfp4viz.quant.reference import amax_scalar, block_max_scalar, clamp, scale_value

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
VERSIONS = ("flashinfer-fb28d", "flashinfer-0.7.4", "flashinfer-ieee", "megamoe")
BASE = np.float32(1.0 / 2688.0)
"""The base scale: a row's decode scale is its maximum times this."""
SIX = np.float32(6)
TINY = 2.0**-20
"""Below 2^-10 · 6/2688 of its row's maximum a block's scale rounds to zero."""
_FLT_MAX = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows quantised with a scale each; R rows of K values.

    Attributes
    ----------
    version
    decode, encode : (R,) float32
        ``p`` and ``g``.
    scales : (R, K//16) uint8
    codes : (R, K) uint8
    decoded : (R, K) float32
        ``code · block scale · p``: what a product with these rows sees.
    """

    version: str
    decode: F32
    encode: F32
    scales: U8 = field(repr=False)
    codes: U8 = field(repr=False)
    decoded: F32 = field(repr=False)

    @property
    def nan_rows(self) -> int:
        """Rows that hold a NaN."""
        return int(np.isnan(self.decoded).any(axis=1).sum())


def quantize_tokens(rows: Array, version: str, path: NumpyPath = "numpy") -> TokenRows:
    """Quantise ``rows (R, K)``, BF16 or float32, as one version of the kernels does.

    ``path="reference"`` goes number by number; equal bits.

    Raises
    ------
    FormatError
        ``online.version``, ``quantize.block``.

    >>> zero = np.zeros((1, 16), np.float32)
    >>> [quantize_tokens(zero, version).scales.item() for version in VERSIONS]
    [127, 127, 0, 1]
    """
    if version not in VERSIONS:
        raise FormatError("online.version", version=version, known=", ".join(VERSIONS))
    x = np.asarray(rows).astype(np.float32)
    if x.shape[-1] % BLOCK:
        raise FormatError("quantize.block", k=x.shape[-1], block=BLOCK, recipe=version)
    if by_reference(path):
        return _by_reference(x, version)
    blocks = x.reshape(len(x), x.shape[-1] // BLOCK, BLOCK)
    tops = np.abs(x).max(axis=1, initial=0.0)
    with np.errstate(all="ignore"):
        if version == "megamoe":
            return _megamoe(blocks, tops)
        decode = tops * BASE
        encode = rcp_approx_ftz(decode)
        if version == "flashinfer-ieee":
            encode = np.minimum(np.float32(1) / decode, _FLT_MAX)
        scales, codes = _blocks(blocks, encode[:, None], version)
        return _rows(version, decode, encode, scales, codes)


def token_cases(k: int = 32, tiny: float = TINY) -> F32:
    """Three rows that tell the versions apart: ordinary; with a block of values near ``tiny``; all zero.

    (3, k) float32, ``k`` two blocks or more.
    """
    wave = np.cos(np.arange(k)).astype(np.float32)
    rows = np.stack([wave, wave, np.zeros(k, np.float32)])
    rows[1, -BLOCK:] *= np.float32(tiny)
    return rows


def _blocks(blocks: F32, g: F32, version: str) -> tuple[U8, U8]:
    top = block_max(blocks, nan_wins=False)
    ieee = version == "flashinfer-ieee"
    scales = encode_e4m3(g * (top / SIX if ieee else top * rcp_approx_ftz(SIX)))
    s = decode_e4m3(scales)
    factor = g / s if ieee else rcp_approx_ftz(s * rcp_approx_ftz(g))
    tested = top if version == "flashinfer-fb28d" else s
    factor = np.where(tested == 0, np.float32(0), factor)
    return scales, encode_e2m1(blocks * factor[..., None])


def _megamoe(blocks: F32, tops: F32) -> TokenRows:
    decode = np.maximum(tops, np.float32(1e-12)) * BASE
    v = blocks / decode[:, None, None]
    asked = block_max(v, nan_wins=False) * np.float32(1 / 6)
    scales = encode_e4m3(np.clip(asked, np.float32(2.0**-9), np.float32(448)))
    codes = encode_e2m1(v / decode_e4m3(scales)[..., None])
    codes = np.where(codes == 8, np.uint8(0), codes)  # it clears the sign of a zero
    return _rows("megamoe", decode, np.float32(1) / decode, scales, codes)


def _rows(version: str, decode: F32, encode: F32, scales: U8, codes: U8) -> TokenRows:
    values = decode_e2m1(codes) * decode_e4m3(scales)[..., None] * decode[:, None, None]
    flat = (len(codes), codes.shape[1] * BLOCK)
    return TokenRows(version, decode, encode, scales, codes.reshape(flat), values.reshape(flat))


# ------------------------------------------------------------------ one number at a time


def _by_reference(x: F32, version: str) -> TokenRows:
    decode, encode = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    scales, codes = np.zeros((len(x), x.shape[1] // BLOCK), np.uint8), np.zeros(x.shape, np.uint8)
    decoded = np.zeros(x.shape, np.float32)
    one_block = _megamoe_block if version == "megamoe" else _block
    with np.errstate(all="ignore"):
        for r, row in enumerate(x):
            decode[r], encode[r] = _token_scales(row, version)
            for b in range(scales.shape[1]):
                at = slice(b * BLOCK, (b + 1) * BLOCK)
                scales[r, b], codes[r, at] = one_block(list(row[at]), decode[r], encode[r], version)
                s = scale_value(int(scales[r, b]))
                decoded[r, at] = [np.float32(E2M1_VALUES[code]) * s * decode[r] for code in codes[r, at]]
    return TokenRows(version, decode, encode, scales, codes, decoded)


def _token_scales(row: F32, version: str) -> tuple[np.float32, np.float32]:
    """``p`` and ``g`` of a row; a NaN in it makes both NaN."""
    top = amax_scalar(row) if row.size else np.float32(0)
    if version == "megamoe":
        p = clamp(top, 1e-12, np.inf) * BASE
        return p, np.float32(1) / p
    p = top * BASE
    if version == "flashinfer-ieee":
        return p, clamp(np.float32(1) / p, 0.0, float(_FLT_MAX))
    return p, rcp_approx_ftz_scalar(p)


def _block(x: Sequence[np.float32], p: np.float32, g: np.float32, version: str) -> tuple[int, list[int]]:
    top = block_max_scalar(x, nan_wins=False)
    ieee = version == "flashinfer-ieee"
    rcp = rcp_approx_ftz_scalar
    byte = e4m3_byte_scalar(float(g * (top / SIX if ieee else top * rcp(SIX))))
    s = scale_value(byte)
    factor = g / s if ieee else rcp(s * rcp(g))
    if (top if version == "flashinfer-fb28d" else s) == 0:
        factor = np.float32(0)
    return byte, [e2m1_code_scalar(float(v * factor)) for v in x]


def _megamoe_block(x: Sequence[np.float32], p: np.float32, g: np.float32, version: str) -> tuple[int, list[int]]:
    v = [one / p for one in x]
    asked = block_max_scalar(v, nan_wins=False) * np.float32(1 / 6)
    byte = e4m3_byte_scalar(float(clamp(asked, 2.0**-9, 448.0)))
    codes = [e2m1_code_scalar(float(one / scale_value(byte))) for one in v]
    return byte, [0 if code == 8 else code for code in codes]
