// silu(gate) * up or gelu_tanh(gate) * up, rounded to BF16, to NVFP4 in one pass: BF16 (M, 2I), gate first, to (M, I).
//
//   nv_activation_quantize_{ieee,vllm}_{linear,swizzled}_{shared,global}
//
// **The activation is a table.**  A BF16 gate has 65536 values, and what vLLM's kernels do with it before they meet `up`
// depends on it alone; so nvfp4viz.moe computes it, for every gate from 2^-24 to 2^7 of both signs (7936 floats in 31.5 KiB),
// and this kernel looks it up: the CPU's bits on every GPU, whatever its exp and tanh are.  Outside of that range both
// functions are simple (`outside`).  ops/activation.py builds the table and checks these rules for all gates.
//
// The `shared` kernels copy the table into every block's shared memory and stay on their multiprocessors; the `global`
// ones read it through the cache, for inputs too small to repay the copy.

#include "blocks.cuh"

namespace nv {

const u32 kFirstMagnitude = 103u << 7;    // BF16 pattern of 2^-24
const u32 kPerSign = 31u << 7;            // patterns from there to below 2^7
const u32 kNegative = 4096u;              // where the negative gates begin in the table
const u32 kTableSize = kNegative + kPerSign;

struct Activation {
  const float* table;
  bool rounds_tiny;  // GELU is rounded to BF16 before it meets `up`; the fused SiLU is not

  // `moved` is the pattern less kFirstMagnitude: the sign stays where it was, three bits above the place in the table.
  __device__ __forceinline__ float inside(u32 moved) const {
    return table[(moved & 0xFFFu) + ((moved & 0x8000u) >> 3)];
  }
  // Below 2^-24 half the gate; from 2^7 on the gate itself, -0 if negative; NaN for minus infinity and NaN.
  __device__ __forceinline__ float outside(u32 gate) const {
    const u32 size = gate & 0x7FFFu;
    const float x = value(gate << 16), half = multiply(x, 0.5f);
    if (size < kFirstMagnitude) return rounds_tiny ? from_bf16(to_bf16(half)) : half;
    if (size > 0x7F80u || gate == 0xFF80u) return value(kNan);
    return gate >> 15 ? value(0x80000000u) : x;
  }
  __device__ __forceinline__ float of(u32 gate) const {
    return (gate & 0x7FFFu) - kFirstMagnitude < kPerSign ? inside(gate - kFirstMagnitude) : outside(gate);
  }
};

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

// `columns` blocks of 16 outputs a row.  A tile is what one block of threads takes: in the linear layout blockDim.y rows of
// blockDim.x columns, in the 128x4 layout half of Tile128x4, of which `across` lie in a row.  Blocks of threads go from
// tile to tile.
template <class Recipe, bool kSwizzled>
NV_DEVICE void activation_quantize(const void* x, u64* packed, u8* scales, int rows, int columns, int across, int tiles_of_all,
                                   const Globals& globals, const i8* reciprocals, const Activation& activation) {
  const int tiles = (columns + 3) >> 2;
  for (int tile = blockIdx.x; tile < tiles_of_all; tile += gridDim.x) {
    const int down = tile / across, right = tile - down * across;
    const Tile128x4 at(down, 0);
    const int row = kSwizzled ? at.row : down * (int)blockDim.y + (int)threadIdx.y;
    const int column = kSwizzled ? at.column + 8 * right : right * (int)blockDim.x + (int)threadIdx.x;
    u8 byte = 0;
    if (row < rows && column < columns) {
      const u64 start = (u64)row * columns;
      Raw<8> gates, ups;
      gates.load(x, 2 * start + column);
      ups.load(x, 2 * start + columns + column);
      const Recipe recipe(globals.of(row), reciprocals);
      const Raw<8> products = gated(gates, ups, activation);
      float y[16];
      Bf16::widen(products, y);
      u64 codes;
      byte = quantize16(y, Bf16::top(products, y), recipe, codes);
      packed[start + column] = codes;
      if (!kSwizzled) scales[start + column] = byte;
    }
    if (kSwizzled && column < 4 * tiles) scales[offset_128x4(row, column, tiles)] = byte;
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
