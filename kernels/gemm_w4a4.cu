// Grouped block-scaled GEMM: rows of FP4 activations, each range of rows times the FP4 weight of its own expert.
//
//   out[m, n] = round(alpha * acc[m, n]),   acc = A[m, :] . B[e, n, :] in steps of 64, increasing k
//
// One kernel for every GPU.  What differs is one instruction, behind `mma`: sm_120/121 have it (OMMA in machine
// code), elsewhere the warp gathers the same registers by shuffles and computes the same bits (mma_step.cuh).  Loads,
// fragments, scale registers, ragged rows and epilogue are the same code on both.
//
// Fragments of m16n8k64 (PTX ISA, "Matrix Fragments for mma.m16n8k64"), g = lane/4, p = lane%4, a word = 8 codes:
//   a[0], a[1], a[2], a[3]   rows g, g+8, g, g+8 at k 8p, 8p, 32+8p, 32+8p
//   b[0], b[1]               column g at k 8p, 32+8p
//   d[0..3]                  (g, 2p), (g, 2p+1), (g+8, 2p), (g+8, 2p+1)
// Scale words ("Block scaling"; byte-id 0, thread-id 0): of A the instruction reads lane 4g for row g and lane 4g+1
// for row g+8, of B lane 4g for column g; byte j is the scale of k 16j … 16j+15 (2X: bytes 0 and 1, of 32 each).
#include "nvfp4_math.cuh"

#include "mma_step.cuh"
#include "warp.cuh"

namespace nv {

constexpr int kRowTiles = 2, kColumnTiles = 4, kWarps = 4;        // a warp makes 32 x 32 outputs, a block 32 x 128
constexpr int kTileRows = 16 * kRowTiles, kWarpColumns = 8 * kColumnTiles;

#if defined(NV_HW_MMA)
// d += A * B on the tensor core.
template <MmaKind kKind>
NV_DEVICE void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], unsigned a_scales,
                unsigned b_scales) {
  if constexpr (kKind == kNvfp4) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "n"(0), "n"(0),
          "r"(b_scales), "n"(0), "n"(0));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "n"(0), "n"(0),
          "r"(b_scales), "n"(0), "n"(0));
  }
}
#else
// The same registers in, the same bits out: every lane collects the two rows and two columns of its four outputs.
// A call, not inlined: 8 copies of it in each kernel would take the compiler a quarter of a minute.
template <MmaKind kKind>
NV_OUTLINE float4 mma_soft(float4 sums, uint4 a, uint2 b, unsigned a_scales, unsigned b_scales) {
  const unsigned lane = threadIdx.x & 31, quad = lane & ~3u, p = lane & 3;
  unsigned rows[2][8], column[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    rows[0][q] = __shfl_sync(kAllLanes, a.x, quad + q);
    rows[1][q] = __shfl_sync(kAllLanes, a.y, quad + q);
    rows[0][4 + q] = __shfl_sync(kAllLanes, a.z, quad + q);
    rows[1][4 + q] = __shfl_sync(kAllLanes, a.w, quad + q);
  }
  const unsigned row_scales[2] = {__shfl_sync(kAllLanes, a_scales, quad), __shfl_sync(kAllLanes, a_scales, quad + 1)};
  float d[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned owner = 4 * (2 * p + j);  // the quad that holds column 2p+j
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      column[q] = __shfl_sync(kAllLanes, b.x, owner + q);
      column[4 + q] = __shfl_sync(kAllLanes, b.y, owner + q);
    }
    const unsigned column_scales = __shfl_sync(kAllLanes, b_scales, owner);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      d[2 * i + j] = value(mma_step_codes(rows[i], column, row_scales[i], column_scales, bits(d[2 * i + j]), kKind));
  }
  return float4{d[0], d[1], d[2], d[3]};
}

template <MmaKind kKind>
NV_DEVICE void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], unsigned a_scales, unsigned b_scales) {
  const uint4 rows{a[0], a[1], a[2], a[3]};
  const float4 sums = mma_soft<kKind>(float4{d[0], d[1], d[2], d[3]}, rows, uint2{b[0], b[1]}, a_scales, b_scales);
  d[0] = sums.x, d[1] = sums.y, d[2] = sums.z, d[3] = sums.w;
}
#endif

template <int kBytes>
struct WordOf {
  using Type = unsigned;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};

