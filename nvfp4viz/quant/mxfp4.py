"""MXFP4 in NumPy: five scale rules over blocks of 32.

===================  ===========================================================================  ======================
recipe               exponent of the scale, for a block with maximum ``m``                        elements
===================  ===========================================================================  ======================
``ocp-floor``        floor(log2 m) − 2                                                            RNE
``vllm-even``        the same, one more where m's significand is at least 1.75                    RNE
``flashinfer-ceil``  ceil(log2(m · rcp(6)))                                                       RNE
``deepgemm-ceil``    ceil(log2(max(m, 1e-4) / 6))                                                 ties toward zero, no −0
``modelopt-mxfp4``   ceil(log2(m / 6))                                                            ties toward zero, 0 → 8
===================  ===========================================================================  ======================

Sources: `numerics-vllm.md` 1.5 and 10, `numerics-peers.md` 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import decode_ue8m0, encode_e2m1, encode_ue8m0
from nvfp4viz.quant.nvfp4 import block_max
from nvfp4viz.quant.rcp import rcp_approx_ftz

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Blocks = Callable[[F32], tuple[U8, U8]]

_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def _ties_toward_zero(y: npt.NDArray[np.floating]) -> U8:
    """Magnitude codes 0 to 7: the number of midpoints strictly below ``|y|``."""
    return np.searchsorted(_MIDPOINTS, np.abs(y), side="left").astype(np.uint8)


def _exact_inverse(byte: U8) -> F32:
    """2^(127 − byte), exact in float64 first: 2^127 is finite and 2^-127 is a float32 subnormal."""
    return np.ldexp(np.float64(1), 127 - byte.astype(np.int32)).astype(np.float32)


def _floor_exponent(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Biased exponent floor(log2 m) + 127 of positive float32 bits, also of subnormals."""
    value = bits.view(np.float32).astype(np.float64)
    _, exponent = np.frexp(value)
    return np.where(value == 0, 0, exponent + 126).astype(np.int32)


def blocks_ocp_floor(x: F32) -> tuple[U8, U8]:
    """``ocp-floor``: OCP MX v1.0 section 6.3.  A NaN or infinite block gets scale byte 255."""
    top = block_max(x, True)
    exponent = np.clip(_floor_exponent(np.ascontiguousarray(top).view(np.uint32)) - 2, 0, 254)
    byte = np.where(np.isfinite(top), exponent, 255).astype(np.uint8)
    y = x * np.where(byte == 255, np.float32(np.nan), _exact_inverse(byte))[..., None]
    return byte, encode_e2m1(y)


def blocks_vllm_even(x: F32) -> tuple[U8, U8]:
    """``vllm-even``: the CUDA kernel; scale byte 0 means scale 0 there, and its block's codes are signed zeros."""
    bits = np.ascontiguousarray(block_max(x, False)).view(np.uint32)
    # A NaN maximum is 0x7FFFFFFF on the GPU; adding 2^21 carries into the sign bit and the exponent wraps to 0.
    bits = np.where(bits > np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), bits)
    raised = ((bits + np.uint32(1 << 21)) >> np.uint32(23)) & np.uint32(0xFF)
    byte = np.minimum(np.where(raised > 2, raised.astype(np.int32) - 2, 0), 254).astype(np.uint8)
    o = np.where(byte == 0, np.float32(0), _exact_inverse(byte))
    return byte, encode_e2m1(x * o[..., None])


def blocks_flashinfer_ceil(x: F32) -> tuple[U8, U8]:
    """``flashinfer-ceil``: UE8M0 rounded up from ``m · rcp(6)``.

    The multiplier is the inverse of the scale where that is a normal float32, and 0 at byte 0 and from byte 254 on.
    """
    byte = encode_ue8m0(block_max(x, False) * rcp_approx_ftz(np.float32(6)))
    o = np.where((byte == 0) | (byte >= 254), np.float32(0), _exact_inverse(byte))
    return byte, encode_e2m1(x * o[..., None])


def blocks_deepgemm_ceil(x: F32) -> tuple[U8, U8]:
    """``deepgemm-ceil``: ``per_token_cast_to_fp4``; maximum at least 1e-4, ties toward zero, zeros without a sign.

    A NaN maximum ends at the largest exponent, byte 254.
    """
    top = block_max(x, True)
    top = np.where(top < np.float32(1e-4), np.float32(1e-4), top)
    byte = np.clip(encode_ue8m0(top / np.float32(6)), 1, 254).astype(np.uint8)
    y = x * _exact_inverse(byte)[..., None]
    codes = _ties_toward_zero(y)
    return byte, np.where((y < 0) & (codes > 0), codes | np.uint8(8), codes)


def blocks_modelopt_mxfp4(x: F32) -> tuple[U8, U8]:
    """``modelopt-mxfp4``: ``MXFP4QTensor.quantize``; ties toward zero, and every exact zero is code 8."""
    byte = encode_ue8m0(block_max(x, True) / np.float32(6))
    byte = np.where(byte == 255, np.uint8(0), byte)
    y = x / decode_ue8m0(byte)[..., None]
    return byte, np.where(y > 0, _ties_toward_zero(y), _ties_toward_zero(y) | np.uint8(8))


MXFP4_BLOCKS: dict[str, Blocks] = {
    "ocp-floor": blocks_ocp_floor,
    "vllm-even": blocks_vllm_even,
    "flashinfer-ceil": blocks_flashinfer_ceil,
    "deepgemm-ceil": blocks_deepgemm_ceil,
    "modelopt-mxfp4": blocks_modelopt_mxfp4,
}
