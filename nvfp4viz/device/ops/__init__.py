"""NVFP4 on torch's CUDA tensors: CUDA tensors in, CUDA tensors out, on torch's current stream, the CPU path's bits
(but for W4A16 sums and products left to the library: see `grouped_gemm_w4a16` and `scaled_mm`).

Importing this package imports torch.  Nothing here waits for the device, but where an op says so; so nothing looks at
the values of `offsets` either.  They must ascend from 0 and end at or before the number of rows: a kernel trusts them,
and `check_offset_values` looks.
"""

from nvfp4viz.device.ops.activation import activation_quantize
from nvfp4viz.device.ops.amax import amax
from nvfp4viz.device.ops.checks import check_offset_values
from nvfp4viz.device.ops.dequantize import dequantize
from nvfp4viz.device.ops.gemm import (
    PackedW4A16,
    grouped_gemm_w4a4,
    grouped_gemm_w4a16,
    pack_w4a16,
    widened_weight,
)
from nvfp4viz.device.ops.layout import interleave_gate_up, pack_ue8m0, scale_tile_offsets, swizzle, unswizzle
from nvfp4viz.device.ops.mma import has_instruction, mma_tiles
from nvfp4viz.device.ops.permute import Permuted, permute, unpermute
from nvfp4viz.device.ops.quantize import DeviceQuantized, quantize

__all__ = [
    "DeviceQuantized", "PackedW4A16", "Permuted", "activation_quantize", "amax", "check_offset_values", "dequantize",
    "grouped_gemm_w4a4", "grouped_gemm_w4a16", "has_instruction", "interleave_gate_up", "mma_tiles", "pack_ue8m0",
    "pack_w4a16", "permute", "quantize", "scale_tile_offsets", "swizzle", "unpermute", "unswizzle", "widened_weight",
]  # fmt: skip
