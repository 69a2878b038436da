"""One block-scaled tensor-core instruction on many tiles at once: the step that `nvfp4viz.quant.mma_matmul` defines."""

from __future__ import annotations

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check
from nvfp4viz.errors import FormatError

__all__ = ["has_instruction", "mma_tiles"]

THREADS = 128
SOFT = ("NV_FORCE_SOFT",)


def has_instruction(device: torch.device | int | None = None) -> bool:
    """Whether the device has ``mma.sync … kind::mxf4nvf4``: compute capability 12.x.  Others compute the same bits."""
    return torch.cuda.get_device_capability(device)[0] == 12


def mma_tiles(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    c: torch.Tensor,
    *,
    kind: str = "nvfp4",
    soft: bool = False,
) -> torch.Tensor:
    """``c + A · B`` of T tiles, 16 rows by 8 columns, K = 64: one instruction each.

    Parameters
    ----------
    a, b : (T, 16, 32), (T, 8, 32) uint8
        Packed E2M1 codes; b is K-major, as everywhere here.
    a_scales, b_scales : (T, 16, S), (T, 8, S) uint8
        S = 4 UE4M3 bytes (``"nvfp4"``) or 2 UE8M0 bytes (``"mxfp4"``) a row.
    c : (T, 16, 8) float32
        Accumulators.
    kind
        Which instruction.
    soft
        Compute the step in software even where the instruction exists.

    Raises
    ------
    FormatError
        ``mma.kind``, ``ops.tensor``
    """
    if kind not in ("nvfp4", "mxfp4"):
        raise FormatError("mma.kind", kind=kind, known="nvfp4, mxfp4")
    op, tiles, each = "mma_tiles", len(a), 4 if kind == "nvfp4" else 2
    check(op, "a", a, torch.uint8, tiles, 16, 32)
    check(op, "b", b, torch.uint8, tiles, 8, 32)
    check(op, "a_scales", a_scales, torch.uint8, tiles, 16, each)
    check(op, "b_scales", b_scales, torch.uint8, tiles, 8, each)
    check(op, "c", c, torch.float32, tiles, 16, 8)
    words = [torch.nn.functional.pad(scales, (0, 4 - each)).contiguous() for scales in (a_scales, b_scales)]
    out = torch.empty_like(c)
    call = kernel("gemm_w4a4.cu", f"nv_mma_tiles_{kind}", SOFT if soft else ())
    # .clone(): a view of the caller's may start anywhere, and the kernel reads words
    call(-(-tiles // 4), THREADS, (a.clone(), words[0], b.clone(), words[1], c, out, np.int32(tiles)))
    return out
