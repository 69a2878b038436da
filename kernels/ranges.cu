// What ranges of rows (the experts' rows of a batch) mean for a matrix, and its scales in a 128x4 layout where every range is
// padded to tiles of its own.
//
//   nv_spread_ranges    a global scale for every row; where in that layout every row's scales go, and zeros in those pieces of
//                       16 bytes that no row has a part of, for nv_quantize_…_placed; or, for the second kernel, every tile's
//                       first row and how many rows it holds.  Each may be left out.
//   nv_place_ranges     linear scales into that layout, padding 0
//
// A strip of tiles a warp was slower: tiles are half empty where ranges are short, and threads that wait for nothing still take
// the places of those that load.  NVFP4 is placed as it is quantised, which saves the second kernel (103 µs become 99 on an
// H200, 8192 x 16384 in 128 ranges); after an activation (95.7 against 94.7) and in MXFP4 the second kernel stays.

#include "blocks.cuh"
#include "warp.cuh"

namespace nv {

// First row of the layout of each range: 128 times the tiles of the ranges before it.  By all threads of a block.
NV_DEVICE void tile_starts(const int* firsts, int ranges, int rows, int* starts, int* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int before = 0;
  for (int base = 0; base < ranges; base += blockDim.x) {
    const int e = base + threadIdx.x;
    const int end = e + 1 < ranges ? firsts[e + 1] : rows;  // rows past the last range belong to it
    const int tiles = e < ranges ? (end - firsts[e] + 127) >> 7 : 0;
    const int sum = sum_to_lane(tiles);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int of_warps = 0, of_all = 0;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) of_warps += sums[w];
      of_all += sums[w];
    }
    if (e < ranges) starts[e] = (before + of_warps + sum - tiles) * 128;
    before += of_all;
    __syncthreads();
  }
}

// First row of a tile and how many rows it holds.
NV_DEVICE uint2 source_of(int tile, const int* firsts, const int* starts, int ranges, int rows) {
  const int e = range_of(128 * tile, starts, ranges), end = e + 1 < ranges ? firsts[e + 1] : rows;
  const int first = firsts[e] + 128 * tile - starts[e], left = end - first;
  return make_uint2((u32)first, (u32)(left < 0 ? 0 : left < 128 ? left : 128));
}

// Four scales of one row from `column` on; zeros where there is none.
NV_DEVICE u32 four_scales(const u8* row, int column, int columns) {
  if (columns % 4 == 0) return column < columns ? __ldg(reinterpret_cast<const u32*>(row + column)) : 0;
  u32 word = 0;
  NV_UNROLL
  for (int i = 0; i < 4; ++i)
    if (column + i < columns) word |= (u32)__ldg(row + column + i) << (8 * i);
  return word;
}

// Sixteen of them.
NV_DEVICE uint4 sixteen_scales(const u8* row, int column, int columns) {
  if (columns % 16 == 0) return __ldg(reinterpret_cast<const uint4*>(row + column));
  return make_uint4(four_scales(row, column, columns), four_scales(row, column + 4, columns),
                    four_scales(row, column + 8, columns), four_scales(row, column + 12, columns));
}

}  // namespace nv

// Shared memory: three words a range.  Grid (rows / 256, or tiles if there are more; blocks that share a tile).
extern "C" __global__ void __launch_bounds__(256) nv_spread_ranges(const int* __restrict__ offsets, int ranges, int rows,
                                                                   const float* __restrict__ range_scales,
                                                                   float* __restrict__ row_scales,
                                                                   uint2* __restrict__ sources, nv::u32* __restrict__ places,
                                                                   uint4* __restrict__ flat, int tiles, int across) {
  NV_SHARED_MEMORY(int, shared);  // searching takes several reads one after another: not from global memory
  __shared__ int sums[8];
  int* firsts = shared;
  int* starts = shared + ranges;
  float* scales = reinterpret_cast<float*>(shared + 2 * ranges);
  for (int e = threadIdx.x; e < ranges; e += blockDim.x) {
    firsts[e] = e == 0 ? 0 : __ldg(offsets + e);  // rows before the first offset: never a place before the layout
    if (row_scales != 0) scales[e] = __ldg(range_scales + e);
  }
  __syncthreads();
  if (tiles > 0) nv::tile_starts(firsts, ranges, rows, starts, sums);
  const nv::u32 index = blockIdx.x * blockDim.x + threadIdx.x;  // up to twice the rows, where every row has a tile of its own
  if (index < (nv::u32)rows && blockIdx.y == 0) {
    const int e = nv::range_of((int)index, firsts, ranges);
    if (row_scales != 0) row_scales[index] = scales[e];
    if (places != 0) {
      const int within = (int)index - firsts[e], count = (e + 1 < ranges ? firsts[e + 1] : rows) - firsts[e];
      const bool last = within + 32 >= min(count, (within | 127) + 1);
      places[index] = (nv::u32)(starts[e] + within) | (last ? nv::kLastOfPiece : 0);
    }
  }
  if (sources != 0 && index < (nv::u32)tiles) sources[index] = nv::source_of((int)index, firsts, starts, ranges, rows);
  const int tile = blockIdx.x;
  if (flat == 0 || tile >= tiles) return;
  if ((threadIdx.x & 31) < nv::source_of(tile, firsts, starts, ranges, rows).y) return;
  uint4* to = flat + (nv::u64)tile * across * 32;
  for (int piece = blockIdx.y * blockDim.x + threadIdx.x; piece < across * 32; piece += gridDim.y * blockDim.x)
    to[piece] = make_uint4(0, 0, 0, 0);
}

// Grid (columns / (16 * warps of a block), tiles): a warp takes 16 columns of a tile, a lane the rows r, r + 32, r + 64 and
// r + 96, whose scales share 16 bytes of each 512.
extern "C" __global__ void __launch_bounds__(256) nv_place_ranges(const nv::u8* __restrict__ scales, nv::u8* __restrict__ flat,
                                                                  const uint2* __restrict__ sources, int columns, int tiles) {
  const int across = (columns + 3) >> 2, tile = nv::far_index(), lane = threadIdx.x & 31;
  const int column = 16 * (blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5));
  if (tile >= tiles || column >= columns) return;
  const int first = (int)__ldg(&sources[tile].x), count = (int)__ldg(&sources[tile].y);
  uint4 row[4];
  NV_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int r = lane + 32 * k;
    row[k] = make_uint4(0, 0, 0, 0);
    if (r < count) row[k] = nv::sixteen_scales(scales + (nv::u64)(first + r) * columns, column, columns);
  }
  uint4* to = reinterpret_cast<uint4*>(flat) + ((nv::u64)tile * across + (column >> 2)) * 32 + lane;
  const int left = across - (column >> 2);
  to[0] = make_uint4(row[0].x, row[1].x, row[2].x, row[3].x);
  if (left > 1) to[32] = make_uint4(row[0].y, row[1].y, row[2].y, row[3].y);
  if (left > 2) to[64] = make_uint4(row[0].z, row[1].z, row[2].z, row[3].z);
  if (left > 3) to[96] = make_uint4(row[0].w, row[1].w, row[2].w, row[3].w);
}
