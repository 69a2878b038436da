"""Every GEMM, routing and layout kernel once on small ragged shapes, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python3 -m tests.gpu.gemm_once

and likewise ``--tool racecheck``, and ``--tool initcheck`` with ``--own-product``; see ``streaming_once.py``.

``torch._grouped_mm`` is a CUTLASS kernel that stores through TMA.  initcheck does not see such stores: it takes the
product for uninitialised where ``nv_scale_rows`` reads it, and reports reads inside that kernel itself (H200, torch
2.11: 8465 errors, all of these two kernels).  ``--own-product`` puts sums of products in its place.
"""

from __future__ import annotations

import sys

import torch

from nvfp4viz.device import ops
from nvfp4viz.device.ops import gemm

COUNTS = (0, 1, 127, 128, 129)
EXPERTS, ROWS, N = len(COUNTS), sum(COUNTS), 136  # N ends inside a block
GENERATOR = torch.Generator(device="cuda").manual_seed(0)


def random_bytes(*shape: int) -> torch.Tensor:
    """Codes, or scales without a NaN."""
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8, device="cuda", generator=GENERATOR)


def multiply(offsets: torch.Tensor, alphas: torch.Tensor) -> None:
    for recipe, block, k in (("ieee", 16, 336), ("ocp-floor", 32, 352)):  # K ends inside a step
        a, a_scales = random_bytes(ROWS, k // 2), random_bytes(ROWS, k // block)
        b, b_scales = random_bytes(EXPERTS, N, k // 2), random_bytes(EXPERTS, N, k // block)
        linear = ops.DeviceQuantized(a, a_scales, 1.0, recipe, (ROWS, k))
        tiles = ops.DeviceQuantized(a, ops.swizzle(a_scales, offsets), 1.0, recipe, (ROWS, k), "swizzled", offsets)
        for dtype in (torch.bfloat16, torch.float32):
            for soft in (False, True):
                ops.grouped_gemm_w4a4(linear, b, b_scales, offsets, alphas, dtype, soft=soft)
                ops.grouped_gemm_w4a4(tiles, b, ops.swizzle(b_scales), offsets, alphas, dtype, soft=soft)
    for kind, each in (("nvfp4", 4), ("mxfp4", 2)):
        operands = (random_bytes(13, 16, 32), random_bytes(13, 16, each), random_bytes(13, 8, 32))
        ops.mma_tiles(*operands, random_bytes(13, 8, each), torch.randn(13, 16, 8, device="cuda"), kind=kind)


def multiply_bf16(offsets: torch.Tensor, alphas: torch.Tensor) -> None:
    k = 336
    packed, scales = random_bytes(EXPERTS, N, k // 2), random_bytes(EXPERTS, N, k // 16)
    x = torch.randn(ROWS, k, device="cuda", generator=GENERATOR).to(torch.bfloat16)
    weight = ops.pack_w4a16(packed, scales)
    ops.widened_weight(weight)
    chosen = gemm.tokens_of_a_block
    for tokens in gemm.ROW_TILES:
        gemm.tokens_of_a_block = lambda rows, experts, tokens=tokens: tokens
        ops.grouped_gemm_w4a16(x, weight, None, alphas, offsets)
        ops.grouped_gemm_w4a16(x, weight, None, alphas, offsets - offsets.clamp(max=5))  # rows behind the last expert
    gemm.tokens_of_a_block = chosen
    ops.grouped_gemm_w4a16(x, packed, scales, alphas, offsets, "dequantize")


def product_without_tma(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``x[rows of e] @ weight[e].T``, by multiplying and adding alone."""
    out = torch.zeros(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    low = 0
    for expert, high in enumerate(ends.tolist()):
        out[low:high] = (x[low:high, None].float() * weight[expert].float()).sum(-1).to(x.dtype)
        low = high
    return out


def route() -> None:
    x = torch.randn(300, 328, device="cuda", generator=GENERATOR).to(torch.bfloat16)
    ids = torch.rand(300, 16, device="cuda", generator=GENERATOR).topk(4).indices.to(torch.int32)
    here = torch.arange(16, dtype=torch.int32, device="cuda")
    for experts, expert_map in ((16, None), (8, torch.where(here % 2 == 0, here // 2, -1).to(torch.int32))):
        permuted = ops.permute(x, ids, experts, expert_map)
        ops.unpermute(permuted.rows, permuted, torch.rand(300, 4, device="cuda"))


def lay_out(offsets: torch.Tensor) -> None:
    for columns in (21, 24):
        scales = random_bytes(EXPERTS, N, columns)
        ops.unswizzle(ops.swizzle(scales), (EXPERTS, N, columns))
        rows = random_bytes(ROWS, columns)
        ops.unswizzle(ops.swizzle(rows, offsets), (ROWS, columns), offsets)
    for columns in (22, 32):
        ops.interleave_gate_up(random_bytes(3, 48, columns))
    ops.pack_ue8m0(random_bytes(33, 12))


def main() -> None:
    if "--own-product" in sys.argv:
        gemm._grouped_mm = product_without_tma
    offsets = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    alphas = torch.rand(EXPERTS, device="cuda", generator=GENERATOR)
    multiply(offsets, alphas)
    multiply_bf16(offsets, alphas)
    route()
    lay_out(offsets)
    torch.cuda.synchronize()
    print("every GEMM, routing and layout kernel ran")


if __name__ == "__main__":
    main()
