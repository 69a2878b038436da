// How the streaming kernels read blocks of elements, find a row's global scale and place a block scale.
//
// One thread takes one whole block: no exchange between threads, 16-byte loads, one 8-byte store of packed codes.

#pragma once

#include "recipes.cuh"

#if defined(__CUDA_ARCH__)
#define NV_ROLLED _Pragma("unroll 1")
#else
#define NV_ROLLED
#endif

namespace nv {

// ------------------------------------------------------------------------------------------------ elements

// N elements as they lie in memory, fetched with 16-byte loads before anything is computed.
template <int kWords>
struct Raw {
  uint4 part[kWords / 4];
  __device__ __forceinline__ void load(const void* x, u64 block) {
    const uint4* from = static_cast<const uint4*>(x) + block * (kWords / 4);
    NV_UNROLL
    for (int i = 0; i < kWords / 4; ++i) part[i] = __ldg(from + i);
  }
  __device__ __forceinline__ u32 word(int i) const {
    const uint4& p = part[i / 4];
    return i % 4 == 0 ? p.x : i % 4 == 1 ? p.y : i % 4 == 2 ? p.z : p.w;
  }
};

// Larger magnitudes of pairs of 16-bit numbers, or NaN: a maximum is a choice, so it is the same in any type.
#if __CUDA_ARCH__ >= 800
#define NV_PAIR_MAX(type)                                                                                            \
  template <int kWords>                                                                                              \
  static __device__ __forceinline__ u32 pair_max(const Raw<kWords>& raw) {                                           \
    u32 top;                                                                                                         \
    asm("abs." type " %0, %1;" : "=r"(top) : "r"(raw.word(0)));                                                      \
    NV_UNROLL                                                                                                        \
    for (int i = 1; i < kWords; ++i)                                                                                 \
      asm("{ .reg .b32 size; abs." type " size, %1; max.NaN." type " %0, %0, size; }" : "+r"(top) : "r"(raw.word(i))); \
    return top;                                                                                                      \
  }
#endif

// The larger of two numbers of no sign, or NaN.
NV_DEVICE float larger_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return value(max(bits(a), bits(b)));
#endif
}

struct Bf16 {
  static const int kPerWord = 2;
#if __CUDA_ARCH__ >= 800
  NV_PAIR_MAX("bf16x2")
  template <int kWords>
  static __device__ __forceinline__ float top(const Raw<kWords>& raw, const float (&)[2 * kWords]) {
    const u32 pair = pair_max(raw);
    return larger_or_nan(value(pair << 16), value(pair & 0xFFFF0000u));
  }
#else
  template <int kWords>
  static __device__ __forceinline__ float top(const Raw<kWords>&, const float (&x)[2 * kWords]) {
    return block_max_nan(x);
  }
#endif
  template <int kWords>
  static __device__ __forceinline__ void widen(const Raw<kWords>& raw, float (&x)[2 * kWords]) {
    NV_UNROLL
    for (int i = 0; i < kWords; ++i) {
      x[2 * i] = value(raw.word(i) << 16);
      x[2 * i + 1] = value(raw.word(i) & 0xFFFF0000u);
    }
  }
};

struct F16 {
  static const int kPerWord = 2;
#if __CUDA_ARCH__ >= 800
  NV_PAIR_MAX("f16x2")
  template <int kWords>
  static __device__ __forceinline__ float top(const Raw<kWords>& raw, const float (&)[2 * kWords]) {
    const u32 pair = pair_max(raw);
    return larger_or_nan(from_f16((u16)(pair & 0xFFFFu)), from_f16((u16)(pair >> 16)));
  }
#else
  template <int kWords>
  static __device__ __forceinline__ float top(const Raw<kWords>&, const float (&x)[2 * kWords]) {
    return block_max_nan(x);
  }
#endif
  template <int kWords>
  static __device__ __forceinline__ void widen(const Raw<kWords>& raw, float (&x)[2 * kWords]) {
    NV_UNROLL
    for (int i = 0; i < kWords; ++i) {
#if defined(__CUDA_ARCH__)
      asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
          : "=f"(x[2 * i]), "=f"(x[2 * i + 1])
          : "r"(raw.word(i)));
#else
      x[2 * i] = from_f16((u16)(raw.word(i) & 0xFFFFu));
      x[2 * i + 1] = from_f16((u16)(raw.word(i) >> 16));
#endif
    }
  }
};

// As F16, but a NaN keeps its payload, which `ocp-floor` turns into codes.
struct F16Exact : F16 {
  template <int kWords>
  static __device__ __forceinline__ void widen(const Raw<kWords>& raw, float (&x)[2 * kWords]) {
    NV_UNROLL
    for (int i = 0; i < kWords; ++i) {
      x[2 * i] = from_f16((u16)(raw.word(i) & 0xFFFFu));
      x[2 * i + 1] = from_f16((u16)(raw.word(i) >> 16));
    }
  }
};

