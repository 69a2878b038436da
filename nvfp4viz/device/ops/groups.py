"""Global scales of rows, as the kernels take them: one number, one for each row, or one for each range of rows.

And what every op allocates: results, and copies of operands that do not start where a kernel's loads want them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from nvfp4viz.device.load import Kernel, kernel
from nvfp4viz.device.ops.checks import check, check_number, check_offsets
from nvfp4viz.errors import DeviceError, FormatError

ONE, PER_ROW, PER_RANGE = 0, 1, 2
"""``GlobalScales`` of ``kernels/blocks.cuh``."""
SPREAD_FROM = 1 << 14
"""Blocks of a matrix from which it pays to spread the scales of ranges over the rows before quantising."""
THREADS = 256
TILE_SHARES = 4
"""Blocks of threads that write zeros into one tile of a layout."""

GlobalScale = float | np.float32 | torch.Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """Global scales and ranges, checked.

    Attributes
    ----------
    kind
        ``ONE``, ``PER_ROW`` or ``PER_RANGE``.
    scales
        float32, on the device; ``None`` if the one scale came by value.
    one : float32
        That value.
    offsets : (ranges + 1,) int32 or None
    """

    kind: int
    scales: torch.Tensor | None
    one: np.float32
    offsets: torch.Tensor | None
    ranges: int

    def arguments(self) -> tuple[Any, ...]:
        """``Globals`` of ``kernels/blocks.cuh``, in the order of the kernels' parameters."""
        return self.scales, self.one, self.offsets, np.int32(self.ranges), np.int32(self.kind)

    def spread(self, op: str, rows: int) -> Scales:
        """The same scales, one for each row where there was one for each range."""
        if self.kind != PER_RANGE:
            return self
        return self._spread(op, rows)

    def spread_and_place(self, op: str, rows: int, tiles: int) -> tuple[Scales, torch.Tensor]:
        """As `spread`, and where each tile of a 128x4 layout comes from, (tiles, 2) int32: first row and count."""
        sources = empty(op, (tiles, 2), torch.int32, _device_of(self.offsets))
        return self._spread(op, rows, tiles, sources=sources), sources

    def spread_over_tiles(self, op: str, rows: int, tiles: int, flat: torch.Tensor) -> tuple[Scales, torch.Tensor]:
        """As `spread`, and where each row's block scales go in a 128x4 layout, (rows,) int32: see ``kLastOfPiece``.

        In ``flat``, that layout, what no row's piece reaches becomes 0.
        """
        places = empty(op, (rows,), torch.int32, flat.device)
        return self._spread(op, rows, tiles, places=places, flat=flat), places

    def _spread(
        self,
        op: str,
        rows: int,
        tiles: int = 0,
        sources: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        flat: torch.Tensor | None = None,
    ) -> Scales:
        device, by_range = _device_of(self.offsets), self.kind == PER_RANGE
        of_row = empty(op, (rows,), torch.float32, device) if by_range else None
        across = 0 if flat is None else flat.numel() // (512 * tiles)
        grid = (-(-max(rows, tiles) // THREADS), 1) if flat is None else (max(-(-rows // THREADS), tiles), TILE_SHARES)
        arguments = (
            *(self.offsets, np.int32(self.ranges), np.int32(rows), self.scales if by_range else None, of_row),
            *(sources, places, flat, np.int32(tiles), np.int32(across)),
        )
        kernel("ranges.cu", "nv_spread_ranges")(grid, THREADS, arguments, 12 * self.ranges)
        return replace(self, kind=PER_ROW, scales=of_row) if by_range else self


def place(linear: torch.Tensor, flat: torch.Tensor, sources: torch.Tensor) -> None:
    """Linear block scales into a 128x4 layout where every range of rows is padded to tiles of its own."""
    columns, tiles = linear.shape[1], len(sources)
    grid = (-(-columns // (16 * THREADS // 32)), min(tiles, 65535), -(-tiles // 65535))
    kernel("ranges.cu", "nv_place_ranges")(grid, THREADS, (linear, flat, sources, np.int32(columns), np.int32(tiles)))


def check_scales(op: str, scale: GlobalScale, offsets: torch.Tensor | None, rows: int, device: torch.device) -> Scales:
    """Global scales as the kernels take them.

    Raises
    ------
    FormatError
        ``ops.tensor``; ``ops.number``; ``ops.global-scales`` unless there is one scale, one a row, or one a range.
    """
    ranges = 0
    if offsets is not None:
        check_offsets(op, offsets)
        ranges = offsets.numel() - 1
        if offsets.device != device:
            raise FormatError("ops.tensor", op=op, name="offsets", expected="int32 (ranges + 1)", got=_seen(offsets))
    if not isinstance(scale, torch.Tensor):
        return Scales(ONE, None, check_number(op, "global_scale", scale), offsets, ranges)
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
    return Scales(kind, flat, np.float32(0), offsets, ranges)


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


@cache
def resident(run: Kernel, threads: int, device: torch.device) -> int:
    """Blocks of ``threads`` threads of a kernel that a device holds at a time."""
    each = run.blocks_per_multiprocessor(threads, 0, device.index or 0)
    return max(each, 1) * int(torch.cuda.get_device_properties(device).multi_processor_count)


def aligned(op: str, x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it that starts at a multiple of 16 bytes, as the kernels' loads want.

    Raises
    ------
    DeviceError
        ``ops.memory``
    """
    return x if x.data_ptr() % 16 == 0 else empty(op, tuple(x.shape), x.dtype, x.device).copy_(x)


def _device_of(offsets: torch.Tensor | None) -> torch.device:
    assert offsets is not None, "only ranges are spread"
    return offsets.device


def _seen(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
