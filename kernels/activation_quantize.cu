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

struct Work {
  const void* x;
  u64* packed;
  u8* scales;
  u32 rows, columns;  // columns: blocks of 16 outputs in a row
  Globals globals;
  const i8* reciprocals;
};

// One block of outputs: its scale byte; the codes are stored.
template <class Recipe>
NV_DEVICE u8 one_block(const Work& work, const Activation& activation, u32 row, u32 column, float global) {
  const u64 start = (u64)row * work.columns;
  Raw<8> gates, ups;
  gates.load(work.x, 2 * start + column);
  ups.load(work.x, 2 * start + work.columns + column);
  const Recipe recipe(global, work.reciprocals);
  const Raw<8> products = gated(gates, ups, activation);
  float y[16];
  Bf16::widen(products, y);
  u64 codes;
  const u8 byte = quantize16(y, Bf16::top(products, y), recipe, codes);
  work.packed[start + column] = codes;
  return byte;
}

// Blocks of threads stay and take every gridDim.x-th piece of the work.
template <class Recipe>
NV_DEVICE void activation_linear(const Work& work, const Activation& activation) {
  const u32 blocks = work.rows * work.columns, stride = gridDim.x * blockDim.x;
  for (u32 block = blockIdx.x * blockDim.x + threadIdx.x; block < blocks; block += stride) {
    const u32 row = block / work.columns;
    work.scales[block] = one_block<Recipe>(work, activation, row, block - row * work.columns, work.globals.of(row));
  }
}

// A warp takes a strip; eight with the same columns are neighbours.
template <class Recipe>
NV_DEVICE void activation_swizzled(const Work& work, const Activation& activation) {
  const u32 tiles = (work.columns + 3) >> 2, across = (work.columns + 7) >> 3;
  const u32 strips = (work.rows + 127) / 128 * across * 8, stride = gridDim.x * (blockDim.x >> 5);
  for (u32 strip = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); strip < strips; strip += stride) {
    const u32 tile = (strip >> 3) / across;
    const Strip128x4 at(tile, strip & 7, (strip >> 3) - tile * across);
    u32 bytes = 0;
    NV_ROLLED
    for (int k = 0; k < 4 && at.top() + 32 * k < (int)work.rows; ++k) {
      const int row = at.row + 32 * k;
      if (row < (int)work.rows && at.column < (int)work.columns)
        bytes |= (u32)one_block<Recipe>(work, activation, row, at.column, work.globals.of(row)) << (8 * k);
    }
    at.store(work.scales, bytes, tiles);
  }
}

NV_DEVICE void copy_table(const float* table, float* shared) {
  const int me = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (int i = me; i < (int)kTableSize / 4; i += threads)
    reinterpret_cast<float4*>(shared)[i] = __ldg(reinterpret_cast<const float4*>(table) + i);
  __syncthreads();
}

}  // namespace nv

// With the table in shared memory three blocks fit a multiprocessor of Hopper's; left alone, the compiler takes registers for
// two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define NV_STAYING_BOUNDS(in_shared) __launch_bounds__(512, in_shared ? 3 : 0)
#else
#define NV_STAYING_BOUNDS(in_shared) __launch_bounds__(512)
#endif

#define NV_ACTIVATION(recipe, Recipe, layout, where, in_shared)                                                        \
  extern "C" __global__ void NV_STAYING_BOUNDS(in_shared) nv_activation_quantize_##recipe##_##layout##_##where(             \
      const void* __restrict__ x, nv::u64* __restrict__ packed, nv::u8* __restrict__ scales, int rows, int columns,    \
      const float* __restrict__ global_scales, float global_scale, int kind,                                           \
      const nv::i8* __restrict__ reciprocals, const float* __restrict__ table, int rounds_tiny) {                      \
    __shared__ float4 copy[in_shared ? nv::kTableSize / 4 : 1];                                                        \
    float* shared = reinterpret_cast<float*>(copy);                                                                    \
    if (in_shared) nv::copy_table(table, shared);                                                                      \
    nv::activation_##layout<nv::Recipe>({x, packed, scales, (nv::u32)rows, (nv::u32)columns,                           \
                                         {global_scales, global_scale, 0, 0, kind}, reciprocals},                      \
                                        {in_shared ? shared : table, rounds_tiny != 0});                               \
  }

#define NV_ACTIVATION_LAYOUTS(recipe, Recipe)              \
  NV_ACTIVATION(recipe, Recipe, linear, shared, true)      \
  NV_ACTIVATION(recipe, Recipe, linear, global, false)     \
  NV_ACTIVATION(recipe, Recipe, swizzled, shared, true)    \
  NV_ACTIVATION(recipe, Recipe, swizzled, global, false)

NV_ACTIVATION_LAYOUTS(ieee, Ieee)
NV_ACTIVATION_LAYOUTS(vllm, VllmCuda)
