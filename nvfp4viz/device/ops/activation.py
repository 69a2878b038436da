"""SiLU·mul or GELU-tanh·mul and quantise in one pass: `nvfp4viz.moe`'s activation and `nvfp4viz.quant`'s bytes.

Rounding points as in vLLM: the activation in f32 (GELU rounded to BF16 before it meets the up half, the fused SiLU
not), the product rounded to BF16, then the block maximum and all that follows.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_multiple
from nvfp4viz.device.ops.groups import GlobalScale, aligned, check_scales, empty, place, resident
from nvfp4viz.device.ops.quantize import (
    LAYOUTS,
    RECIPE_KERNELS,
    SOFT,
    DeviceQuantized,
    Layout,
    most_tiles,
    reciprocals,
    scale_shape,
)
from nvfp4viz.errors import FormatError
from nvfp4viz.formats import bf16_to_f32, f32_to_bf16
from nvfp4viz.moe.activation import fused_silu, gelu_tanh

__all__ = ["activation_quantize", "activation_table"]

ACTIVATIONS = ("silu", "gelu_tanh")
RECIPES = ("ieee", "vllm-cuda")
FIRST, PER_SIGN, NEGATIVE = 103 << 7, 31 << 7, 4096
"""``kernels/activation.cuh``: BF16 pattern of 2^-24, patterns from there to below 2^7, where negative gates begin."""
THREADS = 512
SHARED_FROM = 1 << 22
"""Outputs from which copying the table into shared memory pays."""


def activation_quantize(
    x: torch.Tensor,
    *,
    activation: Literal["silu", "gelu_tanh"],
    recipe: str = "vllm-cuda",
    global_scale: GlobalScale,
    offsets: torch.Tensor | None = None,
    layout: Layout = "linear",
    soft: bool = False,
) -> DeviceQuantized:
    """Activate the gate half, multiply by the up half, round to BF16, quantise.

    Parameters
    ----------
    x : (M, 2I) bfloat16
        Gate first; I a multiple of 16.
    activation
        ``"silu"`` or ``"gelu_tanh"``.
    recipe
        ``"ieee"`` or ``"vllm-cuda"``.
    global_scale, offsets, layout, soft
        As for `nvfp4viz.device.ops.quantize`, of the (M, I) products.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.method``, ``ops.global-scales``, ``ops.number``
    DeviceError
        ``ops.memory``
    """
    op = "activation_quantize"
    check(op, "x", x, torch.bfloat16, None, None)
    for method, known in ((activation, ACTIVATIONS), (recipe, RECIPES), (layout, LAYOUTS)):
        if method not in known:
            raise FormatError("ops.method", op=op, method=method, known=", ".join(known))
    rows, width = x.shape
    check_multiple(op, "2I", width, 32)
    columns = width // 32
    x = aligned(op, x)
    given = check_scales(op, global_scale, offsets, rows, x.device)
    packed = empty(op, (rows, width // 4), torch.uint8, x.device)
    scales = empty(op, scale_shape(rows, columns, layout, offsets), torch.uint8, x.device)
    written, sources, form = scales, None, layout
    if layout == "swizzled" and offsets is not None and rows:  # row by row first: see ranges.cu
        given, sources = given.spread_and_place(op, rows, most_tiles(rows, offsets))
        written, form = empty(op, (rows, columns), torch.uint8, x.device), "linear"
    else:
        given = given.spread(op, rows)
    defines, table = (SOFT, reciprocals(x.device)) if soft else ((), None)
    where = "shared" if rows * width // 2 >= SHARED_FROM else "global"
    run = kernel("activation_quantize.cu", f"nv_activation_quantize_{RECIPE_KERNELS[recipe]}_{form}_{where}", defines)
    # a thread takes one block of outputs after another, or a warp a strip of the layout, 8 columns of 16 rows; where
    # each block of threads copies the table, they all stay
    threads = rows * columns if form == "linear" else -(-rows // 128) * -(-columns // 8) * 8 * 32
    grid = -(-threads // THREADS)
    if where == "shared":
        grid = min(grid, resident(run, THREADS, x.device))
    sizes, scale = (np.int32(rows), np.int32(columns)), (given.scales, given.one, np.int32(given.kind))
    values, rounds = _table_on(activation, x.device), np.int32(activation != "silu")
    run(grid, THREADS, (x, packed, written, *sizes, *scale, table, values, rounds))
    if sources is not None:
        place(written, scales, sources)
    return DeviceQuantized(packed, scales, global_scale, recipe, (rows, width // 2), layout, offsets)


def activation_table(activation: str) -> npt.NDArray[np.float32]:
    """What each gate becomes before it meets ``up``: (8064,) float32 in the order of ``kernels/activation.cuh``."""
    gates = FIRST + np.arange(PER_SIGN, dtype=np.uint16)
    table = np.zeros(NEGATIVE + PER_SIGN, np.float32)
    for sign in (0, 1):
        value = activate(activation, gates | np.uint16(sign << 15))
        table[sign * NEGATIVE : sign * NEGATIVE + PER_SIGN] = value
    return table


def activate(activation: str, gates: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """`nvfp4viz.moe`'s activation of BF16 patterns, as it meets ``up``."""
    x = (gates.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return fused_silu(x) if activation == "silu" else bf16_to_f32(f32_to_bf16(gelu_tanh(x)))


@cache
def _table_on(activation: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(activation_table(activation)).to(device)
