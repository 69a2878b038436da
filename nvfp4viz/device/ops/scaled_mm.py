"""NVFP4 products by the library, ``torch.nn.functional.scaled_mm``, on data-centre Blackwell (capability 10.x).

Those GPUs multiply NVFP4 through another instruction than `kernels/gemm_w4a4.cu` uses (``tcgen05``), which cuBLASLt
knows.  A library may cut and order K as it likes, so its last bits are not the defined ones; it is asked for by name
and used where it works.  Whether it does is found out once for each device, with a small product that is compared with
the kernel's: the op is let through on GPUs where cuBLASLt then refuses.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from nvfp4viz.device.ops.groups import empty
from nvfp4viz.device.ops.layout import scale_tile_offsets, swizzle, unswizzle
from nvfp4viz.quant import RECIPES

if TYPE_CHECKING:
    from nvfp4viz.device.ops.quantize import DeviceQuantized

__all__ = ["library_fits", "library_works", "scaled_mm_grouped"]


@cache
def library_works(index: int) -> bool:
    """Whether the library multiplies NVFP4 on this device, and rightly.  Computes once, waits for the device."""
    functional = torch.nn.functional
    named = all(hasattr(functional, name) for name in ("scaled_mm", "ScalingType", "SwizzleType"))
    if not named or torch.cuda.get_device_capability(index)[0] != 10:
        return False
    return agrees(torch.device("cuda", index))


def agrees(device: torch.device) -> bool:
    """Compare the library's product of a small ragged case with the kernel's; a refusal counts as no."""
    from nvfp4viz.device.ops.gemm import grouped_gemm_w4a4
    from nvfp4viz.device.ops.quantize import DeviceQuantized

    generator = torch.Generator().manual_seed(0)

    def bytes_(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).to(device)

    rows, n, k = 147, 48, 192
    a = DeviceQuantized(bytes_(0, 256, rows, k // 2), bytes_(0x30, 0x48, rows, k // 16), 1.0, "ieee", (rows, k))
    b, b_scales = bytes_(0, 256, 3, n, k // 2), bytes_(0x30, 0x48, 3, n, k // 16)
    offsets = torch.tensor([0, 17, 17, rows], dtype=torch.int32, device=device)
    alphas = torch.tensor([0.5, 1.0, -0.25], device=device)
    ours = grouped_gemm_w4a4(a, b, b_scales, offsets, alphas).float()
    try:
        theirs = scaled_mm_grouped(a, b, b_scales, offsets, alphas, torch.bfloat16).float()
    except (RuntimeError, ValueError, TypeError):  # CUBLAS_STATUS_NOT_SUPPORTED; another signature
        return False
    # Both truncate sums of at most 192 products at a bit far below BF16's: one unit in the last place of BF16.
    return bool(((theirs - ours).abs() <= ours.abs() * 2.0**-7 + 2.0**-6).all())


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
