"""``scaled_fp4_experts_quant``: quantise routed rows, each with the encode scale of its expert."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import decode_e4m3, pack_nibbles
from nvfp4viz.formats.paths import Path, by_reference

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

PER_TOKEN_BASE = np.float32(1.0 / 2688.0)
"""Base scale of per-token NVFP4: a row's decode scale is its amax times this."""


def quantize_rows(rows: Array, gscale: F32, path: Path = "auto") -> tuple[U8, U8]:
    """Quantise BF16 rows by recipe ``vllm-cuda``, every row with its own encode scale.

    Parameters
    ----------
    rows : (R, K) bfloat16
        K a multiple of 16.
    gscale : (R,) float32
        Encode scale of each row's expert, any value.
    path
        ``"reference"`` and ``"numpy"`` are `nvfp4viz.quant`'s own; ``"auto"`` takes the kernel.  Equal bits.

    Returns
    -------
    (R, K//2) packed codes and (R, K//16) scale bytes, uint8.

    >>> import ml_dtypes
    >>> row = np.full((2, 16), 3, ml_dtypes.bfloat16)
    >>> packed, scales = quantize_rows(row, np.float32([896, np.inf]))
    >>> packed[:, 0].tolist(), scales.ravel().tolist()                # 3·896/6 = 448; Inf saturates to 448 as well
    ([119, 119], [126, 126])
    """
    gscale = np.ascontiguousarray(gscale, np.float32)
    packed = np.empty((len(rows), rows.shape[1] // 2), np.uint8)
    scales = np.empty((len(rows), rows.shape[1] // 16), np.uint8)
    if by_reference(path):
        from nvfp4viz.quant import quantize

        for r, (row, g) in enumerate(zip(rows, gscale, strict=True)):
            one = quantize(row, recipe="vllm-cuda", global_scale=g, path="reference")
            packed[r], scales[r] = one.packed, one.scales
        return packed, scales
    if path == "numpy":
        from nvfp4viz.quant.nvfp4 import blocks_vllm_cuda

        blocks = rows.astype(np.float32).reshape(len(rows), rows.shape[1] // 16, 16)
        with np.errstate(all="ignore"):
            scales, codes = blocks_vllm_cuda(blocks, gscale[:, None], True)
        return pack_nibbles(codes.reshape(rows.shape)), scales
    from nvfp4viz.moe.experts_quant_kernel import quantize_rows as kernel
    from nvfp4viz.quant.rcp import rcp_table

    bits = np.ascontiguousarray(rows).view(np.uint16)
    kernel(bits, gscale, _approximate_sixth(), rcp_table(), _E4M3_VALUES, packed, scales)
    return packed, scales


_E4M3_VALUES = decode_e4m3(np.arange(256, dtype=np.uint8))


@cache
def _approximate_sixth() -> np.float32:
    from nvfp4viz.quant.rcp import rcp_approx_ftz

    return np.float32(rcp_approx_ftz(np.float32(6)))


def per_token_scales(rows: Array) -> tuple[F32, F32]:
    """Encode and decode scale of each row from its own amax: ``p = amax * (1/2688)``, ``g = rcp_approx(p)``.

    The decode scale joins the expert's alpha in f32 before the epilogue.  Source: `numerics-vllm.md` section 8; an
    all-zero row has p = 0 and g = Inf.

    >>> encode, decode = per_token_scales(np.float32([[1.0] * 15 + [-2688.0], [0.0] * 16]))
    >>> decode.tolist(), encode.tolist()
    ([1.0, 0.0], [1.0, inf])
    """
    from nvfp4viz.quant.rcp import rcp_approx_ftz

    decode = np.abs(rows.astype(np.float32)).max(axis=1, initial=0.0) * PER_TOKEN_BASE
    return rcp_approx_ftz(decode), decode
