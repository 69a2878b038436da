"""Number formats to the bit: E2M1, E4M3FN, UE8M0 and BF16, their packing and the layouts of their scales."""

from nvfp4viz.formats.arrays import (
    bf16_to_f32,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    f32_to_bf16,
    widen_e2m1,
)
from nvfp4viz.formats.cards import BF16, BLOCK, E2M1, E4M3, FORMATS, MX_BLOCK, UE8M0, explain
from nvfp4viz.formats.layout import (
    deinterleave_gate_up,
    interleave_gate_up,
    pack_ue8m0,
    swizzle_8x4,
    swizzle_128x4,
    unpack_ue8m0,
    unswizzle_8x4,
    unswizzle_128x4,
    utccp_transpose,
    utccp_untranspose,
)
from nvfp4viz.formats.packing import pack_nibbles, pack_u32, unpack_nibbles, unpack_u32
from nvfp4viz.formats.places import (
    SCALE_LAYOUTS,
    ScaleLayout,
    ScalePlace,
    interleaved_row,
    interleaved_row_at,
    offset_8x4,
    offset_128x4,
    offset_linear,
    padded_code,
    padded_place,
    scale_at,
    swizzled_size,
    ue8m0_place,
    utccp_row,
    utccp_row_at,
)
from nvfp4viz.formats.scalar import (
    bf16_bits_scalar,
    e2m1_code_scalar,
    e4m3_byte_scalar,
    ue8m0_byte_scalar,
    widen_bf16_scalar,
)
from nvfp4viz.formats.tma import TensorMap, check_tensor_map, pad_align16b, unpad_align16b
from nvfp4viz.formats.types import ExplainedValue, FormatInfo

__all__ = [
    "BF16", "BLOCK", "E2M1", "E4M3", "FORMATS", "MX_BLOCK", "SCALE_LAYOUTS", "UE8M0", "ExplainedValue",
    "FormatInfo", "ScaleLayout", "ScalePlace", "TensorMap", "bf16_bits_scalar", "bf16_to_f32", "check_tensor_map",
    "decode_e2m1", "decode_e4m3", "decode_ue8m0", "deinterleave_gate_up", "e2m1_code_scalar", "e4m3_byte_scalar",
    "encode_e2m1", "encode_e4m3", "encode_ue8m0", "explain", "f32_to_bf16", "interleave_gate_up", "interleaved_row",
    "interleaved_row_at", "offset_8x4", "offset_128x4", "offset_linear", "pack_nibbles", "pack_u32", "pack_ue8m0",
    "pad_align16b", "padded_code", "padded_place", "scale_at", "swizzle_8x4", "swizzle_128x4", "swizzled_size",
    "ue8m0_byte_scalar", "ue8m0_place", "unpack_nibbles", "unpack_u32", "unpack_ue8m0", "unpad_align16b",
    "unswizzle_8x4", "unswizzle_128x4", "utccp_row", "utccp_row_at", "utccp_transpose", "utccp_untranspose",
    "widen_bf16_scalar", "widen_e2m1",
]  # fmt: skip
