// silu(gate) * up or gelu_tanh(gate) * up, rounded to BF16, to NVFP4 in one pass: BF16 (M, 2I), gate first, to (M, I).
//
//   nv_activation_quantize_{ieee,vllm}_{linear,swizzled}_{shared,global}
//
// The activation is a table made by nvfp4viz.moe (activation.cuh), so its bits are the CPU's on every GPU.
// The `shared` kernels copy the table into every block's shared memory and stay on their multiprocessors; the `global`
// ones read it through the cache, for inputs too small to repay the copy.

#include "activation.cuh"
#include "blocks.cuh"

namespace nv {

NV_DEVICE u32 pair_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
  return r;
#else
  return to_bf16(low) | (u32)to_bf16(high) << 16;
#endif
}

// Products of 16 gates and ups, as BF16.
NV_DEVICE Raw<8> gated(const Raw<8>& gates, const Raw<8>& ups, const Activation& activation) {
  u32 smallest = 0x7FFF7FFFu, largest = 0;
  NV_UNROLL
  for (int i = 0; i < 8; ++i) {
    smallest = __vminu2(smallest, gates.word(i) & 0x7FFF7FFFu);
    largest = __vmaxu2(largest, gates.word(i) & 0x7FFF7FFFu);
  }
  const bool all_inside = min(smallest & 0xFFFFu, smallest >> 16) >= kFirstMagnitude &&
                          max(largest & 0xFFFFu, largest >> 16) < kFirstMagnitude + kPerSign;
  u32 word[8];
  if (all_inside) {
    NV_UNROLL
    for (int i = 0; i < 8; ++i) {
      const u32 moved = gates.word(i) - kFirstMagnitude * 0x10001u, up = ups.word(i);  // no borrow between the halves
      word[i] = pair_bf16(multiply(activation.inside(moved), value(up << 16)),
                          multiply(activation.inside(moved >> 16), value(up & 0xFFFF0000u)));
    }
  } else {
    NV_UNROLL
    for (int i = 0; i < 8; ++i) {
      const u32 gate = gates.word(i), up = ups.word(i);
      word[i] = pair_bf16(multiply(activation.of(gate & 0xFFFFu), value(up << 16)),
                          multiply(activation.of(gate >> 16), value(up & 0xFFFF0000u)));
    }
  }
  Raw<8> out;
  out.part[0] = make_uint4(word[0], word[1], word[2], word[3]);
  out.part[1] = make_uint4(word[4], word[5], word[6], word[7]);
  return out;
}

// `columns` blocks of 16 outputs a row.  A tile is what one block of threads takes, and `across` of them lie in a row: in
// the linear layout blockDim.y rows of blockDim.x columns, in the 128x4 layout a quarter's rows of 8 columns.  Blocks of
// threads go from tile to tile.
template <class Recipe, bool kSwizzled>
NV_DEVICE void activation_quantize(const void* x, u64* packed, u8* scales, int rows, int columns, int across, int tiles_of_all,
                                   const Globals& globals, const i8* reciprocals, const Activation& activation) {
  const int tiles = (columns + 3) >> 2;
  for (int tile = blockIdx.x; tile < tiles_of_all; tile += gridDim.x) {
    const int down = tile / across, right = tile - down * across;
    int row, column, place = 0, range = -1;
    if (kSwizzled) {
      const Tile128x4 at(down, rows, globals.offsets, globals.ranges);
      row = at.row, place = at.place, range = at.range;
      column = right * 8 + at.column();
    } else {
      row = down * (int)blockDim.y + (int)threadIdx.y;
      column = right * (int)blockDim.x + (int)threadIdx.x;
    }
    u8 byte = 0;
    if (row >= 0 && row < rows && column < columns) {
      const u64 start = (u64)row * columns;
      Raw<8> gates, ups;
      gates.load(x, 2 * start + column);
      ups.load(x, 2 * start + columns + column);
      const Recipe recipe(kSwizzled ? globals.of(row, range) : globals.of(row), reciprocals);
      const Raw<8> products = gated(gates, ups, activation);
      float y[16];
      Bf16::widen(products, y);
      u64 codes;
      byte = quantize16(y, Bf16::top(products, y), recipe, codes);
      packed[start + column] = codes;
      if (!kSwizzled) scales[start + column] = byte;
    }
    if (kSwizzled && column < 4 * tiles) scales[offset_128x4(place, column, tiles)] = byte;
  }
}

NV_DEVICE void copy_table(const float* table, float* shared) {
  const int me = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (int i = me; i < (int)kTableSize / 4; i += threads)
    reinterpret_cast<float4*>(shared)[i] = __ldg(reinterpret_cast<const float4*>(table) + i);
  __syncthreads();
}

}  // namespace nv

#define NV_ACTIVATION(recipe, Recipe, layout, swizzled, where, in_shared)                                             \
  extern "C" __global__ void __launch_bounds__(256) nv_activation_quantize_##recipe##_##layout##_##where(            \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows, int columns,   \
      int across, int tiles_of_all, const float* __restrict__ global_scales, float global_scale,                      \
      const int* __restrict__ offsets, int ranges, int kind, const nv::i8* __restrict__ reciprocals,                  \
      const float* __restrict__ table, int rounds_tiny) {                                                             \
    __shared__ float4 copy[in_shared ? nv::kTableSize / 4 : 1];                                                       \
    float* shared = reinterpret_cast<float*>(copy);                                                                   \
    if (in_shared) nv::copy_table(table, shared);                                                                     \
    nv::activation_quantize<nv::Recipe, swizzled>(x, packed, scales, rows, columns, across, tiles_of_all,             \
                                                  {global_scales, global_scale, offsets, ranges, kind}, reciprocals,  \
                                                  {in_shared ? shared : table, rounds_tiny != 0});                    \
  }

#define NV_ACTIVATION_LAYOUTS(recipe, Recipe)                         \
  NV_ACTIVATION(recipe, Recipe, linear, false, shared, true)          \
  NV_ACTIVATION(recipe, Recipe, linear, false, global, false)         \
  NV_ACTIVATION(recipe, Recipe, swizzled, true, shared, true)         \
  NV_ACTIVATION(recipe, Recipe, swizzled, true, global, false)

NV_ACTIVATION_LAYOUTS(ieee, Ieee)
NV_ACTIVATION_LAYOUTS(vllm, VllmCuda)
