// Grouped GEMM with BF16 activations and FP4 weights that are widened on their way into the tensor core.
//
//   out[m, n] = bf16(decode[e] * Σ_k x[m, k] * w[e, n, k]),   w = E2M1 code * E4M3 block scale, exact in BF16
//
// Few rows meet an expert, so the weight's bytes are the limit: it is read once, at 4.5 bits an element, straight into
// the registers of the lanes that multiply it.  The weight takes the instruction's 16-row side (A) and the tokens its
// 8-column side (B), so that an expert with 4 rows wastes half a tile and not three quarters.
//
// `prepack` brings a weight into the order of those registers, once: 16 rows x 64 k become one 16-byte word per lane
// (four fragments of m16n8k16) and 64 bytes of scales.  It moves bits; the sign of a block scale goes to its codes.
//
// Widening needs no table.  The bits of a code, put at sign, two lowest exponent bits and first fraction bit of a
// BF16, read as its value * 2^-126, 0 and 0.5 included; an E4M3 byte moved likewise reads as its value * 2^-120.  One
// product of the two, with the scale lifted to s * 2^118 beforehand, is w * 2^-8: exact, and nowhere near BF16's ends.
// A NaN scale would read as 480, so rows that hold one are marked when packing and answer NaN.
//
// Per 16 x 16 piece of the weight that is 21 integer and BF16 instructions a lane, for 256 elements and up to 8 MMAs.
// A warp can issue no more than memory feeds it, so a few instructions matter: hence the odd places of the bits.
#include "nvfp4_math.cuh"

#include "bytes.cuh"
#include "warp.cuh"

namespace nv {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kStep = 64;  // k of one stage
constexpr int kStages = 4;

// What one block multiplies: kTokens rows of x, and kRowTiles * 16 rows of the weight in each of its warps.
template <int kTokensOfBlock, int kRowTilesOfWarp>
struct Shape {
  static constexpr int kTokens = kTokensOfBlock, kRowTiles = kRowTilesOfWarp;
  static constexpr int kTokenTiles = kTokens / 8, kFeatures = 16 * kRowTiles * kWarps;
};

// ------------------------------------------------------------------------------------------------ widening

// Where a code lies in its 16-bit half of a word: place r of four.  Two are masked out as they are or after one shift;
// the 16 bits do not allow that for more, so two have their sign apart.  Even k in the low half, odd k in the high one.
NV_DEVICE unsigned place_code(unsigned code, int r) {
  const unsigned sign = code >> 3 & 1u, size = code & 7u;
  const int sign_at[4] = {15, 11, 9, 10}, size_at[4] = {6, 3, 0, 12};
  return sign << sign_at[r] | size << size_at[r];
}

// Four pairs of BF16, the A fragment of m16n8k16, from one word.  Value * 2^-126.
NV_DEVICE void spread_codes(unsigned (&pairs)[4], unsigned word) {
  pairs[0] = word & 0x81C081C0u;
  pairs[1] = ((word << 3) & 0x01C001C0u) | ((word << 4) & 0x80008000u);
  pairs[2] = (word << 6) & 0x81C081C0u;
  pairs[3] = ((word >> 6) & 0x01C001C0u) | ((word << 5) & 0x80008000u);
}

// The scales of rows g (low half) and g+8 (high half) in k-block `block` of a piece as a pair of BF16, times 2^118.
// x holds blocks 0 and 1, y blocks 2 and 3; each of them rows g, g in its low half and g+8, g+8 in its high half.
NV_DEVICE unsigned lift_scales(const uint2& scales, int block) {
  const unsigned two = block < 2 ? scales.x : scales.y;
  const unsigned small = (block % 2 ? two >> 4 : two << 4) & 0x07F007F0u;
  return multiply_bf16x2(multiply_bf16x2(small, 0x7F007F00u), 0x77007700u);  // * 2^127 * 2^111
}

// The A fragment of one 16x16 piece of the weight, times 2^-8.
NV_DEVICE void widen(unsigned (&fragment)[4], unsigned word, const uint2& scales, int block) {
  const unsigned lifted = lift_scales(scales, block);
  const unsigned for_g = pick_bytes(lifted, 0u, 0x1010u), for_g8 = pick_bytes(lifted, 0u, 0x3232u);
  spread_codes(fragment, word);
  fragment[0] = multiply_bf16x2(fragment[0], for_g);
  fragment[1] = multiply_bf16x2(fragment[1], for_g8);
  fragment[2] = multiply_bf16x2(fragment[2], for_g);
  fragment[3] = multiply_bf16x2(fragment[3], for_g8);
}

NV_DEVICE unsigned component(const uint4& word, int i) {
  return i == 0 ? word.x : i == 1 ? word.y : i == 2 ? word.z : word.w;
}

// ------------------------------------------------------------------------------------------------- the GEMM

// One stage of the pipeline in shared memory.  Rows of x are 128 bytes: 16-byte piece c of row r lies at c ^ (r % 8),
// so that eight rows read together meet eight different banks.
template <class S>
struct Stage {
  uint4 words[kWarps][S::kRowTiles][32];
  uint2 scales[kWarps][S::kRowTiles][8];
  uint4 x[S::kTokens][8];
};

struct GroupedW4A16 {
  const u16* x;
  const uint4* words;
  const uint2* scales;
  const u8* row_nan;
  const float* decode;
  const int* offsets;
  u16* out;
  int rows, experts, n, k;
};

// Where this thread's share of every stage comes from; `fill` moves along k.
template <class S>
struct Feed {
  static constexpr int kRounds = S::kTokens * 8 / kThreads;  // 16-byte pieces of x per thread
  const uint4* words;   // of the warp's first 16-row tile; the next tile is `tile_stride` words away
  const uint2* scales;  // the first lanes copy 16 bytes each
  const u16* x;         // of the thread's first row; the next one is 16 rows away
  int tile_stride, row_stride, tiles_left, rows_left, k_left;

