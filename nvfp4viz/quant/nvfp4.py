"""NVFP4 in NumPy: every recipe, whole arrays at a time.

Input is ``(R, B, 16)`` float32, exact copies of the BF16 or F32 elements, and a global scale as the recipe stores it.
Nothing here looks at one block: ``reference.py`` does, and must give the same bits.

NaN needs care, because these recipes must agree with kernels and not with NumPy: a maximum is taken over bit patterns
(``np.fmax`` mishandles signalling NaNs), and a NaN block scale is always byte 0x7F, since x86 makes NaNs negative.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_to_f32, decode_e4m3, encode_e2m1, encode_e4m3, f32_to_bf16
from nvfp4viz.quant.rcp import rcp_approx_ftz

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Blocks = Callable[[F32, np.float32, bool], tuple[U8, U8]]

SIX = np.float32(6)
ONE_SIXTH = np.float32(1) / SIX
_NAN = np.uint32(0x7FC00000)
_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)


def block_max(x: F32, propagate_nan: bool) -> F32:
    """Largest magnitude of each block ``(…, n)``.

    ``propagate_nan=False`` is the kernel's ``hmax``: a NaN loses against a number, and only a block of NaNs alone is NaN.
    ``True`` is torch's ``amax``: one NaN makes the maximum NaN.
    """
    magnitude = np.ascontiguousarray(x).view(np.uint32) & _ABS
    nan = magnitude > _INF
    any_nan = nan.any(axis=-1)
    top = np.where(nan, np.uint32(0), magnitude).max(axis=-1) if any_nan.any() else magnitude.max(axis=-1)
    lost = any_nan if propagate_nan else nan.all(axis=-1)
    return np.where(lost, _NAN, top).astype(np.uint32).view(np.float32)


def _drop_zero_sign(codes: U8, y: F32) -> U8:
    """Codes as implementations make them that test ``y < 0``: a −0 loses its sign, a small negative keeps it."""
    return np.where(y == 0, np.uint8(0), codes)


def blocks_ieee(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``ieee``: the kernel's order with IEEE divisions.  Returns scale bytes (R, B) and codes (R, B, 16)."""
    scales = encode_e4m3(g * (block_max(x, False) / SIX))
    s = decode_e4m3(scales)
    o = np.where(s == 0, np.float32(0), g / s)
    return scales, encode_e2m1(x * o[..., None])


def blocks_vllm_cuda(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``vllm-cuda``: ``cvt_warp_fp16_to_fp4`` with its two approximate reciprocals."""
    scales = encode_e4m3(g * (block_max(x, False) * rcp_approx_ftz(SIX)))
    s = decode_e4m3(scales)
    o = np.where(s == 0, np.float32(0), rcp_approx_ftz(s * rcp_approx_ftz(g)))
    return scales, encode_e2m1(x * o[..., None])


def blocks_vllm_emulation(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``vllm-emulation``: ``ref_nvfp4_quant``, which knows values and no NaN code (a NaN element is packed as 0)."""
    scale = g * (block_max(x, True) * ONE_SIXTH)
    scales = encode_e4m3(scale)
    s = decode_e4m3(scales)

    def inverse(v: npt.ArrayLike) -> F32:
        value = np.asarray(v, np.float32)
        return np.where(value == 0, np.float32(1e-8), np.float32(1) / value).astype(np.float32)

    y = x * inverse(s * inverse(g))[..., None]
    codes = _drop_zero_sign(encode_e2m1(y), y)
    return scales, np.where(np.isnan(y), np.uint8(0), codes)


def blocks_modelopt(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``modelopt``: ``NVFP4QTensor.quantize``; ``g`` is a decode scale."""
    scale = block_max(x, True) / (SIX * g)
    scale = np.where(scale == 0, np.float32(1), scale)
    scales = encode_e4m3(_clamp(scale, 2.0**-9, 448.0))
    y = x / (decode_e4m3(scales) * g)[..., None]
    return scales, _drop_zero_sign(encode_e2m1(y), y)


def blocks_torchao(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``torchao``: ``nvfp4_quantize`` with a per-tensor scale; ``g`` is a decode scale.  A NaN becomes code 3 or 11."""
    scale = (block_max(x, True) / SIX) / g
    scales = encode_e4m3(_clamp(scale, 2.0**-6, 448.0))
    o = (np.float32(1) / g) / decode_e4m3(scales)
    y = x * o[..., None]
    sign = (np.ascontiguousarray(y).view(np.uint32) >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    return scales, np.where(np.isnan(y), np.uint8(3) | sign, encode_e2m1(y))


def blocks_compressed_tensors(x: F32, g: np.float32, bf16: bool) -> tuple[U8, U8]:
    """``compressed-tensors``: ``calculate_qparams`` and the NVFP4 packer; a NaN element is packed as 0."""
    sixth = block_max(x, True) / SIX
    if bf16:
        sixth = bf16_to_f32(f32_to_bf16(sixth))
    scales = encode_e4m3(_clamp(g * sixth, -448.0, 448.0))
    s = decode_e4m3(scales)
    zero = s == 0
    scales = np.where(zero, np.uint8(0x20), scales)
    y = x / (np.where(zero, np.float32(0.125), s) / g)[..., None]
    codes = _drop_zero_sign(encode_e2m1(y), y)
    return scales, np.where(np.isnan(y), np.uint8(0), codes)


def _clamp(x: F32, low: float, high: float) -> F32:
    """``torch.clamp``: NaN stays NaN."""
    clamped: F32 = np.clip(x, np.float32(low), np.float32(high))
    return clamped


NVFP4_BLOCKS: dict[str, Blocks] = {
    "ieee": blocks_ieee,
    "vllm-cuda": blocks_vllm_cuda,
    "vllm-emulation": blocks_vllm_emulation,
    "modelopt": blocks_modelopt,
    "torchao": blocks_torchao,
    "compressed-tensors": blocks_compressed_tensors,
}
