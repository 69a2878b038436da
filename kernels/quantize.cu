// NVFP4: BF16, FP16 or float32 to packed E2M1 codes and one E4M3 scale byte per 16 elements.
//
//   nv_quantize_{bf16,f16,f32}_{ieee,vllm}_linear      scales row by row
//   nv_quantize_{bf16,f16,f32}_{ieee,vllm}_swizzled    scales in the 128x4 layout, padding written as 0
//
// The arithmetic is recipes.cuh; nvfp4viz/device/ops/quantize.py launches.

#include "blocks.cuh"

namespace nv {

// Grid (columns / (2 blockDim.x), rows / blockDim.y): a row and its blocks are found without a division.  Two blocks a
// thread, blockDim.x apart: both loads are under way before the first is used.
template <class T, class Recipe>
NV_DEVICE void quantize_linear(const void* x, u64* packed, u8* scales, int rows, int columns, Globals globals, const i8* table) {
  const int row = far_index() * blockDim.y + threadIdx.y;
  const int step = blockDim.x, first = blockIdx.x * (2 * step) + threadIdx.x;
  if (row >= rows) return;
  const u64 start = (u64)row * columns;
  Raw<16 / T::kPerWord> raw[2];
  NV_UNROLL
  for (int i = 0; i < 2; ++i)
    if (first + i * step < columns) raw[i].load(x, start + first + i * step);
  const Recipe recipe(globals.of(row), table);  // looked up while the elements are on their way
  NV_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int column = first + i * step;
    if (column >= columns) return;
    float y[16];
    T::widen(raw[i], y);
    u64 codes;
    scales[start + column] = quantize16(y, T::top(raw[i], y), recipe, codes);
    packed[start + column] = codes;
  }
}

// Grid (columns / 32, quarters of 128 rows), columns first, so that blocks at work together read whole rows:
// the eight warps of a block take two strips side by side in each of four groups of 8 columns.
template <class T, class Recipe>
NV_DEVICE void quantize_swizzled(const void* x, u64* packed, u8* scales, int rows, int columns, Globals globals,
                                 const i8* table) {
  const int warp = threadIdx.x >> 5, quarter = far_index(), tiles = (columns + 3) >> 2;
  const Strip128x4 at(quarter >> 2, 2 * (quarter & 3) + (warp & 1), 4 * blockIdx.x + (warp >> 1));
  if (128 * at.tile >= rows || at.left() >= 4 * tiles) return;
  u32 bytes = 0;
  NV_ROLLED
  for (int k = 0; k < 4 && at.top() + 32 * k < rows; k += 2) {  // two loads are under way before the first is used
    Raw<16 / T::kPerWord> raw[2];
    NV_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = at.row + 32 * (k + i);
      if (row < rows && at.column < columns) raw[i].load(x, (u64)row * columns + at.column);
    }
    NV_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = at.row + 32 * (k + i);
      if (row >= rows || at.column >= columns) continue;
      const Recipe recipe(globals.of(row), table);
      float y[16];
      T::widen(raw[i], y);
      u64 codes;
      bytes |= (u32)quantize16(y, T::top(raw[i], y), recipe, codes) << (8 * (k + i));
      packed[(u64)row * columns + at.column] = codes;
    }
  }
  at.store(scales, bytes, tiles);
}

}  // namespace nv

// Left alone, the compiler aims at 40 or 48 registers here on Ada and Blackwell and spills around IEEE division; four
// blocks leave it 64.  On Hopper and before Ada it does not spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && __CUDA_ARCH__ != 900
#define NV_ROWS_BOUNDS __launch_bounds__(256, 4)
#else
#define NV_ROWS_BOUNDS __launch_bounds__(256)
#endif

#define NV_QUANTIZE(dtype, T, recipe, Recipe)                                                                              \
  extern "C" __global__ void NV_ROWS_BOUNDS nv_quantize_##dtype##_##recipe##_linear(                                       \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows, int columns,        \
      const float* __restrict__ global_scales, float global_scale, const int* __restrict__ offsets, int ranges, int kind,  \
      const nv::i8* __restrict__ table) {                                                                                  \
    nv::quantize_linear<nv::T, nv::Recipe>(x, packed, scales, rows, columns,                                               \
                                           {global_scales, global_scale, offsets, ranges, kind}, table);                   \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) nv_quantize_##dtype##_##recipe##_swizzled(                             \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows, int columns,        \
      const float* __restrict__ global_scales, float global_scale, int kind,                                               \
      const nv::i8* __restrict__ table) {                                                                                  \
    nv::quantize_swizzled<nv::T, nv::Recipe>(x, packed, scales, rows, columns,                                             \
                                             {global_scales, global_scale, 0, 0, kind}, table);                            \
  }

NV_QUANTIZE(bf16, Bf16, ieee, Ieee)
NV_QUANTIZE(f16, F16, ieee, Ieee)
NV_QUANTIZE(f32, F32, ieee, Ieee)
NV_QUANTIZE(bf16, Bf16, vllm, VllmCuda)
NV_QUANTIZE(f16, F16, vllm, VllmCuda)
NV_QUANTIZE(f32, F32, vllm, VllmCuda)