  NV_DEVICE Feed(const GroupedW4A16& p, const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int steps = (p.k + kStep - 1) / kStep, tiles = (p.n + 15) / 16;
    const int first = (static_cast<int>(blockIdx.x) * kWarps + thread / 32) * S::kRowTiles;
    tiles_left = tiles - first;
    const long long at = (static_cast<long long>(tile.expert) * tiles + (tiles_left > 0 ? first : 0)) * steps;
    words = p.words + at * 32 + lane;
    const int scale_tile = lane / 4 % S::kRowTiles;
    scales = p.scales + (at + (scale_tile < tiles_left ? scale_tile : 0) * steps) * 8 + lane % 4 * 2;
    tile_stride = steps * 32;
    row_stride = 16 * p.k;
    rows_left = tile.rows - thread / 8;
    k_left = p.k - thread % 8 * 8;
    x = p.x + static_cast<long long>(tile.first) * p.k + (rows_left > 0 ? thread / 8 * p.k : 0) + thread % 8 * 8;
  }

  NV_DEVICE void fill(Stage<S>& stage, int step) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int m = 0; m < S::kRowTiles; ++m) {
      const bool present = m < tiles_left;
      copy16_async(&stage.words[warp][m][lane], words + (present ? m * tile_stride : 0) + step * 32, present);
    }
    if (lane < 4 * S::kRowTiles)
      copy16_async(&stage.scales[warp][lane / 4][lane % 4 * 2], scales + step * 8, lane / 4 < tiles_left);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = thread / 8 + 16 * i;
      const bool present = 16 * i < rows_left && step * kStep < k_left;
      copy16_async(&stage.x[row][thread % 8 ^ (row & 7)], x + (present ? i * row_stride + step * kStep : 0), present);
    }
  }
};

template <class S>
using Sums = float[S::kRowTiles][S::kTokenTiles][4];

template <class S>
NV_DEVICE void multiply_stage(Sums<S>& acc, const Stage<S>& stage, int token_tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint4 words[S::kRowTiles];
  uint2 scales[S::kRowTiles];
#pragma unroll
  for (int m = 0; m < S::kRowTiles; ++m) {
    words[m] = stage.words[warp][m][lane];
    scales[m] = stage.scales[warp][m][lane / 4];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 32 of the 64 k at a time: two fragments
    unsigned a[2][S::kRowTiles][4];
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int m = 0; m < S::kRowTiles; ++m)
        widen(a[f][m], component(words[m], 2 * half + f), scales[m], 2 * half + f);
#pragma unroll
    for (int j = 0; j < S::kTokenTiles; ++j) {
      if (j >= token_tiles) break;
      unsigned b[4];
      load_matrices(b, &stage.x[8 * j + lane % 8][(4 * half + lane / 8) ^ (lane % 8)]);
#pragma unroll
      for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int m = 0; m < S::kRowTiles; ++m) mma_bf16(acc[m][j], a[f][m], b[2 * f], b[2 * f + 1]);
    }
  }
}

