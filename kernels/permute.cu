// How routed tokens travel to their experts and back: nvfp4viz/moe/dataflow.py on the device, same order, same bits.
//
// plan    offsets of every expert; source[r], the token of permuted row r; target[t, j], the row of route j
//         of token t, or T*k for a route whose expert is not here.  Rows of one expert lie by token, then by rank.
// gather  permuted rows of x, 16 bytes at a time
// combine out[t] = bf16(Σ_j f32(bf16(y[target[t, j]] * bf16(w[t, j])))), j ascending
//
// A stable order needs no atomics.  The routes are cut into chunks; one warp for every (expert, chunk) counts by ballot.
// The counts, expert by expert and chunk by chunk, are in the order of the rows, so a warp's first row is the sum of all
// counts before its own.
#include "nvfp4_math.cuh"

#include "warp.cuh"

namespace nv {

constexpr int kChunk = 1024;  // routes that one warp looks at

// The expert of route i as this rank numbers it; -1 where it is not here.
NV_DEVICE int local_expert(const int* ids, const int* expert_map, int i) {
  const int id = ids[i];
  return expert_map && id >= 0 ? expert_map[id] : id;
}

}  // namespace nv

// counts[e, c]: routes of chunk c to expert e.  Grid experts * chunks / 4 up, block 128: a warp for each count.
extern "C" __global__ void nv_count_routes(const int* ids, const int* expert_map, int* counts, int routes, int experts,
                                           int chunks) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x % 32), expert = index / chunks, first = index % chunks * nv::kChunk;
  if (expert >= experts) return;
  int count = 0;
#pragma unroll 8
  for (int i = first + lane; i < first + nv::kChunk; i += 32)
    count += i < routes && nv::local_expert(ids, expert_map, i) == expert;
  for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(nv::kAllLanes, count, step);
  if (lane == 0) counts[index] = count;
}

// Offsets, and each expert's share of `source` and `target`.  Same grid; `source` and `target` are filled beforehand
// with -1 and T*k.
extern "C" __global__ void nv_plan_routes(const int* ids, const int* expert_map, const int* counts, int* offsets,
                                          int* source, int* target, int routes, int top_k, int experts, int chunks) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x % 32), expert = index / chunks, first = index % chunks * nv::kChunk;
  if (expert >= experts) return;
  int row = 0;
#pragma unroll 8
  for (int i = lane; i < index; i += 32) row += counts[i];
  for (int step = 16; step > 0; step /= 2) row += __shfl_xor_sync(nv::kAllLanes, row, step);
  if (lane == 0 && first == 0) offsets[expert] = row;
  if (lane == 0 && index == experts * chunks - 1) offsets[experts] = row + counts[index];
#pragma unroll 8
  for (int i = first + lane; i < first + nv::kChunk; i += 32) {
    const bool mine = i < routes && nv::local_expert(ids, expert_map, i) == expert;
    const unsigned who = __ballot_sync(nv::kAllLanes, mine);
    if (mine) {
      const int at = row + __popc(who & ((1u << lane) - 1));
      source[at] = i / top_k;
      target[i] = at;
    }
    row += __popc(who);
  }
}

// rows[r] = x[source[r]], zeros where source is -1.  Grid (rows, pieces / 128 up), block 128; 16-byte pieces.
extern "C" __global__ void nv_gather_rows(const uint4* x, const int* source, uint4* rows, int row_pieces) {
  const int piece = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (piece >= row_pieces) return;
  const long long row = blockIdx.x;
  const int token = source[row];
  const uint4 nothing{0, 0, 0, 0};
  rows[row * row_pieces + piece] = token < 0 ? nothing : x[static_cast<long long>(token) * row_pieces + piece];
}

// Grid (tokens, H / 1024 up), block 128: eight BF16 a thread.
extern "C" __global__ void nv_combine_routes(const uint4* y, const int* target, const float* weights, uint4* out,
                                             int top_k, int row_pieces, int rows) {
  const int piece = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (piece >= row_pieces) return;
  const long long token = blockIdx.x;
  float total[8] = {};
  for (int j = 0; j < top_k; ++j) {
    const int row = target[token * top_k + j];
    const float weight = nv::from_bf16(nv::to_bf16(weights[token * top_k + j]));
    const uint4 four = row < rows ? y[static_cast<long long>(row) * row_pieces + piece] : uint4{0, 0, 0, 0};
    const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned element = i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xFFFFu;
      const float product = nv::multiply(nv::from_bf16(static_cast<nv::u16>(element)), weight);
      total[i] = total[i] + nv::from_bf16(nv::to_bf16(product));
    }
  }
  unsigned packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // a sum of infinities is a NaN of either sign on some machines: write the one that the reference writes
    const unsigned low = total[2 * i] != total[2 * i] ? 0x7FFFu : nv::to_bf16(total[2 * i]);
    const unsigned high = total[2 * i + 1] != total[2 * i + 1] ? 0x7FFFu : nv::to_bf16(total[2 * i + 1]);
    packed[i] = low | high << 16;
  }
  out[token * row_pieces + piece] = uint4{packed[0], packed[1], packed[2], packed[3]};
}
