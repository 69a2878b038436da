"""NVFP4 products by the library, ``torch.nn.functional.scaled_mm``, on data-centre Blackwell (capability 10.x).

Those GPUs multiply NVFP4 through another instruction than `kernels/gemm_w4a4.cu` uses (``tcgen05``), which cuBLASLt
knows.  A library may cut and order K as it likes, so its last bits are not the defined ones; it is asked for by name
and used where it works.  Whether it does is found out once for each device, with two small products that are compared
with the kernel's: the op is let through on GPUs where cuBLASLt then refuses.  No such GPU has run this yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch

from nvfp4viz.device.ops.groups import empty
from nvfp4viz.device.ops.layout import scale_tile_offsets, swizzle, unswizzle
from nvfp4viz.quant import RECIPES

if TYPE_CHECKING:
    from nvfp4viz.device.ops.quantize import DeviceQuantized

__all__ = ["library_fits", "library_works", "scaled_mm_grouped"]


ROWS, N, K = 147, 48, 192  # of the probe


@cache
def library_works(index: int) -> bool:
    """Whether the library multiplies NVFP4 on this device, and rightly.  Computes once, waits for the device."""
    functional = torch.nn.functional
    named = all(hasattr(functional, name) for name in ("scaled_mm", "ScalingType", "SwizzleType"))
    if not named or torch.cuda.get_device_capability(index)[0] != 10:
        return False
    return agrees(torch.device("cuda", index))


def agrees(device: torch.device) -> bool:
    """Compare the library's products of two small ragged cases with the kernel's; a refusal counts as no.

    The first has scales as they come (0.5 … 3.75): both truncate sums of at most 192 products at a bit far below
    BF16's, and one unit in the last place of BF16 (2^-7, relative) may differ.  The second has scales that a library
    may read otherwise: zero, subnormal, with the sign bit (which UE4M3 does not have), NaN.  All its sums are whole
    multiples of 2^-20 below 2^23 of them, exact in f32 in any order, so nothing may differ.
    """
    from nvfp4viz.device.ops.gemm import grouped_gemm_w4a4
    from nvfp4viz.device.ops.quantize import DeviceQuantized

    for a_scales, b_scales, factor, exact in _probe_scales():
        generator = torch.Generator().manual_seed(0)
        codes = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
            for shape in ((ROWS, K // 2), (3, N, K // 2))
        ]
        a = DeviceQuantized(codes[0], a_scales.to(device), 1.0, "ieee", (ROWS, K))
        offsets = torch.tensor([0, 17, 17, ROWS], dtype=torch.int32, device=device)
        alphas = torch.tensor([0.5, 1.0, -0.25], device=device) * factor
        operands = (a, codes[1], b_scales.to(device), offsets, alphas)
        ours = grouped_gemm_w4a4(*operands).float()
        try:
            theirs = scaled_mm_grouped(*operands, torch.bfloat16).float()
        except (RuntimeError, ValueError, TypeError):  # CUBLAS_STATUS_NOT_SUPPORTED; another signature
            return False
        near = theirs == ours if exact else (theirs - ours).abs() <= ours.abs() * 2.0**-7 + 2.0**-6
        if not bool((near | (theirs.isnan() & ours.isnan())).all()):
            return False
    return True


def _probe_scales() -> Iterator[tuple[torch.Tensor, torch.Tensor, float, bool]]:
    """Scale bytes of both sides, a factor that makes the results ordinary numbers, whether they must be equal."""
    generator = torch.Generator().manual_seed(1)
    shapes = (ROWS, K // 16), (3, N, K // 16)

    def random(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    yield random(0x30, 0x48, shapes[0]), random(0x30, 0x48, shapes[1]), 1.0, False
    a, b = (random(0, 0x10, shape) | random(0, 2, shape) * 0x80 for shape in shapes)
    a[5, 0], a[140, -1], b[0, 7, 3], b[2, 40, -1] = 0x7F, 0xFF, 0xFF, 0x7F
    yield a, b, 2.0**18, True


def library_fits(a: DeviceQuantized, n: int, row_alphas: torch.Tensor | None) -> bool:
    """Whether the library takes these operands at all: NVFP4, N and K multiples of 16, one factor an expert."""
    return RECIPES[a.recipe].scheme == "nvfp4" and a.shape[1] % 16 == 0 and n % 16 == 0 and row_alphas is None


def scaled_mm_grouped(
    a: DeviceQuantized,
    b_packed: torch.Tensor,
    b_scales: torch.Tensor,
    offsets: torch.Tensor,
    alphas: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `grouped_gemm_w4a4`, expert by expert; waits for the device to learn how many rows each has."""
    functional = torch.nn.functional
    scaling, order = functional.ScalingType, functional.SwizzleType
    recipe, swizzles = [scaling.BlockWise1x16, scaling.TensorWise], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]
    (rows, k), (experts, n, _) = a.shape, b_packed.shape
    columns = -(-k // 16)
    padded = -(-columns // 4) * 4
    a_scales, tiles = a.scales, scale_tile_offsets(offsets)
    if a.layout == "linear" or a.offsets is None:
        linear = a_scales if a.layout == "linear" else unswizzle(a_scales, (rows, columns))
        a_scales = swizzle(linear, offsets)
    weight_scales = swizzle(b_scales) if a.layout == "linear" else b_scales
    weight_scales = weight_scales.view(experts, -(-n // 128) * 128 * padded)
    out = empty("grouped_gemm_w4a4", (rows, n), out_dtype, a.packed.device).zero_()
    one = torch.ones(1, dtype=torch.float32, device=a.packed.device)
    starts, scale_starts = offsets.tolist(), tiles.tolist()
    fp4, fp8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    for expert in range(experts):
        low, high = starts[expert], starts[expert + 1]
        if low == high:
            continue
        scales = a_scales[scale_starts[expert] * padded : scale_starts[expert + 1] * padded]
        out[low:high] = functional.scaled_mm(
            a.packed[low:high].view(fp4),
            b_packed[expert].view(fp4).t(),
            [scales.view(fp8), alphas[expert : expert + 1]],
            recipe,
            [weight_scales[expert].view(fp8), one],
            recipe,
            swizzle_a=swizzles,
            swizzle_b=swizzles,
            output_dtype=out_dtype,
        )
    return out