// Scale, round, and turn the block's outputs round in shared memory: a lane holds neighbouring tokens, memory wants
// neighbouring features.
template <class S>
NV_DEVICE void store(const Sums<S>& acc, u16* turned, const GroupedW4A16& p, const Tile& tile) {
  constexpr int kFeatures = S::kFeatures, kPitch = kFeatures + 8;  // 16 bytes more, against bank conflicts
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first = static_cast<int>(blockIdx.x) * kFeatures;
  const float decode = p.decode[tile.expert];
#pragma unroll
  for (int m = 0; m < S::kRowTiles; ++m) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int feature = (warp * S::kRowTiles + m) * 16 + lane / 4 + 8 * lower;
      const bool nan = first + feature < p.n && p.row_nan[static_cast<long long>(tile.expert) * p.n + first + feature];
#pragma unroll
      for (int j = 0; j < S::kTokenTiles; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float sum = multiply(acc[m][j][2 * lower + odd], 256.0f);
          const float scaled = nan ? value(kNan) : multiply(sum, decode);
          turned[(8 * j + lane % 4 * 2 + odd) * kPitch + feature] = to_bf16(scaled);
        }
      }
    }
  }
  __syncthreads();
  for (int i = thread; i < tile.rows * (kFeatures / 8); i += kThreads) {
    const int row = i / (kFeatures / 8), column = i % (kFeatures / 8) * 8;
    if (first + column >= p.n) continue;
    const uint4 piece = *reinterpret_cast<const uint4*>(turned + row * kPitch + column);
    *reinterpret_cast<uint4*>(p.out + static_cast<long long>(tile.first + row) * p.n + first + column) = piece;
  }
}

template <class S>
NV_DEVICE void grouped_w4a16(const GroupedW4A16& p, void* shared) {
  static_assert(S::kTokens * (S::kFeatures + 8) * 2 <= kStages * static_cast<int>(sizeof(Stage<S>)), "no room to turn");
  Stage<S>* stages = static_cast<Stage<S>*>(shared);
  const Tile tile = find_tile(p.offsets, p.experts, S::kTokens, static_cast<int>(blockIdx.y));
  if (tile.rows == 0) {
    const int column = static_cast<int>(blockIdx.x) * S::kFeatures;
    clear_rows(p.out, p.offsets[p.experts], p.rows, p.n, column, S::kFeatures);
    return;
  }
  const int steps = (p.k + kStep - 1) / kStep, token_tiles = (tile.rows + 7) / 8;
  const Feed<S> feed(p, tile);
  Sums<S> acc = {};

  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) feed.fill(stages[s], s);
    close_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // everybody's copies of this stage are here, and everybody has left the stage before it
    const int ahead = step + kStages - 1;
    if (ahead < steps) feed.fill(stages[ahead % kStages], ahead);
    close_copies();
    multiply_stage<S>(acc, stages[step % kStages], token_tiles);
  }
  wait_copies<0>();
  __syncthreads();
  store<S>(acc, static_cast<u16*>(shared), p, tile);
}

// ----------------------------------------------------------------------------------------------- preparation

// One warp packs 16 rows x 64 k of one expert.
NV_DEVICE void prepack(const u8* packed, const u8* scales, uint4* words, uint2* lifted,
                    u8* row_nan, int experts, int n, int k) {
  const int steps = (k + kStep - 1) / kStep, tiles = (n + 15) / 16;
  const long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= static_cast<long long>(experts) * tiles * steps) return;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, p = lane % 4;
  const int step = static_cast<int>(at % steps), tile = static_cast<int>(at / steps % tiles);
  const long long expert = at / steps / tiles;
  unsigned out[4];
  for (int f = 0; f < 4; ++f) {
    unsigned word = 0;
    for (int r = 0; r < 4; ++r) {  // register r of the fragment: rows g, g+8, g, g+8; k 2p and 2p+8
      const int row = 16 * tile + g + 8 * (r % 2), byte = (kStep * step + 16 * f) / 2 + p + 4 * (r / 2);
      if (row >= n || byte >= k / 2) continue;
      const unsigned flip = scales[(expert * n + row) * (k / 16) + byte / 8] >> 7 ? 8u : 0u;
      const unsigned codes = packed[(expert * n + row) * (k / 2) + byte];
      word |= place_code((codes & 15u) ^ flip, r) | place_code((codes >> 4) ^ flip, r) << 16;
    }
    out[f] = word;
  }
  words[at * 32 + lane] = uint4{out[0], out[1], out[2], out[3]};
  if (lane >= 8) return;
  unsigned both[2] = {0, 0};
  for (int lower = 0; lower < 2; ++lower) {
    const int row = 16 * tile + lane + 8 * lower;
    for (int block = 0; block < 4; ++block) {
      const int column = 4 * step + block;
      if (row >= n || column >= k / 16) continue;
      const unsigned size = scales[(expert * n + row) * (k / 16) + column] & 0x7Fu;
      both[block / 2] |= size << (8 * (block % 2) + 16 * lower);
      if (size == 0x7Fu) row_nan[expert * n + row] = 1;
    }
  }
  lifted[at * 8 + lane] = uint2{both[0], both[1]};
}

