"""MXFP4 in NumPy: five scale rules over blocks of 32.

===================  ==============================================================  =============================
recipe               exponent of the scale, for a block with maximum ``m``           elements
===================  ==============================================================  =============================
``ocp-floor``        floor(log2 m) − 2                                               nearest, ties to even
``vllm-even``        the same, one more where m's significand is at least 1.75       nearest, ties to even
``flashinfer-ceil``  ceil(log2(m · rcp(6)))                                          nearest, ties to even
``deepgemm-ceil``    ceil(log2(max(m, 1e-4) / 6)), byte at least 1                   ties toward zero, no −0
``modelopt-mxfp4``   ceil(log2(m / 6)), the logarithm rounded to float32             ties toward zero, every 0 is −0
===================  ==============================================================  =============================

What else differs, and is easily missed:

* Byte 0 means 2^-127 for ``ocp-floor`` and ``modelopt-mxfp4``; the kernels behind ``vllm-even`` and ``flashinfer-ceil``
  multiply such a block by 0 instead, so its codes are signed zeros.
* ModelOpt takes the logarithm in float32.  Far from 1 it cannot tell 2^k from a number a few ulps above it, so up to 22
  such numbers get the scale 2^k where the exact ceiling is k + 1.  (Checked against torch 2.13 on the 600 neighbours of
  every power of two; BF16 maxima are too coarse to meet it.)
* NaN: ``ocp-floor`` writes byte 255, ``flashinfer-ceil`` 255 if the whole block is NaN, ``vllm-even`` 0 in that case,
  ``modelopt-mxfp4`` 0, ``deepgemm-ceil`` 254.

Sources: OCP Microscaling Formats (MX) v1.0 section 6.3 with torchao's ``FLOOR`` (``ocp-floor``); vLLM's UE8M0 template
(``vllm-even``); FlashInfer 0.7.4 ``cvt_warp_fp16_to_fp4`` (``flashinfer-ceil``); DeepGEMM ``per_token_cast_to_fp4``;
ModelOpt 0.47 ``MXFP4QTensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import encode_e2m1, encode_ue8m0
from nvfp4viz.quant.nvfp4 import block_max, torchao_nan_code
from nvfp4viz.quant.rcp import rcp_approx_ftz

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Blocks = Callable[[F32], tuple[U8, U8]]

SIX = np.float32(6)
DEEPGEMM_FLOOR = np.float32(1e-4)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Half way between neighbouring E2M1 magnitudes."""


def quantize_blocks(recipe: str, x: F32) -> tuple[U8, U8]:
    """Scale bytes (R, B) and codes (R, B, 32) of blocks ``x (R, B, 32)`` float32."""
    with np.errstate(all="ignore"):
        return MXFP4_BLOCKS[recipe](x)


def _ties_toward_zero(y: F32) -> U8:
    """Magnitude codes 0 to 7: the number of midpoints strictly below ``|y|``; none for NaN."""
    magnitude = np.abs(y)
    code = np.zeros(y.shape, np.uint8)
    for midpoint in MIDPOINTS:
        code += magnitude > np.float32(midpoint)
    return code


def _power(exponent: npt.NDArray[np.int32]) -> F32:
    """2^exponent as float32, for exponents from −149 to 127."""
    return np.ldexp(np.float64(1), exponent).astype(np.float32)


def factor_table(recipe: str) -> F32:
    """(256,) float32: what the elements of a block with each scale byte are multiplied by, a power of two.

    Where a recipe divides by the scale this is the reciprocal, which is exact.  Only for blocks of finite numbers.
    """
    byte = np.arange(256, dtype=np.int32)
    table = _power(127 - byte)
    if recipe in ("vllm-even", "flashinfer-ceil"):
        table[0] = 0
    if recipe == "flashinfer-ceil":
        table[254:] = 0
    return table


