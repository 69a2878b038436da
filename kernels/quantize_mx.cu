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

// Grid (columns / 8, quarters of 128 rows): see Quarter128x4.
template <class T, class Rule>
NV_DEVICE void quantize_mx_swizzled(const void* x, u64* packed, u8* scales, int rows, int columns, const int* places, const i8* table) {
  const Quarter128x4 at(far_index(), threadIdx.x >> 5);
  const int tiles = (columns + 3) >> 2, column = blockIdx.x * 8 + at.column;
  if (column >= 4 * tiles || (places != 0 && at.row >= rows)) return;
  u8 byte = 0;
  if (at.row < rows && column < columns) {
    const u64 block = (u64)at.row * columns + column;
    Raw<32 / T::kPerWord> raw;
    raw.load(x, block);
    float y[32];
    T::widen(raw, y);
    byte = quantize_one<Rule>(y, T::top(raw, y), packed, block, table);
  }
  scales[offset_128x4(places == 0 ? at.row : __ldg(places + at.row), column, tiles)] = byte;
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
      int columns, const int* __restrict__ places, const nv::i8* __restrict__ table) {                           \
    nv::quantize_mx_swizzled<nv::T, nv::Rule>(x, packed, scales, rows, columns, places, table);                  \
  }

#define NV_QUANTIZE_MX_DTYPES(rule, Rule, Half)  \
  NV_QUANTIZE_MX(bf16, Bf16, rule, Rule)         \
  NV_QUANTIZE_MX(f16, Half, rule, Rule)          \
  NV_QUANTIZE_MX(f32, F32, rule, Rule)

NV_QUANTIZE_MX_DTYPES(ocp_floor, OcpFloor, F16Exact)
NV_QUANTIZE_MX_DTYPES(vllm_even, VllmEven, F16)
NV_QUANTIZE_MX_DTYPES(flashinfer_ceil, FlashinferCeil, F16)
NV_QUANTIZE_MX_DTYPES(deepgemm_ceil, DeepgemmCeil, F16)
