"""NVFP4 in NumPy: every recipe, whole arrays at a time.

A recipe is a :class:`Rule` of four parts: which maximum it takes, how the scale byte comes from it, the *factor* by
which every element of the block is multiplied or divided, and how the scaled element becomes a code.  The factor
depends on the scale byte and the global scale alone, so a tensor has at most 256 of them (``factor_table``).

Input is ``(R, B, 16)`` float32, exact copies of the BF16 or F32 elements, and a global scale as the recipe stores it.
``reference.py`` computes one block at a time and must give the same bits.

**NaN** is where implementations show themselves, and where NumPy must not be trusted: maxima are taken over bit
patterns, because ``np.fmax`` mishandles signalling NaNs, and no rule reads the sign of a NaN that this CPU computed.

* Kernels (``ieee``, ``vllm-cuda``): the scale byte of NaN is 0x7F, the code of NaN is 7 (+6).
* Packages (the others) run on PyTorch.  A NaN that comes from the data gives scale byte 0x7F here; PyTorch gives 0x7F
  or 0xFF for the same block, depending on where it lies in the tensor (measured: vector lanes and the tail differ).  A
  NaN that an operation makes (0/0, 0·∞, ∞/∞) gives 0xFF, as every x86 does: that is the byte of an all-zero tensor in
  ModelOpt and torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_to_f32, decode_e4m3, encode_e2m1, encode_e4m3, f32_to_bf16
from nvfp4viz.quant.rcp import rcp_approx_ftz

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ZERO, ONE, SIX = np.float32(0), np.float32(1), np.float32(6)
ONE_SIXTH = ONE / SIX
CT_ZERO_SCALE = 0x20
"""compressed-tensors writes 0.125 where a scale rounds to zero."""
_NAN = np.uint32(0x7FC00000)
_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)


@dataclass(frozen=True, slots=True)
class Rule:
    """One NVFP4 recipe.

    Attributes
    ----------
    nan_wins
        Whether one NaN makes the block's maximum NaN (torch's ``amax``) or loses against numbers (the GPU's ``hmax``).
    scale_bytes
        ``(maxima, global scale, tensor is BF16) -> uint8``, same shape as the maxima.
    factor
        ``(scale bytes, global scale) -> float32``, same shape.
    divides
        Whether elements are divided by the factor; else they are multiplied by it.
    codes
        ``(scaled elements (R, B, 16), scale bytes (R, B), global scale, tensor is BF16) -> uint8``
    """

    nan_wins: bool
    scale_bytes: Callable[[F32, np.float32, bool], U8]
    factor: Callable[[U8, np.float32], F32]
    divides: bool
    codes: Callable[[F32, U8, np.float32, bool], U8]


def block_max(x: F32, nan_wins: bool) -> F32:
    """Largest magnitude of each block ``(…, n)``, by bit patterns; see ``Rule.nan_wins``.

    >>> block_max(np.float32([[1, np.nan, -3]]), nan_wins=False).tolist()
    [3.0]
    """
    magnitude = np.ascontiguousarray(x).view(np.uint32) & _ABS
    top = magnitude.max(axis=-1)
    if (top > _INF).any():
        nan = magnitude > _INF
        lost = nan.any(axis=-1) if nan_wins else nan.all(axis=-1)
        top = np.where(lost, _NAN, np.where(nan, np.uint32(0), magnitude).max(axis=-1))
    out: F32 = top.astype(np.uint32).view(np.float32)
    return out


def factor_table(recipe: str, global_scale: np.float32) -> F32:
    """(256,) float32: the factor of a block with each scale byte, under one global scale."""
    with np.errstate(all="ignore"):
        table = NVFP4_RULES[recipe].factor(np.arange(256, dtype=np.uint8), global_scale)
    return np.ascontiguousarray(table, np.float32)


def quantize_blocks(recipe: str, x: F32, global_scale: np.float32, bf16: bool) -> tuple[U8, U8]:
    """Scale bytes (R, B) and codes (R, B, 16) of blocks ``x``; ``bf16`` tells what the elements were before."""
    rule = NVFP4_RULES[recipe]
    with np.errstate(all="ignore"):
        scales = rule.scale_bytes(block_max(x, rule.nan_wins), global_scale, bf16)
        factor = factor_table(recipe, global_scale)[scales][..., None]
        y = x / factor if rule.divides else x * factor
        return scales, rule.codes(y, scales, global_scale, bf16)


def blocks_vllm_cuda(x: F32, global_scale: F32, bf16: bool = True) -> tuple[U8, U8]:
    """``vllm-cuda`` with a global scale for every row, ``(R, 1)`` float32, as the rows of routed experts have them."""
    with np.errstate(all="ignore"):
        scales = encode_e4m3(global_scale * (block_max(x, nan_wins=False) * rcp_approx_ftz(SIX)))
        s = decode_e4m3(scales)
        factor = np.where(s == 0, ZERO, rcp_approx_ftz(s * rcp_approx_ftz(global_scale)))
        return scales, encode_e2m1(x * factor[..., None])


# ------------------------------------------------------------------------------------------------ scale bytes


def _torch_bytes(scale: F32, top: F32, g: np.float32) -> U8:
    """E4M3 bytes of scales computed by PyTorch; see the top of this file for NaN."""
    made_here = np.isnan(scale) & ~np.isnan(top) & ~np.isnan(g)
    return np.where(made_here, np.uint8(0xFF), encode_e4m3(scale))


def _clamp(x: F32, low: float, high: float) -> F32:
    """``torch.clamp``: NaN stays NaN."""
    clamped: F32 = np.clip(x, np.float32(low), np.float32(high))
    return clamped


def _bytes_ieee(top: F32, g: np.float32, bf16: bool) -> U8:
    return encode_e4m3(g * (top / SIX))


def _bytes_cuda(top: F32, g: np.float32, bf16: bool) -> U8:
    return encode_e4m3(g * (top * rcp_approx_ftz(SIX)))


def _bytes_emulation(top: F32, g: np.float32, bf16: bool) -> U8:
    return _torch_bytes(_clamp(g * (top * ONE_SIXTH), -448.0, 448.0), top, g)


def _bytes_modelopt(top: F32, g: np.float32, bf16: bool) -> U8:
    scale = top / (SIX * g)
    scale = np.where(scale == 0, ONE, scale)
    return _torch_bytes(_clamp(scale, 2.0**-9, 448.0), top, g)


def _bytes_torchao(top: F32, g: np.float32, bf16: bool) -> U8:
    return _torch_bytes(_clamp((top / SIX) / g, 2.0**-6, 448.0), top, g)


def _bytes_compressed_tensors(top: F32, g: np.float32, bf16: bool) -> U8:
    sixth = top / SIX
    if bf16:  # the division happens in the tensor's dtype
        sixth = bf16_to_f32(f32_to_bf16(sixth))
    scales = _torch_bytes(_clamp(g * sixth, -448.0, 448.0), top, g)
    return np.where((scales & np.uint8(0x7F)) == 0, np.uint8(CT_ZERO_SCALE), scales)


# ---------------------------------------------------------------------------------------------------- factors


def _factor_ieee(scales: U8, g: np.float32) -> F32:
    s = decode_e4m3(scales)
    return np.where(s == 0, ZERO, g / s)


def _factor_cuda(scales: U8, g: np.float32) -> F32:
    s = decode_e4m3(scales)
    return np.where(s == 0, ZERO, rcp_approx_ftz(s * rcp_approx_ftz(g)))


def _factor_emulation(scales: U8, g: np.float32) -> F32:
    def inverse(value: F32) -> F32:
        return np.where(value == 0, np.float32(1e-8), ONE / value)

    return inverse(decode_e4m3(scales) * inverse(np.asarray(g, np.float32)))


def _factor_modelopt(scales: U8, g: np.float32) -> F32:
    return decode_e4m3(scales) * g


def _factor_torchao(scales: U8, g: np.float32) -> F32:
    return (ONE / g) / decode_e4m3(scales)


def _factor_compressed_tensors(scales: U8, g: np.float32) -> F32:
    return decode_e4m3(scales) / g


# ------------------------------------------------------------------------------------------------------ codes


def _codes_hardware(y: F32, scales: U8, g: np.float32, bf16: bool) -> U8:
    """``cvt.rn.satfinite.e2m1x2``: NaN gives 7, −0 keeps its sign."""
    return encode_e2m1(y)


def _codes_without_zero_sign(y: F32) -> U8:
    """Implementations that ask ``y < 0``: a −0 loses its sign; a small negative that rounds to zero keeps it."""
    return np.where(y == 0, np.uint8(0), encode_e2m1(y))


def _codes_modelopt(y: F32, scales: U8, g: np.float32, bf16: bool) -> U8:
    return _codes_without_zero_sign(y)  # a NaN lies above every bound of its search: 7


def _codes_emulation(y: F32, scales: U8, g: np.float32, bf16: bool) -> U8:
    """``ref_nvfp4_quant`` answers values and lets NaN be NaN, which has no code: written as 0."""
    return np.where(np.isnan(y), np.uint8(0), _codes_without_zero_sign(y))


def _codes_compressed_tensors(y: F32, scales: U8, g: np.float32, bf16: bool) -> U8:
    """The packer turns NaN into magnitude 0; PyTorch's NaN in BF16 is 0xFFFF, whose sign it keeps."""
    return np.where(np.isnan(y), np.uint8(8 if bf16 else 0), _codes_without_zero_sign(y))


def torchao_nan_code(bits: int) -> int:
    """What torchao's rounding makes of a NaN, since it is integer arithmetic on the bits and does not look for NaN.

    >>> torchao_nan_code(0x7FC00000), torchao_nan_code(0xFFF00000)
    (3, 12)
    """
    return (4 if bits & 0x7FFFFFFF >= 0x7FE00000 else 3) | (8 if bits >> 31 else 0)


def _codes_torchao(y: F32, scales: U8, g: np.float32, bf16: bool) -> U8:
    """NaN codes tell which NaN it was: the global scale's, the block scale's (0x7FF00000 from E4M3), or 0·∞."""
    nan = np.isnan(y)
    if not nan.any():
        return encode_e2m1(y)
    if np.isnan(g):
        code = np.full(scales.shape, torchao_nan_code(int(g.view(np.uint32))), np.uint8)
    else:
        code = np.where(scales == 0xFF, torchao_nan_code(0xFFF00000), torchao_nan_code(0x7FF00000)).astype(np.uint8)
        code = np.where((scales & np.uint8(0x7F)) == 0x7F, code, np.uint8(torchao_nan_code(0xFFC00000)))
    return np.where(nan, code[..., None], encode_e2m1(y))


NVFP4_RULES: dict[str, Rule] = {
    "ieee": Rule(False, _bytes_ieee, _factor_ieee, False, _codes_hardware),
    "vllm-cuda": Rule(False, _bytes_cuda, _factor_cuda, False, _codes_hardware),
    "vllm-emulation": Rule(True, _bytes_emulation, _factor_emulation, False, _codes_emulation),
    "modelopt": Rule(True, _bytes_modelopt, _factor_modelopt, True, _codes_modelopt),
    "torchao": Rule(True, _bytes_torchao, _factor_torchao, False, _codes_torchao),
    "compressed-tensors": Rule(
        True, _bytes_compressed_tensors, _factor_compressed_tensors, True, _codes_compressed_tensors
    ),
}