// The scale word of one row: the 4 (NVFP4) or 2 (MXFP4) scales of a step; zeros past the end of K.
template <MmaKind kKind, bool kSwizzled>
NV_DEVICE unsigned scale_word(const unsigned char* scales, long long row, int step, int columns) {
  constexpr int kCount = kKind == kNvfp4 ? 4 : 2;
  using Word = typename WordOf<kCount>::Type;
  const int column = step * kCount, valid = columns - column;
  long long at = row * columns + column;
  if constexpr (kSwizzled) at = static_cast<long long>(offset_128x4(row, column, (columns + 3) / 4));
  if (kSwizzled || columns % kCount == 0) {  // aligned, and a swizzled row is padded: what lies there may be anything
    const unsigned word = *reinterpret_cast<const Word*>(scales + at);
    return valid >= kCount ? word : word & ((1u << (8 * valid)) - 1);
  }
  unsigned word = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    if (j < valid) word |= static_cast<unsigned>(scales[at + j]) << (8 * j);
  return word;
}

// One word of 8 codes; zeros past the end of K or for a row that is not there.
NV_DEVICE unsigned code_word(const unsigned char* packed, long long row, int k, int size_k, bool present) {
  if (!present || k >= size_k) return 0;
  return *reinterpret_cast<const unsigned*>(packed + row * (size_k / 2) + k / 2);
}

struct GroupedW4A4 {
  const unsigned char *a, *a_scales, *b, *b_scales;
  const int *offsets, *scale_offsets;  // of rows; of rows of swizzled scales, where each expert starts a tile of 128
  const float *alphas, *row_alphas;  // of experts; of rows (per-token scaling), or null
  void* out;
  int rows, experts, n, k;
};

template <MmaKind kKind, bool kSwizzled, bool kBf16>
NV_DEVICE void grouped_w4a4(const GroupedW4A4& p) {
  const Tile tile = find_tile(p.offsets, p.experts, kTileRows, static_cast<int>(blockIdx.y));
  if (tile.rows == 0) {
    constexpr int kColumns = kWarps * kWarpColumns;
    const int last = p.offsets[p.experts], column = static_cast<int>(blockIdx.x) * kColumns;
    if constexpr (kBf16)
      clear_rows(static_cast<u16*>(p.out), last, p.rows, p.n, column, kColumns);
    else
      clear_rows(static_cast<float*>(p.out), last, p.rows, p.n, column, kColumns);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x & 31), g = lane / 4, q = lane % 4;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first_column = (static_cast<int>(blockIdx.x) * kWarps + warp) * kWarpColumns;
  if (first_column >= p.n) return;

  const int scale_columns = p.k / (kKind == kNvfp4 ? 16 : 32);
  const unsigned char* weight = p.b + static_cast<long long>(tile.expert) * p.n * (p.k / 2);
  // Swizzled weights: every expert's scales are padded to whole tiles of their own.
  const long long weight_scale_rows = kSwizzled ? (p.n + 127LL) / 128 * 128 : p.n;
  const long long weight_scale_columns = kSwizzled ? (scale_columns + 3LL) / 4 * 4 : scale_columns;
  const unsigned char* weight_scales = p.b_scales + tile.expert * weight_scale_rows * weight_scale_columns;
  // Row r of expert e has scale row scale_offsets[e] + (r - offsets[e]) when swizzled, r when linear.
  const long long scale_row0 =
      kSwizzled ? tile.first - p.offsets[tile.expert] + static_cast<long long>(p.scale_offsets[tile.expert])
                : tile.first;

  float acc[kRowTiles][kColumnTiles][4] = {};
  for (int step = 0; 64 * step < p.k; ++step) {
    const int k = 64 * step + 8 * q;
    unsigned a[kRowTiles][4], a_scales[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * i + g + 8 * half;
        a[i][half] = code_word(p.a, tile.first + row, k, p.k, row < tile.rows);
        a[i][2 + half] = code_word(p.a, tile.first + row, k + 32, p.k, row < tile.rows);
      }
      const int row = 16 * i + g + 8 * (q & 1);  // lanes 4g and 4g+1 are the ones read
      a_scales[i] = 0;
      if (row < tile.rows)
        a_scales[i] = scale_word<kKind, kSwizzled>(p.a_scales, scale_row0 + row, step, scale_columns);
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int column = first_column + 8 * j + g;
      const bool present = column < p.n;
      const unsigned b[2] = {code_word(weight, column, k, p.k, present),
                             code_word(weight, column, k + 32, p.k, present)};
      const unsigned b_scales = present ? scale_word<kKind, kSwizzled>(weight_scales, column, step, scale_columns) : 0;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
        if (16 * i < tile.rows) mma<kKind>(acc[i][j], a[i], b, a_scales[i], b_scales);
    }
  }

  const float alpha = p.alphas[tile.expert];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        const int row = 16 * i + g + 8 * (element / 2), column = first_column + 8 * j + 2 * q + element % 2;
        if (row >= tile.rows || column >= p.n) continue;
        const long long at = static_cast<long long>(tile.first + row) * p.n + column;
        // the multiplication makes every NaN the canonical one
        const float scaled = multiply(acc[i][j][element], p.row_alphas ? p.row_alphas[tile.first + row] : alpha);
        if constexpr (kBf16)
          static_cast<u16*>(p.out)[at] = to_bf16(scaled);
        else
          static_cast<float*>(p.out)[at] = scaled;
      }
    }
  }
}

