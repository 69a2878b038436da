// The number formats of NVFP4 and MXFP4 to the bit, for the host and the device; recipes.cuh has the blocks.
//
// One source for g++, nvcc and NVRTC, so it includes nothing: NVRTC ships neither <cstdint> nor cuda_fp4.h.  Where a GPU
// has an instruction (E2M1, E4M3, UE8M0 conversions, the approximate reciprocal) the instruction is used, elsewhere the
// same bits are computed from integers and single IEEE operations.  The truth is nvfp4viz.quant; tests/host compares
// this file with it on the CPU, tests/gpu on a GPU.
//
// Compile with --fmad=false (device) or -ffp-contract=off (host), never with -ftz or fast-math: every operator below is
// one IEEE operation in float32.
//
// NV_FORCE_SOFT   define to take the software path everywhere, reciprocal table included (make selftest does).
// NV_HW_FP4       the E2M1 and UE8M0 conversions exist: sm_100 and later, "a" and "f" targets only.
// NV_HW_MMA       the block-scaled mma.sync exists: sm_120a/f, sm_121a/f.
// NV_HW_E4M3      the E4M3 conversion exists: sm_89 and later.

#pragma once

#if defined(__CUDACC__)
#define NV_HD __host__ __device__ __forceinline__
#define NV_DEVICE __device__ __forceinline__
#else
#define NV_HD inline
#define NV_DEVICE inline
#endif

#if defined(__CUDA_ARCH__) && !defined(NV_FORCE_SOFT)
#define NV_HW_RCP 1
#if __CUDA_ARCH__ >= 890
#define NV_HW_E4M3 1
#endif
// A plain sm_100 or sm_120 target refuses the FP4 instructions, so it is not enough to ask for the architecture.
#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__))
#define NV_HW_FP4 1
#if __CUDA_ARCH__ >= 1200
#define NV_HW_MMA 1
#endif
#endif
#endif

#if defined(__CUDA_ARCH__)
#define NV_UNROLL _Pragma("unroll")
#else
#define NV_UNROLL
#endif

namespace nv {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

const u32 kAbs = 0x7FFFFFFFu;
const u32 kInf = 0x7F800000u;
const u32 kNan = 0x7FFFFFFFu;       // what the GPU's own operations answer
const u32 kQuietNan = 0x7FC00000u;  // what nvfp4viz writes for a NaN

// ------------------------------------------------------------------------------------------- single operations

NV_HD u32 bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  u32 u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
#endif
}

NV_HD float value(u32 u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
#endif
}

NV_HD bool is_nan(float x) { return x != x; }
NV_HD bool is_finite(float x) { return (bits(x) & kAbs) < kInf; }

NV_HD float magnitude(float x) {
#if defined(__CUDA_ARCH__)
  return fabsf(x);  // a modifier of the instruction that reads it
#else
  return value(bits(x) & kAbs);
#endif
}

// A product as the GPU gives it: every NaN is 0x7FFFFFFF.  x86 would keep or invent a sign.
NV_HD float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  const float p = a * b;
  return p != p ? value(kNan) : p;
#endif
}

NV_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// a * power + b, rounded once: the product with a power of two is exact.
NV_HD float scale_add(float a, float power, float b) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, power, b);
#else
  return a * power + b;
#endif
}

NV_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  const float q = a / b;
  return q != q ? value(kNan) : q;
#endif
}

// Larger and smaller of two numbers; a NaN, quiet or signalling, loses against a number.
NV_HD float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return is_nan(a) ? b : is_nan(b) ? a : a > b ? a : b;
#endif
}

NV_HD float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return is_nan(a) ? b : is_nan(b) ? a : a < b ? a : b;
#endif
}

// ------------------------------------------------------------------------------------------ BF16 and FP16

NV_HD float from_bf16(u16 b) { return value((u32)b << 16); }

