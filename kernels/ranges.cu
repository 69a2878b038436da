// What ranges of rows (the experts' rows of a batch) mean for every row, worked out once before a matrix is quantised.
//
//   nv_spread_ranges     scales of the rows, and with `places` their rows in a 128x4 layout where every range is padded to
//                        tiles of its own; the padding is written as 0
//
// Grid: one block for every 256 rows; with `places` kClear more for every tile of the layout.  Shared memory: 2 * `ranges`
// ints.

#include "blocks.cuh"
#include "warp.cuh"

namespace nv {

const int kClear = 4;  // blocks that share the padding of a tile

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

// Zeros where a tile has no rows.  32 threads share a column of 512 bytes: rows r, r + 32, r + 64, r + 96 are 16 of them.
NV_DEVICE void clear_padding(u8* scales, int tile, int part, int filled, int tiles) {
  if (filled >= 128) return;
  for (int item = part * blockDim.x + threadIdx.x; item < 32 * tiles; item += kClear * blockDim.x) {
    const int r = item & 31;
    u32* at = reinterpret_cast<u32*>(scales + ((u64)tile * tiles + (item >> 5)) * 512 + r * 16);
    if (filled <= r) *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    else
      for (int k = 1; k < 4; ++k)
        if (filled <= r + 32 * k) at[k] = 0;
  }
}

}  // namespace nv

extern "C" __global__ void __launch_bounds__(256) nv_spread_ranges(const int* __restrict__ offsets, int ranges, int rows,
                                                                   const float* __restrict__ range_scales,
                                                                   float* __restrict__ row_scales, int* __restrict__ places,
                                                                   nv::u8* __restrict__ scales, int tiles) {
  NV_SHARED_MEMORY(int, shared);  // searching takes several reads one after another: not from global memory
  int* firsts = shared;
  int* starts = shared + ranges;
  for (int e = threadIdx.x; e < ranges; e += blockDim.x) firsts[e] = offsets[e];
  __syncthreads();
  if (places != 0) {
    nv::tile_starts(firsts, ranges, rows, starts);
    __syncthreads();
  }
  const int row_blocks = (rows + 255) / 256, index = blockIdx.x - row_blocks;
  if (index < 0) {
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    const int e = nv::range_of(row, firsts, ranges);
    if (row_scales != 0) row_scales[row] = range_scales[e];
    if (places != 0) places[row] = starts[e] + row - firsts[e];
    return;
  }
  const int tile = index / nv::kClear, e = nv::range_of(128 * tile, starts, ranges);
  const int end = e + 1 < ranges ? firsts[e + 1] : rows;
  const int filled = end - firsts[e] - (128 * tile - starts[e]);
  nv::clear_padding(scales, tile, index % nv::kClear, filled > 0 ? filled : 0, tiles);
}
