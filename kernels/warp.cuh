// What the GEMM kernels ask of a warp: fragments, asynchronous copies, and the tile a block works on.
//
// Each instruction has two forms.  On a GPU that has it, its PTX; elsewhere the same exchange of registers in ordinary
// code, which also lets tests/host run whole kernels with g++ (tests/host/cuda_on_host.h supplies the warp).
#pragma once

#include "nvfp4_math.cuh"

#ifdef __CUDACC__
#define NV_OUTLINE __device__ __noinline__
#define NV_SHARED_MEMORY(TYPE, NAME) extern __shared__ TYPE NAME[]
#else
#define NV_OUTLINE inline
#endif

namespace nv {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// ------------------------------------------------------------------------------------------------- copies

// 16 bytes from global to shared memory; zeros instead where `valid` is false (then nothing is read).
NV_DEVICE void copy16_async(void* shared, const void* global, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(valid ? 16 : 0) : "memory");
#else
  *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#endif
}

// Close the group of copies issued since the last call.
NV_DEVICE void close_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `kOpen` groups of this thread are still under way.
template <int kOpen>
NV_DEVICE void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
#endif
}

// ----------------------------------------------------------------------------------------------- BF16 MMA

// Four 8x8 matrices of 16-bit elements: lane 8i+r names row r of matrix i (16 bytes in shared memory); register i of
// lane l receives columns 2(l%4), 2(l%4)+1 of row l/4 of matrix i.
NV_DEVICE void load_matrices(unsigned (&registers)[4], const void* row) {
#ifdef __CUDA_ARCH__
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(at)
               : "memory");
#else
  const unsigned lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) {
    const auto from = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), 8 * i + lane / 4);
    registers[i] = reinterpret_cast<const unsigned*>(from)[lane % 4];
  }
#endif
}

NV_DEVICE float bf16_low(unsigned pair) { return value(pair << 16); }
NV_DEVICE float bf16_high(unsigned pair) { return value(pair & 0xFFFF0000u); }

// Products of two pairs, each rounded to BF16; subnormal numbers count.
NV_DEVICE unsigned multiply_bf16x2(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + (-0): changes nothing
  return product;
#else
  const unsigned low = to_bf16(multiply(bf16_low(a), bf16_low(b)));
  return low | static_cast<unsigned>(to_bf16(multiply(bf16_high(a), bf16_high(b)))) << 16;
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
// mma_bf16 without the instruction.  A call, not inlined: dozens of copies would take the compiler half a minute.
NV_OUTLINE float4 mma_bf16_soft(float4 sums, uint4 a, uint2 b) {
  float d[4] = {sums.x, sums.y, sums.z, sums.w};
  const unsigned fragment[4] = {a.x, a.y, a.z, a.w};
  const unsigned lane = threadIdx.x & 31, quad = lane & ~3u, p = lane & 3;
  for (unsigned q = 0; q < 4; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned upper = __shfl_sync(kAllLanes, fragment[2 * half], quad + q);
      const unsigned lower = __shfl_sync(kAllLanes, fragment[2 * half + 1], quad + q);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const unsigned other = __shfl_sync(kAllLanes, half ? b.y : b.x, 4 * (2 * p + column) + q);
        d[column] = fmaf(bf16_low(upper), bf16_low(other), d[column]);
        d[column] = fmaf(bf16_high(upper), bf16_high(other), d[column]);
        d[2 + column] = fmaf(bf16_low(lower), bf16_low(other), d[2 + column]);
        d[2 + column] = fmaf(bf16_high(lower), bf16_high(other), d[2 + column]);
      }
    }
  }
  return float4{d[0], d[1], d[2], d[3]};
}
#endif

// d += A (16x16, row major) * B (16x8, column major), BF16 with f32 sums.  With g = lane/4, p = lane%4:
// a = rows g, g+8, g, g+8 at k 2p, 2p, 2p+8, 2p+8; b = column g at k 2p, 2p+8; d = (g, 2p), (g, 2p+1), (g+8, ...).
NV_DEVICE void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const float4 sums = mma_bf16_soft(float4{d[0], d[1], d[2], d[3]}, uint4{a[0], a[1], a[2], a[3]}, uint2{b0, b1});
  d[0] = sums.x, d[1] = sums.y, d[2] = sums.z, d[3] = sums.w;
#endif
}

// ------------------------------------------------------------------------------------------------- tiles

// The rows a block works on: up to `rows` of them from `first` on, all of one expert.
struct Tile {
  int expert, first, rows;
};

// Sum of `value` over the lanes up to this one, itself included.
NV_DEVICE int sum_to_lane(int value) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// The tile of number `index` when every expert's range offsets[e] … offsets[e+1] is cut into tiles of `height` rows.
// All lanes of a warp ask together and get the same answer; `rows` is 0 past the last tile.
NV_DEVICE Tile find_tile(const int* offsets, int experts, int height, int index) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  int before = 0;  // tiles of the experts already passed
  for (int base = 0; base < experts; base += 32) {
    const int e = base + lane;
    const int first = e < experts ? offsets[e] : 0, last = e < experts ? offsets[e + 1] : 0;
    const int tiles = (last - first + height - 1) / height;
    const int sum = sum_to_lane(tiles);
    const int start = before + sum - tiles;
    const bool mine = index >= start && index < start + tiles;
    const unsigned who = __ballot_sync(kAllLanes, mine);
    if (who) {
      const int owner = __ffs(static_cast<int>(who)) - 1;
      const int row = __shfl_sync(kAllLanes, first + (index - start) * height, owner);
      const int end = __shfl_sync(kAllLanes, last, owner);
      return {base + owner, row, end - row < height ? end - row : height};
    }
    before += __shfl_sync(kAllLanes, sum, 31);
  }
  return {0, 0, 0};
}

// Rows behind the last expert's belong to nobody.  The blocks of the grid's last row, which never have a tile, write
// zeros there: `columns` of them from `column` on.
template <class T>
NV_DEVICE void clear_rows(T* out, int first, int rows, int n, int column, int columns) {
  if (blockIdx.y != gridDim.y - 1) return;
  for (int row = first; row < rows; ++row)
    for (int i = static_cast<int>(threadIdx.x); i < columns && column + i < n; i += static_cast<int>(blockDim.x))
      out[static_cast<long long>(row) * n + column + i] = T{};
}

}  // namespace nv
