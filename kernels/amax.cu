// Largest magnitudes, NaN if there is one, as nvfp4viz.quant.amax: of a tensor, of every row, of ranges of rows.
//
//   nv_amax_{bf16,f16,f32}         out: one float32 bit pattern, zero before the launch
//   nv_amax_rows_{bf16,f16,f32}    a warp takes a row; out: one for each row, or (zero before) for each range
//
// Magnitudes of one sign are ordered like integers, and so the maximum is taken; a NaN is larger than infinity.

#include "blocks.cuh"

namespace nv {

// Patterns of 16 bits are compared where they lie in a word; the upper one needs no shift.
struct AmaxBf16 {
  static const int kPerWord = 2;
  static __device__ __forceinline__ u32 join(u32 top, u32 word) {
    return max(top, max(word & 0x7FFF0000u, (word << 16) & 0x7FFF0000u));
  }
  static __device__ __forceinline__ u32 float_bits(u32 top) { return top; }
  static __device__ __forceinline__ u32 element(const void* x, u64 i) { return (u32) static_cast<const u16*>(x)[i] << 16; }
};

struct AmaxF16 : AmaxBf16 {
  static __device__ __forceinline__ u32 float_bits(u32 top) { return bits(from_f16((u16)(top >> 16))); }
};

struct AmaxF32 {
  static const int kPerWord = 1;
  static __device__ __forceinline__ u32 join(u32 top, u32 word) { return max(top, word & kAbs); }
  static __device__ __forceinline__ u32 float_bits(u32 top) { return top; }
  static __device__ __forceinline__ u32 element(const void* x, u64 i) { return static_cast<const u32*>(x)[i]; }
};

template <class T>
NV_DEVICE u32 finish(u32 top) {
  for (int step = 16; step > 0; step >>= 1) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  const u32 u = T::float_bits(top);
  return u > kInf ? kQuietNan : u;
}

template <class T>
NV_DEVICE u32 join4(u32 top, const uint4& v) {
  return T::join(T::join(T::join(T::join(top, v.x), v.y), v.z), v.w);
}

// A warp takes `chunk` vectors of 16 bytes that lie together, the last thread of all what is left of one.
template <class T>
NV_DEVICE void amax_all(const void* x, u64 elements, u32 chunk, u32* out) {
  const u64 vectors = elements / (4 * T::kPerWord);
  const u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32 * chunk;
  const u64 last = first + chunk < vectors ? first + chunk : vectors;
  const uint4* from = static_cast<const uint4*>(x);
  u32 top = 0;
  u64 i = first + (threadIdx.x & 31);
  for (; i + 96 < last; i += 128) {
    uint4 v[4];
    NV_UNROLL
    for (int k = 0; k < 4; ++k) v[k] = __ldg(from + i + 32 * k);
    NV_UNROLL
    for (int k = 0; k < 4; ++k) top = join4<T>(top, v[k]);
  }
  for (; i < last; i += 32) top = join4<T>(top, __ldg(from + i));
  const u64 rest = vectors * (4 * T::kPerWord) + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && rest < elements) top = T::join(top, T::element(x, rest));
  __shared__ u32 of_warp[8];
  top = finish<T>(top);
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = top;
  __syncthreads();
  if (threadIdx.x != 0) return;
  NV_UNROLL
  for (int i = 1; i < 8; ++i) top = max(top, of_warp[i]);
  if (top != 0) atomicMax(out, top);
}

// `columns` elements a row, a multiple of 16 bytes.
template <class T>
NV_DEVICE void amax_rows(const void* x, int rows, int columns, const int* offsets, int ranges, u32* out) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
  if (row >= rows) return;
  const int vectors = columns / (4 * T::kPerWord);
  const uint4* from = static_cast<const uint4*>(x) + (u64)row * vectors;
  u32 top = 0;
  for (int i = lane; i < vectors; i += 32) top = join4<T>(top, __ldg(from + i));
  top = finish<T>(top);
  if (lane != 0) return;
  if (offsets == 0) out[row] = top;
  else atomicMax(out + range_of(row, offsets, ranges), top);
}

}  // namespace nv

#define NV_AMAX(dtype, T)                                                                                          \
  extern "C" __global__ void __launch_bounds__(256) nv_amax_##dtype(const void* __restrict__ x, nv::u64 elements,  \
                                                                   nv::u32 chunk, nv::u32* __restrict__ out) {     \
    nv::amax_all<nv::T>(x, elements, chunk, out);                                                                  \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256) nv_amax_rows_##dtype(                                          \
      const void* __restrict__ x, int rows, int columns, const int* __restrict__ offsets, int ranges,              \
      nv::u32* __restrict__ out) {                                                                                 \
    nv::amax_rows<nv::T>(x, rows, columns, offsets, ranges, out);                                                  \
  }

NV_AMAX(bf16, AmaxBf16)
NV_AMAX(f16, AmaxF16)
NV_AMAX(f32, AmaxF32)
