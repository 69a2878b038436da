// Packed E2M1 codes and block scales back to BF16 or float32: code * (block scale * decode scale), in this order, as
// nvfp4viz/quant/decode.py has it.
//
//   nv_dequantize_{bf16,f32}_whole                one decode scale, linear block scales; NVFP4 alone, in whole blocks of threads
//   nv_dequantize_{bf16,f32}_flat                 one decode scale, linear block scales
//   nv_dequantize_{bf16,f32}_{linear,swizzled}    one decode scale for all, for every row, or for every range of rows
//
// A store is 16 bytes a lane, so a warp writes whole lines: 8 codes to BF16, 4 codes to float32.  A thread takes two such units and
// reads each as it will be stored, 4 bytes or 2 a lane.  Reading 16 bytes a lane and exchanging them is slower on an H200: what
// matters there is to read little ahead, so that writes are not cut up by reads, and to begin at once, since a block of threads
// lives for 3 µs: hence _whole, which has nothing to ask before its first load.
//
// NV_MOVE_ONLY    define to move the same bytes and compute nothing: what the memory allows (benchmarks/bench_gpu.py).

#include "blocks.cuh"

namespace nv {

// How a block's multiplier comes from its scale byte and the stored global scale.
enum Decoding {
  kEncodeScale = 0,   // s * (1 / G)
  kDecodeScale = 1,   // s * g
  kDivides = 2,       // s / G                           (compressed-tensors)
  kMx = 3,            // 2^(byte - 127)
  kMxInfinite = 4,    // the same, but byte 255 is infinity (ModelOpt)
};

struct Decoder {
  int decoding, block_shift;  // a block holds 2^block_shift elements
  bool unsigned_zero;         // ModelOpt reads code 8 as +0

  // s times a number, in blocks of 16: what _whole is for.
  NV_HD static Decoder nvfp4() { return {kDecodeScale, 4, false}; }

  NV_HD float multiplier(u32 byte, float global) const {
    if (decoding >= kMx) return byte == 255u && decoding == kMxInfinite ? value(kInf) : ue8m0_value(byte);
    const float s = e4m3_value(byte);
    return decoding == kDivides ? divide(s, global) : multiply(s, global);
  }
  NV_HD float global(float stored) const { return decoding == kEncodeScale ? divide(1.0f, stored) : stored; }
};

struct ToBf16 {
  static const int kCodes = 8;
  typedef u32 Packed;
  static __device__ __forceinline__ uint4 store(const float (&y)[8]) {
    uint4 out;
    out.x = pair(y[0], y[1]), out.y = pair(y[2], y[3]), out.z = pair(y[4], y[5]), out.w = pair(y[6], y[7]);
    return out;
  }
  // Two numbers; what a NaN becomes is settled in `decode`.
  static __device__ __forceinline__ u32 pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
#else
    return to_bf16(low) | (u32)to_bf16(high) << 16;
#endif
  }
  static __device__ __forceinline__ u32 rare(float low, float high) {
    return (is_nan(low) ? 0x7FC0u : to_bf16(low)) | (is_nan(high) ? 0x7FC0u : to_bf16(high)) << 16;
  }
  static __device__ __forceinline__ uint4 store_rare(const float (&y)[8]) {
    uint4 out;
    out.x = rare(y[0], y[1]), out.y = rare(y[2], y[3]), out.z = rare(y[4], y[5]), out.w = rare(y[6], y[7]);
    return out;
  }
};

struct ToF32 {
  static const int kCodes = 4;
  typedef u16 Packed;
  static __device__ __forceinline__ uint4 store(const float (&y)[4]) {
    return make_uint4(bits(y[0]), bits(y[1]), bits(y[2]), bits(y[3]));
  }
  static __device__ __forceinline__ u32 rare(float y) { return is_nan(y) ? kQuietNan : bits(y); }
  static __device__ __forceinline__ uint4 store_rare(const float (&y)[4]) {
    return make_uint4(rare(y[0]), rare(y[1]), rare(y[2]), rare(y[3]));
  }
};

// The same codes with every 8 (-0) made 0: a nibble whose low bits are 0 loses its sign.
NV_DEVICE u32 without_minus_zero(u32 codes) {
  const u32 not_zero = ((codes & 0x77777777u) + 0x77777777u) & 0x88888888u;
  return codes & (not_zero | 0x77777777u);
}

