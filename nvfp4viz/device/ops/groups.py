"""Global scales of rows, as the kernels take them: one number, one for each row, or one for each range of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nvfp4viz.device.ops.checks import check
from nvfp4viz.errors import DeviceError, FormatError

ONE, PER_ROW, PER_RANGE = 0, 1, 2
"""``GlobalScales`` of ``kernels/blocks.cuh``."""

GlobalScale = float | np.float32 | torch.Tensor
Arguments = tuple[Any, ...]


def scale_arguments(
    op: str, scale: GlobalScale, offsets: torch.Tensor | None, rows: int, device: torch.device
) -> tuple[int, Arguments, Arguments]:
    """What a kernel is told of global scales.

    Returns
    -------
    kind
        ``ONE``, ``PER_ROW`` or ``PER_RANGE``.
    scale arguments
        ``(float32 tensor or None, its value where it is None)``
    range arguments
        ``(offsets or None, ranges)``

    Raises
    ------
    FormatError
        ``ops.tensor``; ``ops.global-scales`` unless there is one scale, one a row, or one a range.
    """
    ranges = 0
    if offsets is not None:
        check(op, "offsets", offsets, torch.int32, None)
        ranges = offsets.numel() - 1
        if ranges < 1 or offsets.device != device:
            raise FormatError("ops.tensor", op=op, name="offsets", expected="int32 (ranges + 1)", got=_seen(offsets))
    given = (offsets, np.int32(ranges))
    if not isinstance(scale, torch.Tensor):
        with np.errstate(over="ignore", under="ignore"):
            return ONE, (None, np.float32(scale)), given
    flat = scale.reshape(-1)
    check(op, "global_scale", flat, torch.float32, None)
    if flat.device != device:
        raise FormatError("ops.tensor", op=op, name="global_scale", expected=f"float32 on {device}", got=_seen(scale))
    if flat.numel() == 1:
        kind = ONE
    elif ranges and flat.numel() == ranges:
        kind = PER_RANGE
    elif flat.numel() == rows:
        kind = PER_ROW
    else:
        raise FormatError("ops.global-scales", op=op, count=flat.numel(), rows=rows, ranges=ranges)
    return kind, (flat, np.float32(0)), given


def empty(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty``; where memory does not suffice, an error that says for what.

    Raises
    ------
    DeviceError
        ``ops.memory``
    """
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError("ops.memory", op=op, shape=shape, reason=reason) from error


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it that starts at a multiple of 16 bytes, as the kernels' loads want."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _seen(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
