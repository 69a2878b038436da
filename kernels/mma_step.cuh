// One step of the block-scaled tensor core (K = 64, E2M1 operands), bit for bit, in integers only.
//
// The seven rules are stated in nvfp4viz/quant/tensor_core_step.py (after MMA-Sim, arXiv 2511.10909); this is the same
// function for any GPU and for g++.  tests/host/test_host_mma_step.py holds it to that reference.
//
// Codes travel as the instruction takes them: eight E2M1 codes to a 32-bit word, the element of lowest k in the lowest
// nibble.  Scales travel as one word a side: byte g belongs to k 16g … 16g+15 (UE4M3), or to k 32g … 32g+31 (UE8M0).
#pragma once

#include "bytes.cuh"
#include "nvfp4_math.cuh"

namespace nv {

enum MmaKind { kNvfp4 = 0, kMxfp4 = 1 };  // UE4M3 scales of 16 elements; UE8M0 scales of 32

constexpr unsigned kMmaNan = 0x7FFFFFFFu;   // the only NaN a tensor core writes
constexpr int kMmaFractionBits = 35;        // where rule 6 cuts an aligned term
constexpr int kMmaZeroExponent = -126;      // of every operand that is zero

// Twice the values of four E2M1 codes (the low 16 bits) as signed bytes: ±{0, 1, 2, 3, 4, 6, 8, 12}.
NV_HD unsigned doubled_e2m1x4(unsigned codes) {
  const unsigned size = codes & 0x7777u;
  const unsigned positive = pick_bytes(0x03020100u, 0x0C080604u, size);
  const unsigned negative = pick_bytes(0xFDFEFF00u, 0xF4F8FAFCu, size);
  // nibble 1 where the code's sign is set picks 0xFF, nibble 0 picks 0x00
  const unsigned signs = pick_bytes(0x0000FF00u, 0u, (codes >> 3) & 0x1111u);
  return (negative & signs) | (positive & ~signs);
}

// acc + the dot of four signed bytes with four others.
NV_HD int dot_bytes(unsigned a, unsigned b, int acc) {
#ifdef __CUDA_ARCH__
  return __dp4a(static_cast<int>(a), static_cast<int>(b), acc);
#else
  for (int i = 0; i < 32; i += 8)
    acc += static_cast<signed char>((a >> i) & 0xFFu) * static_cast<signed char>((b >> i) & 0xFFu);
  return acc;
#endif
}

// Rule 3: the exact dot of 16 products, in quarters.  Each side is two words of codes.
NV_HD int dot16_quarters(unsigned a_low, unsigned a_high, unsigned b_low, unsigned b_high) {
  int sum = dot_bytes(doubled_e2m1x4(a_low), doubled_e2m1x4(b_low), 0);
  sum = dot_bytes(doubled_e2m1x4(a_low >> 16), doubled_e2m1x4(b_low >> 16), sum);
  sum = dot_bytes(doubled_e2m1x4(a_high), doubled_e2m1x4(b_high), sum);
  return dot_bytes(doubled_e2m1x4(a_high >> 16), doubled_e2m1x4(b_high >> 16), sum);
}

// Rules 2 and 4: eight times the significand of a scale, and its exponent.
struct ScaleParts {
  int eighths, exponent;
};

NV_HD ScaleParts split_scale(unsigned byte, MmaKind kind) {
  if (kind == kMxfp4) return {8, static_cast<int>(byte) - 127};
  const int field = static_cast<int>(byte >> 3) & 15, fraction = static_cast<int>(byte) & 7;
  if (field == 0) return {fraction, fraction ? -6 : kMmaZeroExponent};
  return {8 + fraction, field - 7};
}

NV_HD bool scale_is_nan(unsigned byte, MmaKind kind) {
  return kind == kMxfp4 ? byte == 0xFFu : (byte & 0x7Fu) == 0x7Fu;
}

// Rule 1 for one side: is any scale of this step NaN?
NV_HD bool any_scale_nan(unsigned scales, MmaKind kind) {
  bool nan = false;
  const int count = kind == kMxfp4 ? 2 : 4;
  for (int g = 0; g < count; ++g) nan = nan || scale_is_nan((scales >> (8 * g)) & 0xFFu, kind);
  return nan;
}

// Rule 6 for one term: value * 2^(left - down), toward zero.
NV_HD long long align_term(long long value, int left, int down) {
  const unsigned long long size = static_cast<unsigned long long>(value < 0 ? -value : value) << left;
  const unsigned long long kept = down > 63 ? 0 : size >> down;
  return value < 0 ? -static_cast<long long>(kept) : static_cast<long long>(kept);
}

NV_HD int leading_zeros(unsigned long long x) {  // x > 0
#ifdef __CUDA_ARCH__
  return __clzll(static_cast<long long>(x));
#else
  return __builtin_clzll(x);
#endif
}

// Rule 7: total * 2^unit toward zero as f32 bits; an exact zero is +0, 2^128 and more is the infinity of its sign.
NV_HD unsigned truncate_to_f32(long long total, int unit) {
  if (total == 0) return 0;
  const unsigned sign = total < 0 ? 0x80000000u : 0;
  const unsigned long long size = static_cast<unsigned long long>(total < 0 ? -total : total);
  int exponent = 63 - leading_zeros(size) + unit;
  exponent = exponent < -126 ? -126 : exponent;
  if (exponent > 127) return sign | 0x7F800000u;
  const int drop = exponent - 23 - unit;
  const unsigned significand = static_cast<unsigned>(drop >= 0 ? size >> drop : size << -drop);
  // A significand below 2^23 is subnormal and its field is 0: subtracting the hidden bit serves both cases.
  return sign | (((static_cast<unsigned>(exponent) + 127u) << 23) + significand - (1u << 23));
}

// The next accumulator, as f32 bits, from four dots in quarters, the scales of both sides and the accumulator's bits.
NV_HD unsigned mma_step(const int quarters[4], unsigned a_scales, unsigned b_scales, unsigned c, MmaKind kind) {
  const unsigned size = c & 0x7FFFFFFFu;
  if (size > 0x7F800000u || any_scale_nan(a_scales, kind) || any_scale_nan(b_scales, kind)) return kMmaNan;
  if (size == 0x7F800000u) return c;

  const int field = static_cast<int>(size >> 23);
  long long significand = (size & 0x7FFFFFu) | (field ? 1u << 23 : 0u);
  if (c >> 31) significand = -significand;
  const int c_exponent = (field ? field : 1) - 127;

  int value[4], exponent[4], top = c_exponent;
  for (int g = 0; g < 4; ++g) {
    const int at = kind == kMxfp4 ? 8 * (g / 2) : 8 * g;  // four dots of 16 even where two share a scale
    const ScaleParts a = split_scale((a_scales >> at) & 0xFFu, kind), b = split_scale((b_scales >> at) & 0xFFu, kind);
    value[g] = quarters[g] * a.eighths * b.eighths;  // in units of 2^-8, below 2^19
    exponent[g] = a.exponent + b.exponent;
    top = exponent[g] > top ? exponent[g] : top;
  }
  long long total = align_term(significand, kMmaFractionBits - 23, top - c_exponent);
  for (int g = 0; g < 4; ++g) total += align_term(value[g], kMmaFractionBits - 8, top - exponent[g]);
  return truncate_to_f32(total, top - kMmaFractionBits);
}

// The same from the codes: eight words a side.
NV_HD unsigned mma_step_codes(const unsigned a[8], const unsigned b[8], unsigned a_scales, unsigned b_scales,
                              unsigned c, MmaKind kind) {
  int quarters[4];
  for (int g = 0; g < 4; ++g) quarters[g] = dot16_quarters(a[2 * g], a[2 * g + 1], b[2 * g], b[2 * g + 1]);
  return mma_step(quarters, a_scales, b_scales, c, kind);
}

}  // namespace nv