// Eight values to BF16 by table: a block has eight magnitudes, so their products are rounded once each, split into low and
// high bytes, and a byte permutation looks four codes up at a time.  Signs are put on afterwards: rounding is symmetric.
struct Table {
  u32 low[2], high[2];  // byte k: of magnitude k

  __device__ __forceinline__ explicit Table(float multiplier) {
    u32 pair[4];
    NV_UNROLL
    for (int k = 0; k < 4; ++k)
      pair[k] = ToBf16::pair(multiply(e2m1_value(2 * k), multiplier), multiply(e2m1_value(2 * k + 1), multiplier));
    NV_UNROLL
    for (int half = 0; half < 2; ++half) {
      low[half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x6420);
      high[half] = __byte_perm(pair[2 * half], pair[2 * half + 1], 0x7531);
    }
  }
  static __device__ __forceinline__ u32 look_up(const u32 (&bytes)[2], u32 sizes) {
#if defined(__CUDA_ARCH__)
    u32 r;  // __byte_perm would mask the selector once more
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(bytes[0]), "r"(bytes[1]), "r"(sizes));
    return r;
#else
    return __byte_perm(bytes[0], bytes[1], sizes);
#endif
  }
  __device__ __forceinline__ uint4 decode(u32 codes) const {
    const u32 sizes = codes & 0x77777777u, moved = codes << 4;  // signs of odd codes are the top bits of bytes, even ones' of `moved`
    const u32 l0 = look_up(low, sizes), l1 = look_up(low, sizes >> 16);
    const u32 h0 = look_up(high, sizes) ^ (__byte_perm(moved, codes, 0x5140) & 0x80808080u);
    const u32 h1 = look_up(high, sizes >> 16) ^ (__byte_perm(moved, codes, 0x7362) & 0x80808080u);
    return make_uint4(__byte_perm(l0, h0, 0x5140), __byte_perm(l0, h0, 0x7362), __byte_perm(l1, h1, 0x5140),
                      __byte_perm(l1, h1, 0x7362));
  }
};

NV_DEVICE uint4 decode_by_table(u32 codes, float multiplier, ToBf16) { return Table(multiplier).decode(codes); }
NV_DEVICE uint4 decode_by_table(u32, float, ToF32) { return make_uint4(0, 0, 0, 0); }

// One unit of kCodes codes.  Every NaN is written as the quiet one; there can be one only where the multiplier is not
// finite.
template <class Out>
NV_DEVICE uint4 decode(u32 codes, float multiplier, bool unsigned_zero) {
  if (unsigned_zero) codes = without_minus_zero(codes);
#if !defined(NV_HW_FP4)
  if (Out::kCodes == 8 && is_finite(multiplier)) return decode_by_table(codes, multiplier, Out());
#endif
  float y[Out::kCodes];
  NV_UNROLL
  for (int i = 0; i < Out::kCodes; i += 2) {
    e2m1_pair((codes >> (4 * i)) & 0xFFu, y[i], y[i + 1]);
    y[i] = multiply(y[i], multiplier), y[i + 1] = multiply(y[i + 1], multiplier);
  }
  return is_finite(multiplier) ? Out::store(y) : Out::store_rare(y);
}

// Codes are read once and values written once: neither is kept in the first cache.
NV_DEVICE u32 read_once(const u32* from) {
#if defined(__CUDA_ARCH__)
  u32 codes;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(codes) : "l"(from));
  return codes;
#else
  return *from;
#endif
}
NV_DEVICE u32 read_once(const u16* from) {
#if defined(__CUDA_ARCH__)
  u16 codes;
  asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(codes) : "l"(from));
  return codes;
#else
  return *from;
#endif
}
NV_DEVICE void write_once(uint4* to, uint4 values) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y),
               "r"(values.z), "r"(values.w)
               : "memory");
#else
  *to = values;
#endif
}

// One unit from its codes and the scale byte of its block.
template <class Out>
NV_DEVICE uint4 unit_of(u32 codes, u32 byte, float global, const Decoder& decoder) {
#if defined(NV_MOVE_ONLY)
  return make_uint4(codes, byte, codes, byte);
#else
  return decode<Out>(codes, decoder.multiplier(byte, global), decoder.unsigned_zero);
#endif
}

const int kUnits = 2, kThreads = 512;  // of a thread; of a block, where rows do not matter