// To nearest even; a NaN becomes quiet and keeps its sign and top bits.
NV_HD u16 to_bf16(float x) {
  const u32 u = bits(x);
  if ((u & kAbs) > kInf) return (u16)((u >> 16) | 0x40u);
  return (u16)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// Exact; a NaN keeps its payload.  Moving the exponent field up by 13 bits leaves it 112 too low, subnormals included.
NV_HD float from_f16(u16 h) {
  const u32 size = (u32)(h & 0x7FFFu) << 13, sign = (u32)(h & 0x8000u) << 16;
  if (size >= 0x0F800000u) return value(sign | kInf | (size & 0x7FFFFFu));
  return value(sign | bits(value(size) * 0x1p112f));
}

// To nearest even, overflow to infinity; a NaN becomes quiet and keeps its sign and top bits.
NV_HD u16 to_f16(float x) {
  const u32 u = bits(x), size = u & kAbs, sign = (u >> 16) & 0x8000u;
  if (size > kInf) return (u16)(sign | 0x7E00u | ((size >> 13) & 0x3FFu));
  if (size >= 0x477FF000u) return (u16)(sign | 0x7C00u);  // 65520, half way above the largest
  // Below 2^-14 the result is a multiple of 2^-24, which is what one addition of 0.5 leaves of it.
  if (size < 0x38800000u) return (u16)(sign | (bits(value(size) + 0.5f) - 0x3F000000u));
  return (u16)(sign | ((size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13));
}

// ------------------------------------------------------------------------------------------------- E2M1

// 2^23 + code of |y|.  Codes against magnitudes are a concave line of three pieces, min(2m, m + 2, m/2 + 4), that passes
// through the integers 0 to 7 at the values 0, .5, 1, 1.5, 2, 3, 4, 6.  Adding 2^23, where floats are the integers, rounds
// each piece to nearest even in one operation; rounding is monotonic, so the minimum may be taken after it.  The last
// minimum saturates, and turns NaN into 7.
NV_HD float e2m1_sum(float y) {
  const float m = magnitude(y), base = 0x1p23f;
  return smaller(smaller(add(add(m, m), base), add(m, base + 2.0f)), smaller(add(multiply(m, 0.5f), base + 4.0f), base + 7.0f));
}

NV_HD u32 e2m1_code_soft(float y) {
  const u32 u = bits(y);
  const u32 code = bits(e2m1_sum(y)) & 7u;
  return (u & kAbs) > kInf ? 7u : code | ((u >> 28) & 8u);
}

// Code 0 to 15 of a float: nearest, ties to even, saturating; every NaN is 7 (+6), a zero keeps its sign.
NV_HD u32 e2m1_code(float y) {
#if defined(NV_HW_FP4)
  u32 r;  // the second source of the conversion is the low nibble
  asm("{ .reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %2, %1; mov.b32 %0, {c, c, c, c}; }" : "=r"(r) : "f"(y), "f"(0.0f));
  return r & 15u;
#else
  return e2m1_code_soft(y);
#endif
}

// Magnitude code with ties toward zero: how many midpoints lie strictly below |y|; 0 for a NaN.
NV_HD u32 e2m1_midpoints_below(float y) {
  const float m = magnitude(y);
  return (u32)(m > 0.25f) + (u32)(m > 0.75f) + (u32)(m > 1.25f) + (u32)(m > 1.75f) + (u32)(m > 2.5f) + (u32)(m > 3.5f) +
         (u32)(m > 5.0f);
}

// The three bits below the sign lie where float32 has exponent and mantissa, 126 binades too low, zero and 0.5 included.
NV_HD float e2m1_value(u32 code) { return value(((code & 8u) << 28) | ((code & 7u) << 22)) * 0x1p126f; }

// Values of the two codes of a byte, low nibble first.
NV_HD void e2m1_pair(u32 byte, float& low, float& high) {
#if defined(NV_HW_FP4)
  asm("{ .reg .b8 c, z1, z2, z3; .reg .b16 l, h; .reg .b32 p;\n"
      "mov.b32 {c, z1, z2, z3}, %2; cvt.rn.f16x2.e2m1x2 p, c; mov.b32 {l, h}, p; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high)
      : "r"(byte));
#else
  low = e2m1_value(byte);
  high = e2m1_value(byte >> 4);
#endif
}

#if defined(__CUDA_ARCH__)
// 2^23 + c0 + 16 c1 + 256 c2 + 4096 c3, exact: four codes in the low 16 bits, packed by the units that multiply, because
// those that shift and select are the busier ones.
NV_HD u32 e2m1_pack4_sizes(const float* y) {
  const float base = 0x1p23f;
  float sum = __fmaf_rn(add(e2m1_sum(y[1]), -base), 16.0f, e2m1_sum(y[0]));
  sum = __fmaf_rn(add(e2m1_sum(y[2]), -base), 256.0f, sum);
  return bits(__fmaf_rn(add(e2m1_sum(y[3]), -base), 4096.0f, sum));
}
#endif

// The signs of eight floats, that of element i at bit 4i + 3.
NV_HD u32 e2m1_signs8(const float* y) {
#if defined(__CUDA_ARCH__)
  const u32 even = __byte_perm(__byte_perm(bits(y[0]), bits(y[2]), 0x0073),
                               __byte_perm(bits(y[4]), bits(y[6]), 0x0073), 0x5410);
  const u32 odd = __byte_perm(__byte_perm(bits(y[1]), bits(y[3]), 0x0073),
                              __byte_perm(bits(y[5]), bits(y[7]), 0x0073), 0x5410);
  return ((even & 0x80808080u) >> 4) | (odd & 0x80808080u);
#else
  u32 r = 0;
  for (int i = 0; i < 8; ++i) r |= (bits(y[i]) >> 31) << (4 * i + 3);
  return r;
#endif
}

// Codes of eight products, element i at bits 4i.  On a GPU a NaN among them must be positive, as its products' are.
NV_HD u32 e2m1_pack8_soft(const float* y) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(e2m1_pack4_sizes(y), e2m1_pack4_sizes(y + 4), 0x5410) | e2m1_signs8(y);
#else
  u32 r = 0;
  for (int i = 0; i < 8; ++i) r |= e2m1_code_soft(y[i]) << (4 * i);
  return r;
#endif
}

NV_HD u32 e2m1_pack8(const float* y) {
#if defined(NV_HW_FP4)
  u32 r;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(r)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return r;
#else
  return e2m1_pack8_soft(y);
#endif
}

// The same for eight elements times a positive factor, where no product reaches 7 and none is NaN: what nearly all blocks
// are.  Then the last minimum of e2m1_sum has nothing to do, the sign is the element's, and the sums, positive floats, are
// ordered like integers.  Shifted by four bits each and added, they leave the codes and one constant.
NV_HD u32 e2m1_pack8_small(const float* x, float factor) {
  const float base = 0x1p23f;
  u32 sum = 0;
  NV_UNROLL
  for (int i = 7; i >= 0; --i) {
    const float m = multiply(magnitude(x[i]), factor);
    const u32 r0 = bits(scale_add(m, 2.0f, base)), r1 = bits(add(m, base + 2.0f)), r2 = bits(scale_add(m, 0.5f, base + 4.0f));
    const u32 least = r0 < r1 ? r0 : r1;
    sum = sum * 16u + (least < r2 ? least : r2);
  }
  return (sum - 0xFB000000u) | e2m1_signs8(x);  // 0xFB000000 is 2^23 as bits, times 1 + 16 + ... + 16^7, modulo 2^32
}

// ------------------------------------------------------------------------------------------------- E4M3

NV_HD u32 e4m3_byte_soft(float x) {
  const u32 u = bits(x), size = u & kAbs, sign = (u >> 24) & 0x80u;
  if (size > kInf) return 0x7Fu;
  if (size > 0x43E00000u) return sign | 0x7Eu;  // above 448
  // Below 2^-6 the result is a multiple of 2^-9, the ulp of 2^14.
  if (size < 0x3C800000u) return sign | (bits(value(size) + 0x1p14f) - 0x46800000u);
  return sign | (((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - (120u << 3));
}

// Nearest, ties to even, saturating at 448; every NaN is 0x7F.
NV_HD u32 e4m3_byte(float x) {
#if defined(NV_HW_E4M3)
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(r) : "f"(x), "f"(0.0f));
  return r & 0xFFu;
#else
  return e4m3_byte_soft(x);
#endif
}

NV_HD float e4m3_value_soft(u32 byte) {
  if ((byte & 0x7Fu) == 0x7Fu) return value(kQuietNan);
  return value(((byte & 0x80u) << 24) | ((byte & 0x7Fu) << 20)) * 0x1p120f;
}

// Value of a byte; 0x7F and 0xFF are NaN.
NV_HD float e4m3_value(u32 byte) {
#if defined(NV_HW_E4M3)
  float x;
  asm("{ .reg .b32 p; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 p, %1; mov.b32 {l, h}, p; cvt.f32.f16 %0, l; }" : "=f"(x) : "h"((u16)byte));
  return x;
#else
  return e4m3_value_soft(byte);
#endif
}

// ------------------------------------------------------------------------------------------------- UE8M0

// 2^(field - 127); field 0 is 2^-127, a float32 subnormal.
NV_HD float power_of_two(u32 field) { return value(field == 0 ? 0x00400000u : field << 23); }

NV_HD u32 ue8m0_byte_soft(float x) {
  const u32 u = bits(x), size = u & kAbs;
  if (size > kInf || (u != size && size != 0)) return 255u;
  if (size < 0x00800000u) return (u32)(size > 0x00400000u);
  const u32 field = (size >> 23) + (u32)((size & 0x7FFFFFu) != 0);
  return field < 254u ? field : 254u;
}

// The smallest power of two that is not below x; infinity becomes 2^127, NaN and negative numbers byte 255.
NV_HD u32 ue8m0_byte(float x) {
#if defined(NV_HW_FP4)
  u16 r;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %2, %1;" : "=h"(r) : "f"(x), "f"(0.0f));
  return x < 0.0f ? 255u : r & 0xFFu;
#else
  return ue8m0_byte_soft(x);
#endif
}

NV_HD float ue8m0_value(u32 byte) { return byte == 255u ? value(kQuietNan) : power_of_two(byte); }

// ------------------------------------------------------------------------------- rcp.approx.ftz.f32

// `table` holds 2^23 signed bytes: ulps between the chip's reciprocal of 1.m and the correctly rounded one (measured on
// an H200, nvfp4viz/quant/data).  Subnormal inputs count as zero, subnormal results become zero.
NV_HD float rcp_table_ftz(float x, const i8* table) {
  const u32 u = bits(x), sign = u & 0x80000000u, mantissa = u & 0x7FFFFFu;
  const int exponent = (int)((u >> 23) & 0xFFu);
  if (exponent == 255) return value(mantissa != 0 ? kNan : sign);
  if (exponent == 0) return value(sign | kInf);
  const int of_significand = (int)bits(divide(1.0f, value(0x3F800000u | mantissa))) + table[mantissa];
  const int moved = of_significand - (exponent - 127) * (1 << 23);
  return value(moved < 0x00800000 ? sign : sign | (u32)moved);
}

NV_HD float rcp_approx_ftz(float x, const i8* table) {
#if defined(NV_HW_RCP)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return rcp_table_ftz(x, table);
#endif
}

// ------------------------------------------------------------------------------- scales in memory

// Byte offset of scale (row, column) in the 128x4 layout; `tiles` is the number of columns over 4, rounded up.
template <class Row>
NV_HD u64 offset_128x4(Row row, int column, int tiles) {
  return ((u64)(row >> 7) * tiles + (column >> 2)) * 512 + ((row & 31) << 4) + (((row >> 5) & 3) << 2) + (column & 3);
}

}  // namespace nv