// One instruction on each of many tiles with accumulators of their own: what the self-test compares between policies.
template <MmaKind kKind>
NV_DEVICE void mma_tiles(const unsigned* a, const unsigned* a_scales, const unsigned* b, const unsigned* b_scales,
                      const float* c, float* out, int tiles) {
  const int tile = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x & 31), g = lane / 4, q = lane % 4;
  if (tile >= tiles) return;
  const unsigned* rows = a + tile * 128;
  const unsigned fragment[4] = {rows[g * 8 + q], rows[(g + 8) * 8 + q], rows[g * 8 + 4 + q], rows[(g + 8) * 8 + 4 + q]};
  const unsigned columns[2] = {b[tile * 64 + g * 8 + q], b[tile * 64 + g * 8 + 4 + q]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = c[tile * 128 + (g + i / 2 * 8) * 8 + 2 * q + i % 2];
  mma<kKind>(d, fragment, columns, a_scales[tile * 16 + g + 8 * (q & 1)], b_scales[tile * 8 + g]);
  for (int i = 0; i < 4; ++i) out[tile * 128 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = d[i];
}

}  // namespace nv

// a (tiles, 16, 8) and b (tiles, 8, 8) words of codes, their scale words (tiles, 16) and (tiles, 8), c and out
// (tiles, 16, 8).  Grid tiles / 4 up, block 128.
extern "C" __global__ void nv_mma_tiles_nvfp4(const unsigned* a, const unsigned* a_scales, const unsigned* b,
                                              const unsigned* b_scales, const float* c, float* out, int tiles) {
  nv::mma_tiles<nv::kNvfp4>(a, a_scales, b, b_scales, c, out, tiles);
}

extern "C" __global__ void nv_mma_tiles_mxfp4(const unsigned* a, const unsigned* a_scales, const unsigned* b,
                                              const unsigned* b_scales, const float* c, float* out, int tiles) {
  nv::mma_tiles<nv::kMxfp4>(a, a_scales, b, b_scales, c, out, tiles);
}

// Grid: (N / 128 up, rows / 32 down + experts + 1); block 128.  `scale_offsets` is read by the swizzled kernels only.
#define NV_GROUPED_W4A4(NAME, KIND, SWIZZLED, BF16)                                                                  \
  extern "C" __global__ void __launch_bounds__(128)                                                                  \
      NAME(const unsigned char* a, const unsigned char* a_scales, const unsigned char* b,                            \
           const unsigned char* b_scales, const int* offsets, const int* scale_offsets, const float* alphas,         \
           const float* row_alphas, void* out, int rows, int experts, int n, int k) {                                \
    nv::grouped_w4a4<nv::KIND, SWIZZLED, BF16>(                                                                      \
        {a, a_scales, b, b_scales, offsets, scale_offsets, alphas, row_alphas, out, rows, experts, n, k});           \
  }

NV_GROUPED_W4A4(nv_grouped_w4a4_nvfp4_linear_bf16, kNvfp4, false, true)
NV_GROUPED_W4A4(nv_grouped_w4a4_nvfp4_linear_f32, kNvfp4, false, false)
NV_GROUPED_W4A4(nv_grouped_w4a4_nvfp4_swizzled_bf16, kNvfp4, true, true)
NV_GROUPED_W4A4(nv_grouped_w4a4_nvfp4_swizzled_f32, kNvfp4, true, false)
NV_GROUPED_W4A4(nv_grouped_w4a4_mxfp4_linear_bf16, kMxfp4, false, true)
NV_GROUPED_W4A4(nv_grouped_w4a4_mxfp4_linear_f32, kMxfp4, false, false)
NV_GROUPED_W4A4(nv_grouped_w4a4_mxfp4_swizzled_bf16, kMxfp4, true, true)
NV_GROUPED_W4A4(nv_grouped_w4a4_mxfp4_swizzled_f32, kMxfp4, true, false)
