"""Grouped GEMMs of a mixture-of-experts layer: rows sorted by expert, each range times its own expert's FP4 weight.

``grouped_gemm_w4a4``   both sides FP4, on the tensor core where there is one for it, else its bit-exact step in the
                        same kernel (`kernels/gemm_w4a4.cu`); equals `nvfp4viz.quant.mma_grouped` in every bit
``grouped_gemm_w4a16``  BF16 activations: a kernel that widens FP4 as it multiplies (`kernels/gemm_w4a16.cu`), or the
                        weight decoded to BF16 first and ``torch._grouped_mm``
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.memory import smaller_until_it_fits
from nvfp4viz.device.ops.checks import check, check_multiple, check_offsets
from nvfp4viz.device.ops.dequantize import dequantize
from nvfp4viz.device.ops.groups import aligned, empty
from nvfp4viz.device.ops.layout import scale_tile_offsets
from nvfp4viz.device.ops.mma import SOFT
from nvfp4viz.device.ops.quantize import DeviceQuantized, scale_shape
from nvfp4viz.device.ops.scaled_mm import library_fits, library_works, scaled_mm_grouped
from nvfp4viz.errors import DeviceError, FormatError
from nvfp4viz.quant import RECIPES

__all__ = ["PackedW4A16", "grouped_gemm_w4a4", "grouped_gemm_w4a16", "pack_w4a16", "widened_weight"]

THREADS = 128
MOST_BLOCKS = 65535  # down a grid
W4A4_COLUMNS, W4A4_ROWS = 128, 32  # of the result, a block
ROW_TILES = {16: 4, 32: 2, 64: 2}
"""Tokens of a block of `gemm_w4a16.cu`, and 16-row tiles of the weight in each of its four warps."""
METHODS = ("fused", "dequantize")
W4A4_METHODS = ("kernel", "library", "auto")
_OUT = {torch.bfloat16: "bf16", torch.float32: "f32"}


# ------------------------------------------------------------------------------------------------------ W4A4


def grouped_gemm_w4a4(
    a: DeviceQuantized,
    b_packed: torch.Tensor,
    b_scales: torch.Tensor,
    offsets: torch.Tensor,
    alphas: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    row_alphas: torch.Tensor | None = None,
    soft: bool = False,
    method: Literal["kernel", "library", "auto"] = "kernel",
) -> torch.Tensor:
    """``round(alpha * A[m] · B[expert of m])``, the dot by the block-scaled tensor core in steps of 64, increasing k.

    Parameters
    ----------
    a
        (R, K) activations, NVFP4 or MXFP4, sorted by expert; scales linear or swizzled, quantised with offsets (each
        expert's rows in tiles of their own, as vLLM has them) or without.
    b_packed, b_scales : (E, N, K//2), (E, N, K//block) uint8
        Weights.  With swizzled activations: scales swizzled for each expert, flat.
    offsets : (E+1,) int32
        First row of each expert, ascending from 0 to R at most; the values are not looked at (`check_offset_values`).
    alphas : (E,) float32
        The epilogue's factor, multiplied in f32 before the only rounding.
    out_dtype
        bfloat16, or float32 for the scaled accumulator.
    row_alphas : (R,) float32, optional
        Factors of rows instead (per-token scaling).
    soft
        Compute the steps in software also where the GPU has the instruction: the self-test compares both.

    Returns
    -------
    (R, N); rows behind the last expert's are zero.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.method``, ``quantize.dtype``
    DeviceError
        ``ops.library`` where it is asked for and does not work here; ``ops.memory``
    """
    op = "grouped_gemm_w4a4"
    if method not in W4A4_METHODS:
        raise FormatError("ops.method", op=op, method=method, known=", ".join(W4A4_METHODS))
    if out_dtype not in _OUT:
        raise FormatError("quantize.dtype", dtype=out_dtype)
    kind = RECIPES[a.recipe].scheme
    block = RECIPES[a.recipe].block_size
    rows, k = a.shape
    check_multiple(op, "K", k, block)
    check_offsets(op, offsets)
    experts = len(offsets) - 1
    check(op, "a.packed", a.packed, torch.uint8, rows, k // 2)
    check(op, "b_packed", b_packed, torch.uint8, experts, None, k // 2)
    check(op, "alphas", alphas, torch.float32, experts)
    if row_alphas is not None:
        check(op, "row_alphas", row_alphas, torch.float32, rows)
    n, scale_offsets = b_packed.shape[1], None
    if a.layout == "swizzled":
        padded = -(-k // block // 4) * 4
        if a.offsets is not None:
            check(op, "a.offsets", a.offsets, torch.int32, experts + 1)
        check(op, "a.scales", a.scales, torch.uint8, *scale_shape(rows, k // block, a.layout, a.offsets))
        check(op, "b_scales", b_scales, torch.uint8, experts * -(-n // 128) * 128 * padded)
        scale_offsets = offsets if a.offsets is None else scale_tile_offsets(a.offsets)
    else:
        check(op, "a.scales", a.scales, torch.uint8, rows, k // block)
        check(op, "b_scales", b_scales, torch.uint8, experts, n, k // block)
    if method != "kernel":
        works = library_fits(a, n, row_alphas) and library_works(a.packed.get_device())
        if works:
            return scaled_mm_grouped(a, b_packed, b_scales, offsets, alphas, out_dtype)
        if method == "library":
            raise DeviceError("ops.library", op=op)
    out = empty(op, (rows, n), out_dtype, a.packed.device)
    packed, scales, *weight = (aligned(op, each) for each in (a.packed, a.scales, b_packed, b_scales))
    run = kernel("gemm_w4a4.cu", f"nv_grouped_w4a4_{kind}_{a.layout}_{_OUT[out_dtype]}", SOFT if soft else ())
    for part, edges, tiles in _launches(rows, offsets, W4A4_ROWS):
        own, starts = scales[part] if scale_offsets is None else scales, scale_offsets
        if starts is not None and edges is not offsets:  # the kernel adds a row's place behind its expert's first
            starts = starts + (edges + part.start - offsets)
        factors = None if row_alphas is None else row_alphas[part]
        arguments = (packed[part], own, *weight, edges, starts, alphas, factors, out[part])
        sizes = (np.int32(part.stop - part.start), np.int32(experts), np.int32(n), np.int32(k))
        run((-(-n // W4A4_COLUMNS), tiles), THREADS, (*arguments, *sizes))
    return out


def _launches(rows: int, offsets: torch.Tensor, height: int) -> Iterator[tuple[slice, torch.Tensor, int]]:
    """Rows of each launch, `offsets` counted from its first row, and its blocks down.

    One launch, but for millions of rows.  A block takes up to `height` rows of one expert, so an expert may cost one
    block more than its rows fill, and a last one clears what is behind all of them.
    """
    more = len(offsets)  # experts, and one
    most = (MOST_BLOCKS - more) * height
    if rows <= most:
        if rows:
            yield slice(0, rows), offsets, rows // height + more
        return
    for first in range(0, rows, most):
        last = min(first + most, rows)
        yield slice(first, last), (offsets - first).clamp(0, last - first), (last - first) // height + more


# ----------------------------------------------------------------------------------------------------- W4A16


@dataclass(frozen=True, slots=True)
class PackedW4A16:
    """An NVFP4 weight in the order of the fused kernel's registers: bits moved, none lost, the same size.

    Attributes
    ----------
    words : (pieces, 32, 4) int32
        16 rows x 64 k to a piece, one 16-byte word for each lane.
    scales : (pieces, 8, 2) int32
        E4M3 magnitudes of the piece; their signs are in the codes.
    row_nan : (E, N) uint8
        1 where a row holds a NaN scale: its outputs are NaN.
    shape
        (E, N, K)
    """

    words: torch.Tensor
    scales: torch.Tensor
    row_nan: torch.Tensor
    shape: tuple[int, int, int]


def pack_w4a16(packed: torch.Tensor, scales: torch.Tensor) -> PackedW4A16:
    """Prepare a weight for ``method="fused"``, once after loading.

    Parameters
    ----------
    packed, scales : (E, N, K//2), (E, N, K//16) uint8
        NVFP4 weights of all experts, E4M3 block scales.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``
    DeviceError
        ``ops.memory``
    """
    op = "pack_w4a16"
    check(op, "packed", packed, torch.uint8, None, None, None)
    experts, n, half = packed.shape
    check_multiple(op, "K", 2 * half, 16)
    check(op, "scales", scales, torch.uint8, experts, n, half // 8)
    pieces = experts * -(-n // 16) * -(-half // 32)
    words = empty(op, (pieces, 32, 4), torch.int32, packed.device)
    moved = empty(op, (pieces, 8, 2), torch.int32, packed.device)
    row_nan = empty(op, (experts, n), torch.uint8, packed.device).zero_()
    sizes = (np.int32(experts), np.int32(n), np.int32(2 * half))
    _w4a16("nv_w4a16_prepack")(-(-pieces // 4), THREADS, (packed, scales, words, moved, row_nan, *sizes))
    return PackedW4A16(words, moved, row_nan, (experts, n, 2 * half))


def widened_weight(weight: PackedW4A16) -> torch.Tensor:
    """(E, N, K) bfloat16: what the fused kernel multiplies, ``code * block scale``, exact.  NaN scales read as 480."""
    experts, n, k = weight.shape
    out = empty("widened_weight", (experts, n, k), torch.bfloat16, weight.words.device)
    sizes = (np.int32(experts), np.int32(n), np.int32(k))
    pieces = len(weight.words)
    _w4a16("nv_w4a16_widen")(-(-pieces // 4), THREADS, (weight.words, weight.scales, out, *sizes))
    return out


def grouped_gemm_w4a16(
    x: torch.Tensor,
    packed: torch.Tensor | PackedW4A16,
    scales: torch.Tensor | None,
    decode_scales: torch.Tensor,
    offsets: torch.Tensor,
    method: Literal["fused", "dequantize"] = "fused",
) -> torch.Tensor:
    """``bf16(decode[e] * x[m] · W[e])`` with BF16 activations and NVFP4 weights; activations are never quantised.

    Parameters
    ----------
    x : (R, K) bfloat16
        Sorted by expert.
    packed, scales : (E, N, K//2), (E, N, K//16) uint8
        The weight; or a `PackedW4A16` and None, which saves packing it in every call.
    decode_scales : (E,) float32
        One factor for each expert, ``weight_scale_2``.
    offsets : (E+1,) int32
        First row of each expert.
    method
        ``"fused"`` reads the FP4 bytes once and widens them in registers.  ``"dequantize"`` writes the weight out in
        BF16 first, needs 3.6 times its memory, and rounds to BF16 before the factor as well as after it.

    Returns
    -------
    (R, N) bfloat16; sums in f32, in the hardware's order.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.method``
    DeviceError
        ``ops.memory``: not even one expert's weight fits in BF16.
    """
    op = "grouped_gemm_w4a16"
    if method not in METHODS:
        raise FormatError("ops.method", op=op, method=method, known=", ".join(METHODS))
    ready = isinstance(packed, PackedW4A16)
    if not ready:
        check(op, "packed", packed, torch.uint8, None, None, None)
    experts, n, k = packed.shape if ready else (*packed.shape[:2], packed.shape[2] * 2)
    check(op, "x", x, torch.bfloat16, None, k)
    check(op, "decode_scales", decode_scales, torch.float32, experts)
    check(op, "offsets", offsets, torch.int32, experts + 1)
    check_multiple(op, "K", k, 16)
    check_multiple(op, "N", n, 8)
    if method == "fused":
        return _fused(x, packed if ready else pack_w4a16(packed, scales), decode_scales, offsets)
    if ready:
        raise FormatError("ops.tensor", op=op, name="packed", expected="uint8 (E, N, K/2)", got="PackedW4A16")
    check(op, "scales", scales, torch.uint8, experts, n, k // 16)
    return _dequantized(x, packed, scales, decode_scales, offsets)


def _w4a16(name: str):
    return kernel("gemm_w4a16.cu", name)


def tokens_of_a_block(rows: int, experts: int) -> int:
    """The tile's height: room for what an expert usually gets, since a second tile widens the weight again."""
    mean = rows / max(experts, 1)
    return 16 if mean <= 8 else 32 if mean <= 18 else 64


def shared_bytes(tokens: int) -> int:
    """Shared memory of a block: four stages of weight, scales and activations."""
    return 4 * (2304 * ROW_TILES[tokens] + 128 * tokens)


def _fused(x: torch.Tensor, weight: PackedW4A16, decode_scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    experts, n, k = weight.shape
    rows = x.shape[0]
    op = "grouped_gemm_w4a16"
    out = empty(op, (rows, n), torch.bfloat16, x.device)
    tokens = tokens_of_a_block(rows, experts)
    x, constant = aligned(op, x), (weight.words, weight.scales, weight.row_nan, decode_scales)
    for part, edges, tiles in _launches(rows, offsets, tokens):
        sizes = (np.int32(part.stop - part.start), np.int32(experts), np.int32(n), np.int32(k))
        grid, arguments = (-(-n // (64 * ROW_TILES[tokens])), tiles), (x[part], *constant, edges, out[part], *sizes)
        _w4a16(f"nv_grouped_w4a16_{tokens}")(grid, THREADS, arguments, shared_bytes(tokens))
    return out


# ------------------------------------------------------------------------------------------- decode, then multiply


def _dequantized(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, decode_scales: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """All experts at once; where memory does not suffice, fewer at a time."""
    weight = (packed.shape[1], 2 * packed.shape[2])
    return smaller_until_it_fits(
        "grouped_gemm_w4a16", weight, len(packed),
        lambda chunk: _dequantized_by(chunk, x, packed, scales, decode_scales, offsets),
    )  # fmt: skip


def _dequantized_by(
    chunk: int,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    decode_scales: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    experts, n, half = packed.shape
    rows = x.shape[0]
    if not rows:
        return torch.empty(0, n, dtype=torch.bfloat16, device=x.device)
    out = None if chunk >= experts else torch.zeros(rows, n, dtype=torch.bfloat16, device=x.device)
    starts = None if chunk >= experts else offsets.tolist()  # only cutting into chunks has to wait for the device
    for first in range(0, experts, chunk):
        last = min(first + chunk, experts)
        q = DeviceQuantized(
            packed[first:last].reshape(-1, half), scales[first:last].reshape(-1, half // 8), 1.0, "ieee",
            ((last - first) * n, half * 2), "linear",
        )  # fmt: skip
        weight = dequantize(q, dtype=torch.bfloat16).view(last - first, n, half * 2)
        low, high = (0, rows) if starts is None else (starts[first], starts[last])
        if low == high:
            continue
        edges = offsets[first : last + 1] - low
        product = _grouped_mm(x[low:high], weight, edges[1:]).contiguous()
        grid = (-(-n // (8 * THREADS)), (high - low) // 64 + last - first + 1)
        sizes = (np.int32(high - low), np.int32(last - first), np.int32(n))
        _w4a16("nv_scale_rows")(grid, THREADS, (product, decode_scales[first:last], edges, *sizes))
        if starts is None:
            return product
        out[low:high] = product
    return out


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``x[rows of e] @ weight[e].T`` by torch's own grouped product, or expert by expert where there is none."""
    own = getattr(torch, "_grouped_mm", None)
    if own is not None and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return own(x, weight.transpose(-2, -1), offs=ends)
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    low = 0
    for expert, high in enumerate(ends.tolist()):
        if high > low:
            torch.mm(x[low:high], weight[expert].T, out=out[low:high])
        low = high
    return out