@cache
def scale_steps(recipe: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Where the scale byte rises: ``base (255,)`` and ``step (255,)`` for each exponent field of a finite maximum.

    The byte is ``base``, one more from significand field ``step`` on (2^23: never).  It grows with the maximum and
    twice the maximum has the next byte, so there is one step in each binade; we ask the recipe itself where, by
    bisection over the 23 significand bits.
    """

    def byte_of(significand: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        blocks = np.zeros((1, 255, 32), np.float32)
        blocks[0, :, 0] = (field | significand).view(np.float32)
        byte: npt.NDArray[np.int32] = quantize_blocks(recipe, blocks)[0][0].astype(np.int32)
        return byte

    field = np.arange(255, dtype=np.int32) << np.int32(23)
    base = byte_of(np.zeros(255, np.int32))
    below, above = np.zeros(255, np.int32), np.full(255, 1 << 23, np.int32)  # the byte is base at below, not at above
    while (above - below > 1).any():
        middle = (below + above) // 2
        raised = byte_of(middle) > base
        below, above = np.where(raised, below, middle), np.where(raised, middle, above)
    return base, above


def blocks_ocp_floor(x: F32) -> tuple[U8, U8]:
    """``ocp-floor``.  A block with a NaN gets byte 255, and codes as torchao leaves them: it divides by infinity."""
    top = block_max(x, nan_wins=True)
    field = (np.ascontiguousarray(top).view(np.uint32) >> np.uint32(23)).astype(np.int32)  # 255 for infinity
    byte = np.where(np.isnan(top), 255, np.maximum(field - 2, 0))
    scale = np.where(byte == 255, np.float32(np.inf), _power(np.minimum(byte, 254) - 127))
    codes = encode_e2m1(x / scale[..., None])
    nan = np.isnan(x)
    if nan.any():
        quiet = np.ascontiguousarray(x).view(np.uint32)[nan] | np.uint32(0x400000)
        codes[nan] = [torchao_nan_code(int(bits)) for bits in quiet]
        codes[np.isinf(x) & (byte == 255)[..., None]] = torchao_nan_code(0xFFC00000)  # ∞/∞ on x86
    return byte.astype(np.uint8), codes


def blocks_vllm_even(x: F32) -> tuple[U8, U8]:
    """``vllm-even``: 2^21 is half a step of two mantissa bits, so adding it carries significands from 1.75 on."""
    bits = np.ascontiguousarray(block_max(x, nan_wins=False)).view(np.uint32)
    # A NaN maximum is 0x7FFFFFFF on the GPU, where the sum carries into the sign bit and leaves exponent 0.
    bits = np.where(bits > np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), bits)
    raised = (((bits + np.uint32(1 << 21)) >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int32)
    byte = np.where(raised > 2, raised - 2, 0)
    o = factor_table("vllm-even")[byte]
    return byte.astype(np.uint8), encode_e2m1(x * o[..., None])


def blocks_flashinfer_ceil(x: F32) -> tuple[U8, U8]:
    """``flashinfer-ceil``: the inverse scale is built from exponent bits, so bytes 0, 254 and 255 have none: 0."""
    byte = encode_ue8m0(block_max(x, nan_wins=False) * rcp_approx_ftz(SIX))
    o = factor_table("flashinfer-ceil")[byte]
    return byte, encode_e2m1(x * o[..., None])


def blocks_deepgemm_ceil(x: F32) -> tuple[U8, U8]:
    """``deepgemm-ceil``: a NaN block gets 254, the top of the clamp; a NaN lies above every midpoint, code 7."""
    top = block_max(x, nan_wins=True)
    top = np.where(np.isnan(top), top, np.maximum(top, DEEPGEMM_FLOOR))
    byte = np.clip(encode_ue8m0(top / SIX), 1, 254).astype(np.uint8)
    y = x * factor_table("deepgemm-ceil")[byte][..., None]
    codes = _ties_toward_zero(y)
    codes = np.where((y < 0) & (codes > 0), codes | np.uint8(8), codes)
    return byte, np.where(np.isnan(y), np.uint8(7), codes)


def blocks_modelopt_mxfp4(x: F32) -> tuple[U8, U8]:
    """``modelopt-mxfp4``: NaN and infinite blocks get byte 0 (x86's conversion) and code 8 throughout."""
    top = block_max(x, nan_wins=True)
    log2 = np.log2((top / SIX).astype(np.float64)).astype(np.float32)
    exponent = np.ceil(np.where(np.isnan(log2), log2, np.maximum(log2, np.float32(-127))))
    finite = np.isfinite(exponent)
    whole = np.where(finite, exponent, 0).astype(np.int32)
    scale: F32 = np.where(finite, _power(whole), top)
    byte = np.where(finite, whole + 127, 0).astype(np.uint8)
    y = x / scale[..., None]
    codes = _ties_toward_zero(y)
    return byte, np.where(y > 0, codes, codes | np.uint8(8))


MXFP4_BLOCKS: dict[str, Blocks] = {
    "ocp-floor": blocks_ocp_floor,
    "vllm-even": blocks_vllm_even,
    "flashinfer-ceil": blocks_flashinfer_ceil,
    "deepgemm-ceil": blocks_deepgemm_ceil,
    "modelopt-mxfp4": blocks_modelopt_mxfp4,
}
