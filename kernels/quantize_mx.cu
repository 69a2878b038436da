// MXFP4: BF16, FP16 or float32 to packed E2M1 codes and one UE8M0 scale byte per 32 elements, by four scale rules.
//
//   nv_quantize_mx_{bf16,f16,f32}_{ocp_floor,vllm_even,flashinfer_ceil,deepgemm_ceil}_{flat,swizzled}
//
// The arithmetic is recipes.cuh; nvfp4viz/device/ops/quantize.py launches.

#include "blocks.cuh"

namespace nv {

template <class Rule>
NV_DEVICE u8 quantize_one(const float (&y)[32], float top, u64* packed, u64 block, const i8* table) {
  u64 low, high;
  const u8 byte = quantize32<Rule>(y, top, table, low, high);
  reinterpret_cast<ulonglong2*>(packed)[block] = make_ulonglong2(low, high);
  return byte;
}

template <class T, class Rule>
NV_DEVICE void quantize_mx_flat(const void* x, u64* packed, u8* scales, u64 blocks, const i8* table) {
  const u64 block = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  Raw<32 / T::kPerWord> raw;
  raw.load(x, block);
  float y[32];
  T::widen(raw, y);
  scales[block] = quantize_one<Rule>(y, T::top(raw, y), packed, block, table);
}

// Grid: as that of quantize_swizzled in quantize.cu.
template <class T, class Rule>
NV_DEVICE void quantize_mx_swizzled(const void* x, u64* packed, u8* scales, int rows, int columns, const i8* table) {
  const int warp = threadIdx.x >> 5, quarter = far_index(), tiles = (columns + 3) >> 2;
  const Strip128x4 at(quarter >> 2, 2 * (quarter & 3) + (warp & 1), 4 * blockIdx.x + (warp >> 1));
  if (128 * at.tile >= rows || at.left() >= 4 * tiles) return;
  u32 bytes = 0;
  NV_ROLLED
  for (int k = 0; k < 4 && at.top() + 32 * k < rows; ++k) {
    const int row = at.row + 32 * k;
    if (row >= rows || at.column >= columns) continue;
    const u64 block = (u64)row * columns + at.column;
    Raw<32 / T::kPerWord> raw;
    raw.load(x, block);
    float y[32];
    T::widen(raw, y);
    bytes |= (u32)quantize_one<Rule>(y, T::top(raw, y), packed, block, table) << (8 * k);
  }
  at.store(scales, bytes, tiles);
}

}  // namespace nv

#define NV_QUANTIZE_MX(dtype, T, rule, Rule)                                                                     \
  extern "C" __global__ void __launch_bounds__(128) nv_quantize_mx_##dtype##_##rule##_flat(                      \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, nv::u64 blocks,     \
      const nv::i8* __restrict__ table) {                                                                        \
    nv::quantize_mx_flat<nv::T, nv::Rule>(x, packed, scales, blocks, table);                                     \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) nv_quantize_mx_##dtype##_##rule##_swizzled(                  \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows,           \
      int columns, const nv::i8* __restrict__ table) {                                                           \
    nv::quantize_mx_swizzled<nv::T, nv::Rule>(x, packed, scales, rows, columns, table);                          \
  }

#define NV_QUANTIZE_MX_DTYPES(rule, Rule, Half)  \
  NV_QUANTIZE_MX(bf16, Bf16, rule, Rule)         \
  NV_QUANTIZE_MX(f16, Half, rule, Rule)          \
  NV_QUANTIZE_MX(f32, F32, rule, Rule)

NV_QUANTIZE_MX_DTYPES(ocp_floor, OcpFloor, F16Exact)
NV_QUANTIZE_MX_DTYPES(vllm_even, VllmEven, F16)
NV_QUANTIZE_MX_DTYPES(flashinfer_ceil, FlashinferCeil, F16)
NV_QUANTIZE_MX_DTYPES(deepgemm_ceil, DeepgemmCeil, F16)