// For a product that was made with the bare weight: times the decode scale, in place.
NV_DEVICE void scale_rows(u16* out, const float* decode, const int* offsets, int rows, int experts, int n) {
  constexpr int kRows = 64;
  const Tile tile = find_tile(offsets, experts, kRows, static_cast<int>(blockIdx.y));
  const int columns = static_cast<int>(blockDim.x) * 8, first = static_cast<int>(blockIdx.x) * columns;
  if (tile.rows == 0) {
    clear_rows(out, offsets[experts], rows, n, first, columns);
    return;
  }
  const int column = first + static_cast<int>(threadIdx.x) * 8;
  if (column >= n) return;
  const float factor = decode[tile.expert];
#pragma unroll 4
  for (int i = 0; i < tile.rows; ++i) {
    uint4& piece = *reinterpret_cast<uint4*>(out + static_cast<long long>(tile.first + i) * n + column);
    const uint4 four = piece;
    unsigned word[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const unsigned two = component(four, pair);
      const unsigned low = to_bf16(multiply(bf16_low(two), factor)), high = to_bf16(multiply(bf16_high(two), factor));
      word[pair] = low | high << 16;
    }
    piece = uint4{word[0], word[1], word[2], word[3]};
  }
}

// One warp writes 16 rows x 64 k of the weight as the GEMM multiplies them: code * scale in BF16, exact.
NV_DEVICE void widen_all(const uint4* words, const uint2* scales, u16* out, int experts, int n, int k) {
  const int steps = (k + kStep - 1) / kStep, tiles = (n + 15) / 16;
  const long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= static_cast<long long>(experts) * tiles * steps) return;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, p = lane % 4;
  const int step = static_cast<int>(at % steps), tile = static_cast<int>(at / steps % tiles);
  const long long expert = at / steps / tiles;
  const uint4 word = words[at * 32 + lane];
  const uint2 both = scales[at * 8 + g];
  for (int f = 0; f < 4; ++f) {
    unsigned fragment[4];
    widen(fragment, component(word, f), both, f);
    for (int r = 0; r < 4; ++r) {
      const int row = 16 * tile + g + 8 * (r % 2), column = kStep * step + 16 * f + 2 * p + 8 * (r / 2);
      if (row >= n || column >= k) continue;
      const unsigned pair = multiply_bf16x2(fragment[r], 0x43804380u);  // * 2^8
      *reinterpret_cast<unsigned*>(out + (expert * n + row) * k + column) = pair;
    }
  }
}

}  // namespace nv

extern "C" __global__ void nv_w4a16_prepack(const nv::u8* packed, const nv::u8* scales, uint4* words,
                                            uint2* lifted, nv::u8* row_nan, int experts, int n, int k) {
  nv::prepack(packed, scales, words, lifted, row_nan, experts, n, k);
}

extern "C" __global__ void nv_w4a16_widen(const uint4* words, const uint2* scales, nv::u16* out, int experts,
                                          int n, int k) {
  nv::widen_all(words, scales, out, experts, n, k);
}

// Grid (N / 1024 up, rows / 64 down + experts + 1), block 128.
extern "C" __global__ void nv_scale_rows(nv::u16* out, const float* decode, const int* offsets, int rows, int experts,
                                         int n) {
  nv::scale_rows(out, decode, offsets, rows, experts, n);
}

// Grid: (N / (64 * ROW_TILES) up, rows / TOKENS down + experts + 1); block 128; shared memory of four stages, each
// 2304 * ROW_TILES + 128 * TOKENS bytes.
#define NV_GROUPED_W4A16(TOKENS, ROW_TILES, BLOCKS)                                                                  \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) nv_grouped_w4a16_##TOKENS(                               \
      const nv::u16* x, const uint4* words, const uint2* scales, const nv::u8* row_nan, const float* decode,         \
      const int* offsets, nv::u16* out, int rows, int experts, int n, int k) {                                       \
    NV_SHARED_MEMORY(uint4, nv_shared);                                                                              \
    nv::grouped_w4a16<nv::Shape<TOKENS, ROW_TILES>>(                                                                 \
        {x, words, scales, row_nan, decode, offsets, out, rows, experts, n, k}, nv_shared);                          \
  }

NV_GROUPED_W4A16(16, 4, 4)
NV_GROUPED_W4A16(32, 2, 5)
NV_GROUPED_W4A16(64, 2, 4)
