// Orders of bytes that tensor cores and their kernels ask for.  Nothing here computes; NumPy's truth is
// nvfp4viz/formats/layout.py.
//
// 128x4 is offset_128x4 of nvfp4_math.cuh: 16 neighbouring bytes are rows r, r+32, r+64, r+96 at four columns, what one lane
// moves here at a time.
#include "nvfp4_math.cuh"
#include "warp.cuh"

namespace nv {

// Four scales of one row from `column` on; zeros where there is none.
NV_DEVICE unsigned read4(const u8* row, int column, int columns, bool present) {
  if (!present) return 0;
  if (columns % 4 == 0) return *reinterpret_cast<const unsigned*>(row + column);
  unsigned word = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (column + j < columns) word |= static_cast<unsigned>(row[column + j]) << (8 * j);
  return word;
}

NV_DEVICE void write4(u8* row, int column, int columns, unsigned word) {
  if (columns % 4 == 0) {
    *reinterpret_cast<unsigned*>(row + column) = word;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (column + j < columns) row[column + j] = static_cast<u8>(word >> (8 * j));
}

// The 128-row tile of this block, from each range's offsets, or from `rows` rows in each of `ranges` where null.
NV_DEVICE Tile row_tile(const int* offsets, int ranges, int rows) {
  const int index = static_cast<int>(blockIdx.y);
  if (offsets) return find_tile(offsets, ranges, 128, index);
  const int tiles = (rows + 127) / 128, range = index / tiles, first = index % tiles * 128;
  if (range >= ranges) return {0, 0, 0};
  return {range, range * rows + first, rows - first < 128 ? rows - first : 128};
}

template <bool kInto>
NV_DEVICE void swizzle(const u8* from, u8* to, const int* offsets, int ranges, int rows, int columns) {
  const Tile tile = row_tile(offsets, ranges, rows);
  const int column_tiles = (columns + 3) / 4, lane = static_cast<int>(threadIdx.x % 32);
  const int column_tile = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (tile.rows == 0 || column_tile >= column_tiles) return;
  const u64 piece = offset_128x4(128LL * blockIdx.y + lane, 4 * column_tile, column_tiles) / 16;
  if constexpr (kInto) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane + 32 * i;
      const u8* scales = from + static_cast<long long>(tile.first + row) * columns;
      word[i] = read4(scales, 4 * column_tile, columns, row < tile.rows);
    }
    reinterpret_cast<uint4*>(to)[piece] = uint4{word[0], word[1], word[2], word[3]};
  } else {
    const uint4 four = reinterpret_cast<const uint4*>(from)[piece];
    const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane + 32 * i;
      u8* scales = to + static_cast<long long>(tile.first + row) * columns;
      if (row < tile.rows) write4(scales, 4 * column_tile, columns, word[i]);
    }
  }
}

}  // namespace nv

// Grid: (ceil(column tiles / 4), row tiles or an upper bound of them); block 128: a warp moves one tile.
extern "C" __global__ void nv_swizzle_128x4(const nv::u8* scales, nv::u8* flat, const int* offsets, int ranges,
                                            int rows, int columns) {
  nv::swizzle<true>(scales, flat, offsets, ranges, rows, columns);
}

extern "C" __global__ void nv_unswizzle_128x4(const nv::u8* flat, nv::u8* scales, const int* offsets, int ranges,
                                              int rows, int columns) {
  nv::swizzle<false>(flat, scales, offsets, ranges, rows, columns);
}

// Rows of gate, then rows of up -> `group` of each in turn.  `row_words` 16-byte (or, `_bytes`, single-byte) pieces a
// row; grid (pieces of a row / 128 up, rows, matrices), block 128.
template <class Piece>
NV_DEVICE void interleave(const Piece* from, Piece* to, int rows, int row_pieces, int group) {
  const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = static_cast<int>(blockIdx.y);
  if (piece >= row_pieces) return;
  const int half = row >= rows / 2, within = row - half * (rows / 2);
  const int target = within / group * 2 * group + half * group + within % group;
  const long long matrix = static_cast<long long>(blockIdx.z) * rows;
  to[(matrix + target) * row_pieces + piece] = from[(matrix + row) * row_pieces + piece];
}

extern "C" __global__ void nv_interleave_gate_up(const uint4* from, uint4* to, int rows, int row_pieces, int group) {
  interleave(from, to, rows, row_pieces, group);
}

extern "C" __global__ void nv_interleave_gate_up_bytes(const nv::u8* from, nv::u8* to, int rows, int row_pieces,
                                                       int group) {
  interleave(from, to, rows, row_pieces, group);
}

// Four UE8M0 bytes to a word, the first in the lowest byte.  Stated in arithmetic, so that it is right whatever the
// byte order: the words of the result, not the bytes, are what DeepGEMM reads.
extern "C" __global__ void nv_pack_ue8m0(const nv::u8* scales, unsigned* words, long long count) {
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  unsigned word = 0;
  for (int j = 0; j < 4; ++j) word |= static_cast<unsigned>(scales[4 * at + j]) << (8 * j);
  words[at] = word;
}
