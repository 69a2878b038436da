// NVFP4: BF16, FP16 or float32 to packed E2M1 codes and one E4M3 scale byte per 16 elements.
//
//   nv_quantize_{bf16,f16,f32}_{ieee,vllm}_linear      scales row by row
//   nv_quantize_{bf16,f16,f32}_{ieee,vllm}_swizzled    scales in the 128x4 layout, padding written as 0
//   nv_quantize_{bf16,f16,f32}_{ieee,vllm}_placed      the same, every range of rows in tiles of its own (ranges.cu)
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

// Every scale at the place of its row.  Grid (columns / (32 * warps in blockDim.x), rows / (2 blockDim.y)): a warp has 16 columns
// of two rows, twice, so that it writes whole lines of codes, and two scale words of every sector that it touches: one row of
// 32 columns takes 4 µs longer on an H200 (8192 x 16384), four rows of eight 1.4.
template <class T, class Recipe>
NV_DEVICE void quantize_placed(const void* x, u64* packed, u8* scales, int rows, int columns, Globals globals, const i8* table,
                               const u32* places) {
  const int lane = threadIdx.x & 31, step = blockDim.x >> 1;
  const int row = 2 * (far_index() * blockDim.y + threadIdx.y) + (lane >> 4);
  const int first = 2 * step * blockIdx.x + 16 * (threadIdx.x >> 5) + (lane & 15);
  const u64 start = (u64)row * columns;
  Raw<16 / T::kPerWord> raw[2];
  NV_UNROLL
  for (int i = 0; i < 2; ++i)
    if (row < rows && first + i * step < columns) raw[i].load(x, start + first + i * step);
  u32 bytes = 0, place = 0;
  if (row < rows) {
    place = __ldg(places + row);
    const Recipe recipe(globals.of(row), table);
    NV_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int column = first + i * step;
      if (column >= columns) break;
      float y[16];
      T::widen(raw[i], y);
      u64 codes;
      bytes |= (u32)quantize16(y, T::top(raw[i], y), recipe, codes) << (8 * i);
      packed[start + column] = codes;
    }
  }
  // Four lanes exchange their scales: of each four the first stores the word of the first block, the second that of the second.
  u32 other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 1);
  bytes = __byte_perm(bytes, other, lane & 1 ? 0x7715 : 0x7740);
  other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 2);
  const int column = (first & ~3) + (lane & 1) * step;
  if ((lane & 3) < 2 && row < rows && column < columns)
    store_placed(scales, place, column, (columns + 3) >> 2, __byte_perm(bytes, other, 0x5410));
}

}  // namespace nv

// Left alone, the compiler aims at 40 or 48 registers here on Ada and Blackwell and spills around IEEE division; four
// blocks leave it 64.  On Hopper and before Ada it does not spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && __CUDA_ARCH__ != 900
#define NV_ROWS_BOUNDS __launch_bounds__(256, 4)
#else
#define NV_ROWS_BOUNDS __launch_bounds__(256)
#endif

// Partial stores take their time: on Hopper as many blocks a multiprocessor as the registers of that form allow without spilling
// (six of bf16_vllm take 98.7 µs, four 104.2).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define NV_PLACED_BOUNDS(blocks) __launch_bounds__(256, blocks)
#else
#define NV_PLACED_BOUNDS(blocks) NV_ROWS_BOUNDS
#endif

#define NV_QUANTIZE(dtype, T, recipe, Recipe, blocks)                                                                      \
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
  }                                                                                                                        \
  extern "C" __global__ void NV_PLACED_BOUNDS(blocks) nv_quantize_##dtype##_##recipe##_placed(                             \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows, int columns,        \
      const float* __restrict__ global_scales, float global_scale, int kind, const nv::i8* __restrict__ table,             \
      const nv::u32* __restrict__ places) {                                                                                \
    nv::quantize_placed<nv::T, nv::Recipe>(x, packed, scales, rows, columns,                                               \
                                           {global_scales, global_scale, 0, 0, kind}, table, places);                      \
  }

NV_QUANTIZE(bf16, Bf16, ieee, Ieee, 5)
NV_QUANTIZE(f16, F16, ieee, Ieee, 5)
NV_QUANTIZE(f32, F32, ieee, Ieee, 4)
NV_QUANTIZE(bf16, Bf16, vllm, VllmCuda, 6)
NV_QUANTIZE(f16, F16, vllm, VllmCuda, 6)
NV_QUANTIZE(f32, F32, vllm, VllmCuda, 5)