// `given` says what becomes of the stored global scale, `decoder` the rest.
template <class Out, bool kWhole>
NV_DEVICE void dequantize_flat(const void* packed, const u8* scales, uint4* out, u64 units, Globals globals, Decoder given) {
  const Decoder decoder = kWhole ? Decoder::nvfp4() : given;
  const int shift = decoder.block_shift - (Out::kCodes == 8 ? 3 : 2);  // units in a block, as a power of two
  const u64 first = (u64)blockIdx.x * (kUnits * kThreads) + threadIdx.x;
  u32 codes[kUnits], bytes[kUnits];
  NV_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const u64 unit = first + i * kThreads;
    if (!kWhole && unit >= units) continue;
    codes[i] = read_once(static_cast<const typename Out::Packed*>(packed) + unit);
    bytes[i] = __ldg(scales + (first >> shift) + ((i * kThreads) >> shift));
  }
  const float global = given.global(globals.of(0));
  NV_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const u64 unit = first + i * kThreads;
    if (kWhole || unit < units) write_once(out + unit, unit_of<Out>(codes[i], bytes[i], global, decoder));
  }
}

// Grid (units of a row / (2 blockDim.x), rows / blockDim.y).
template <class Out, bool kSwizzled>
NV_DEVICE void dequantize_rows(const void* packed, const u8* scales, uint4* out, int rows, int units, Globals globals, Decoder decoder) {
  typedef typename Out::Packed Packed;
  const int shift = decoder.block_shift - (Out::kCodes == 8 ? 3 : 2);
  const int columns = units >> shift, tiles = (columns + 3) >> 2;
  const int row = far_index() * blockDim.y + threadIdx.y;
  const int first = blockIdx.x * (kUnits * blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  const u64 start = (u64)row * units;
  u32 codes[kUnits], bytes[kUnits];
  NV_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const int unit = first + i * blockDim.x, column = unit >> shift;
    if (unit < units) {
      codes[i] = read_once(static_cast<const Packed*>(packed) + start + unit);
      bytes[i] = __ldg(scales + (kSwizzled ? offset_128x4(row, column, tiles) : (u64)row * columns + column));
    }
  }
  const float global = decoder.global(globals.of(row));
  NV_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const int unit = first + i * blockDim.x;
    if (unit < units) write_once(out + start + unit, unit_of<Out>(codes[i], bytes[i], global, decoder));
  }
}

}  // namespace nv

#define NV_DEQUANTIZE_ROWS(dtype, Out, layout, swizzled)                                                             \
  extern "C" __global__ void __launch_bounds__(256) nv_dequantize_##dtype##_##layout(                                \
      const void* __restrict__ packed, const nv::u8* __restrict__ scales, uint4* __restrict__ out, int rows,         \
      int units, const float* __restrict__ global_scales, float global_scale, const int* __restrict__ offsets,       \
      int ranges, int kind, int decoding, int block_shift, int unsigned_zero) {                                      \
    nv::dequantize_rows<nv::Out, swizzled>(packed, scales, out, rows, units,                                         \
                                           {global_scales, global_scale, offsets, ranges, kind},                     \
                                           {decoding, block_shift, unsigned_zero != 0});                             \
  }

#define NV_DEQUANTIZE(dtype, Out)                                                                                    \
  extern "C" __global__ void __launch_bounds__(512) nv_dequantize_##dtype##_whole(                                   \
      const void* __restrict__ packed, const nv::u8* __restrict__ scales, uint4* __restrict__ out,                   \
      const float* __restrict__ global_scales, float global_scale, int decoding) {                                   \
    nv::dequantize_flat<nv::Out, true>(packed, scales, out, 0, {global_scales, global_scale, 0, 0, nv::kOne},        \
                                       {decoding, 4, false});                                                        \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(512) nv_dequantize_##dtype##_flat(                                    \
      const void* __restrict__ packed, const nv::u8* __restrict__ scales, uint4* __restrict__ out, nv::u64 units,    \
      const float* __restrict__ global_scales, float global_scale, int decoding, int block_shift,                    \
      int unsigned_zero) {                                                                                           \
    nv::dequantize_flat<nv::Out, false>(packed, scales, out, units, {global_scales, global_scale, 0, 0, nv::kOne},   \
                                        {decoding, block_shift, unsigned_zero != 0});                                \
  }                                                                                                                  \
  NV_DEQUANTIZE_ROWS(dtype, Out, linear, false)                                                                      \
  NV_DEQUANTIZE_ROWS(dtype, Out, swizzled, true)

NV_DEQUANTIZE(bf16, ToBf16)
NV_DEQUANTIZE(f32, ToF32)