struct F32 {
  static const int kPerWord = 1;
  template <int kWords>
  static __device__ __forceinline__ float top(const Raw<kWords>&, const float (&x)[kWords]) {
    float most = magnitude(x[0]);
    NV_UNROLL
    for (int i = 1; i < kWords; ++i) most = larger_or_nan(most, magnitude(x[i]));
    return most;
  }
  template <int kWords>
  static __device__ __forceinline__ void widen(const Raw<kWords>& raw, float (&x)[kWords]) {
    NV_UNROLL
    for (int i = 0; i < kWords; ++i) x[i] = value(raw.word(i));
  }
};

// ------------------------------------------------------------------------------------------- global scales

enum GlobalScales { kOne = 0, kPerRow = 1, kPerRange = 2 };

// The last range offsets[e] ... offsets[e + 1] that starts at or before the row: an empty range before it starts there too,
// and is passed over.  Rows past the last range belong to it.
NV_DEVICE int range_of(int row, const int* offsets, int ranges) {
  int low = 0, high = ranges - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (offsets[middle] <= row) low = middle; else high = middle - 1;
  }
  return low;
}

// The global scale of every row: one number, one a row, or one for each range of rows.  `scales` is null if the one number
// came by value.  Looking a range up takes several loads one after another, too many for every thread of a large matrix;
// there, ranges.cu spreads the scales over the rows first.
struct Globals {
  const float* scales;
  float one;
  const int* offsets;
  int ranges, kind;

  __device__ __forceinline__ float of(int row) const {
    if (kind == kOne) return scales ? __ldg(scales) : one;
    return __ldg(scales + (kind == kPerRow ? row : range_of(row, offsets, ranges)));
  }
};

// ------------------------------------------------------------------------------------------ scales in memory

// Where a row goes in a 128x4 layout whose ranges have tiles of their own (ranges.cu): its row there, with the top bit set
// where it is the last of the rows r, r + 32, r + 64 and r + 96 of its tile, which share 16 bytes for every four columns.
const u32 kLastOfPiece = 0x80000000u;

// Four scales of such a row, from `column` on, and after the last of a piece the piece's padding.
NV_DEVICE void store_placed(u8* scales, u32 place, int column, int tiles, u32 word) {
  const int row = (int)(place & ~kLastOfPiece), quarter = (row >> 5) & 3;
  u32* to = reinterpret_cast<u32*>(scales + offset_128x4(row, column, tiles));
  if (!(place & kLastOfPiece) || quarter == 3) {
    *to = word;
  } else if (quarter == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(word, 0, 0, 0);
  } else if (quarter == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word, 0);
  } else {
    *to = word;
    *reinterpret_cast<uint2*>(to + 1) = make_uint2(0, 0);
  }
}

// In the 128x4 kernels a warp takes a strip of the layout: 8 columns of the rows r, r + 32, r + 64 and r + 96 of a tile of 128,
// for four neighbouring r.  Their scales are two whole pieces of 64 bytes.  A lane takes one column of one r: four blocks.
// Padding is written by whoever writes the scales beside it.
struct Strip128x4 {
  int tile, row, column;  // row: the lane's first one
  __device__ __forceinline__ Strip128x4(int tile_, int eighth, int octet)
      : tile(tile_), row(128 * tile_ + 4 * eighth + ((threadIdx.x & 31) >> 3)), column(8 * octet + (threadIdx.x & 7)) {}
  // First row of the strip and its first column, the same for the whole warp.
  __device__ __forceinline__ int top() const { return row & ~3; }
  __device__ __forceinline__ int left() const { return column & ~7; }

  // `bytes` holds this lane's scales, that of row + 32 k in byte k.  Four lanes with neighbouring columns exchange them, so
  // that each stores one word of four columns.  `tiles`: tiles across.
  __device__ __forceinline__ void store(u8* scales, u32 bytes, int tiles) const {
    const int lane = threadIdx.x & 31;
    u32 other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 1);
    bytes = __byte_perm(bytes, other, lane & 1 ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 2);
    bytes = __byte_perm(bytes, other, lane & 2 ? 0x3276 : 0x5410);
    if (column < 4 * tiles)
      reinterpret_cast<u32*>(scales)[((u64)tile * tiles + (column >> 2)) * 128 + (row & 31) * 4 + (lane & 3)] = bytes;
  }
};

// A grid's y and z as one number: y alone ends at 65535.
NV_DEVICE int far_index() { return blockIdx.z * gridDim.y + blockIdx.y; }

}  // namespace nv
