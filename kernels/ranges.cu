// What ranges of rows (the experts' rows of a batch) mean for a matrix, and its scales in a 128x4 layout where every range is
// padded to tiles of its own.
//
//   nv_spread_ranges    a global scale for every row, and for every tile of the layout its first row and how many rows it
//                       holds; either may be left out.  A thread a row and a tile; shared memory: two ints a range.
//   nv_place_ranges     linear scales into that layout, padding 0
//
// Quantising straight into the layout was slower: tiles are half empty where ranges are short, and threads that wait for
// nothing still take the places of those that load.

#include "blocks.cuh"
#include "warp.cuh"

namespace nv {

// First row of the layout of each range: 128 times the tiles of the ranges before it.  By the first warp, for the block.
NV_DEVICE void tile_starts(const int* offsets, int ranges, int rows, int* starts) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int before = 0;
  for (int base = 0; base < ranges; base += 32) {
    const int e = base + lane;
    const int end = e + 1 < ranges ? offsets[e + 1] : rows;  // rows past the last range belong to it
    const int tiles = e < ranges ? (end - offsets[e] + 127) >> 7 : 0;
    int sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < ranges) starts[e] = (before + sum - tiles) * 128;
    before += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
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

extern "C" __global__ void __launch_bounds__(256) nv_spread_ranges(const int* __restrict__ offsets, int ranges, int rows,
                                                                   const float* __restrict__ range_scales,
                                                                   float* __restrict__ row_scales,
                                                                   uint2* __restrict__ sources, int tiles) {
  NV_SHARED_MEMORY(int, shared);  // searching takes several reads one after another: not from global memory
  int* firsts = shared;
  int* starts = shared + ranges;
  for (int e = threadIdx.x; e < ranges; e += blockDim.x) firsts[e] = __ldg(offsets + e);
  __syncthreads();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (row_scales != 0 && index < rows) row_scales[index] = __ldg(range_scales + nv::range_of(index, firsts, ranges));
  if (sources == 0) return;
  nv::tile_starts(firsts, ranges, rows, starts);
  __syncthreads();
  if (index >= tiles) return;
  const int e = nv::range_of(128 * index, starts, ranges), end = e + 1 < ranges ? firsts[e + 1] : rows;
  const int first = firsts[e] + 128 * index - starts[e], left = end - first;
  uint2 source;
  source.x = (nv::u32)first, source.y = (nv::u32)(left < 0 ? 0 : left < 128 ? left : 128);
  sources[index] = source;
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
