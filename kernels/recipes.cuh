// How a block becomes a scale byte and codes: NVFP4 by `ieee` and `vllm-cuda`, MXFP4 by four scale rules.
//
// For the host and the device, like nvfp4_math.cuh, on which it stands.  The truth is nvfp4viz/quant/nvfp4.py and mxfp4.py.

#pragma once

#include "nvfp4_math.cuh"

namespace nv {

// ------------------------------------------------------------------------------- NVFP4, blocks of 16

// Largest magnitude; a NaN loses, so the answer is NaN only if all elements are.
template <int N>
NV_HD float block_max(const float (&x)[N]) {
  float top = magnitude(x[0]);
  NV_UNROLL
  for (int i = 1; i < N; ++i) top = larger(top, magnitude(x[i]));
  return top;
}

// As block_max, but one NaN makes the answer NaN: among bit patterns of magnitudes a NaN is the largest.
template <int N>
NV_HD float block_max_nan(const float (&x)[N]) {
  u32 top = bits(x[0]) & kAbs;
  NV_UNROLL
  for (int i = 1; i < N; ++i) {
    const u32 here = bits(x[i]) & kAbs;
    top = here > top ? here : top;
  }
  return value(top);
}

// Is every product of the block below 7, and none NaN?  `top_or_nan` is its block_max_nan, `factor` not negative.
NV_HD bool all_small(float top_or_nan, float factor) { return multiply(top_or_nan, factor) < 7.0f; }

// t = m / 6, u = G * t, s = E4M3(u), o = G / s.
struct Ieee {
  float g;
  NV_HD Ieee(float global, const i8*) : g(global) {}
  NV_HD float asked(float top) const { return multiply(g, divide(top, 6.0f)); }
  NV_HD float factor(float s) const { return s == 0.0f ? 0.0f : divide(g, s); }
};

// vLLM, nvfp4_utils.cuh: t = m * rcp(6), u = G * t, s = E4M3(u), o = rcp(s * rcp(G)).  The zero test is on s.
struct VllmCuda {
  float g, inverse, sixth;
  const i8* table;
  NV_HD VllmCuda(float global, const i8* reciprocals)
      : g(global), inverse(rcp_approx_ftz(global, reciprocals)), sixth(rcp_approx_ftz(6.0f, reciprocals)), table(reciprocals) {}
  NV_HD float asked(float top) const { return multiply(g, multiply(top, sixth)); }
  NV_HD float factor(float s) const { return s == 0.0f ? 0.0f : rcp_approx_ftz(multiply(s, inverse), table); }
};

// One block, whose block_max_nan is `top_or_nan`: returns the scale byte, element i of `packed` lies at bits 4i.
template <class Recipe>
NV_HD u8 quantize16(const float (&x)[16], float top_or_nan, const Recipe& recipe, u64& packed) {
  const float top = is_nan(top_or_nan) ? block_max(x) : top_or_nan;
  const u32 byte = e4m3_byte(recipe.asked(top));
  const float o = recipe.factor(e4m3_value(byte));
#if !defined(NV_HW_FP4)
  if (all_small(top_or_nan, o)) {
    packed = (u64)e2m1_pack8_small(x, o) | ((u64)e2m1_pack8_small(x + 8, o) << 32);
    return (u8)byte;
  }
#endif
  float y[16];
  NV_UNROLL
  for (int i = 0; i < 16; ++i) y[i] = multiply(x[i], o);
  packed = (u64)e2m1_pack8(y) | ((u64)e2m1_pack8(y + 8) << 32);
  return (u8)byte;
}

// ------------------------------------------------------------------------------- MXFP4, blocks of 32

// What torchao's integer rounding makes of a NaN.
NV_HD u32 torchao_nan_code(u32 u) { return ((u & kAbs) >= 0x7FE00000u ? 4u : 3u) | ((u >> 28) & 8u); }

// Every rule answers a scale byte and the factor of the block, given its block_max_nan.  A block is plain if its codes are E2M1 of the products;
// else `code` says what becomes of an element.

// Exponent floor(log2 m) - 2 (OCP MX 1.0, 6.3; torchao FLOOR).
struct OcpFloor {
  static NV_HD u32 scale(const float (&)[32], float top_or_nan, const i8*, float& o) {
    const u32 top = bits(top_or_nan), field = top >> 23;
    const u32 byte = top > kInf ? 255u : field > 2u ? field - 2u : 0u;
    o = byte == 255u ? 0.0f : power_of_two(254u - byte);  // x / infinity is a signed zero, as x * 0
    return byte;
  }
  // A block with a NaN is divided by infinity: NaN and infinity / infinity meet torchao's rounding.
  static NV_HD bool plain(u32 byte) { return byte != 255u; }
  static NV_HD u32 code(float x, float) {
    const u32 u = bits(x), size = u & kAbs;
    if (size > kInf) return torchao_nan_code(u | 0x400000u);
    return size == kInf ? torchao_nan_code(0xFFC00000u) : (u >> 28) & 8u;
  }
};

// The same, one more from a significand of 1.75 on; byte 0 stands for a scale of zero (vLLM's UE8M0 template).
struct VllmEven {
  static NV_HD u32 scale(const float (&x)[32], float top_or_nan, const i8*, float& o) {
    const u32 top = bits(is_nan(top_or_nan) ? block_max(x) : top_or_nan);
    const u32 raised = (((top > kInf ? kNan : top) + (1u << 21)) >> 23) & 0xFFu;  // a NaN carries into the sign: 0
    const u32 byte = raised > 2u ? raised - 2u : 0u;
    o = byte == 0u ? 0.0f : power_of_two(254u - byte);
    return byte;
  }
  static NV_HD bool plain(u32) { return true; }
  static NV_HD u32 code(float, float) { return 0; }
};

// The smallest power of two not below m * rcp(6); bytes 0, 254 and 255 have no inverse (FlashInfer).
struct FlashinferCeil {
  static NV_HD u32 scale(const float (&x)[32], float top_or_nan, const i8* table, float& o) {
    const float top = is_nan(top_or_nan) ? block_max(x) : top_or_nan;
    const u32 byte = ue8m0_byte(multiply(top, rcp_approx_ftz(6.0f, table)));
    o = byte == 0u || byte >= 254u ? 0.0f : power_of_two(254u - byte);
    return byte;
  }
  static NV_HD bool plain(u32) { return true; }
  static NV_HD u32 code(float, float) { return 0; }
};

// The smallest power of two not below max(m, 1e-4) / 6; ties toward zero, zeros without a sign (DeepGEMM).
struct DeepgemmCeil {
  static NV_HD u32 scale(const float (&)[32], float top_or_nan, const i8*, float& o) {
    const float floored = is_nan(top_or_nan) || top_or_nan > 1e-4f ? top_or_nan : 1e-4f;
    const u32 up = ue8m0_byte(divide(floored, 6.0f));
    const u32 byte = up < 1u ? 1u : up > 254u ? 254u : up;
    o = power_of_two(254u - byte);
    return byte;
  }
  static NV_HD bool plain(u32) { return false; }
  static NV_HD u32 code(float x, float o) {
    const float y = multiply(x, o);
    if (is_nan(y)) return 7u;
    const u32 code = e2m1_midpoints_below(y);
    return code != 0u && y < 0.0f ? code | 8u : code;
  }
};

// One block: returns the scale byte; elements 0 to 15 in `low`, 16 to 31 in `high`.
template <class Rule>
NV_HD u8 quantize32(const float (&x)[32], float top_or_nan, const i8* table, u64& low, u64& high) {
  float o;
  const u32 byte = Rule::scale(x, top_or_nan, table, o);
  if (Rule::plain(byte)) {
#if !defined(NV_HW_FP4)
    if (all_small(top_or_nan, o)) {
      low = (u64)e2m1_pack8_small(x, o) | ((u64)e2m1_pack8_small(x + 8, o) << 32);
      high = (u64)e2m1_pack8_small(x + 16, o) | ((u64)e2m1_pack8_small(x + 24, o) << 32);
      return (u8)byte;
    }
#endif
    float y[32];
    NV_UNROLL
    for (int i = 0; i < 32; ++i) y[i] = multiply(x[i], o);
    low = (u64)e2m1_pack8(y) | ((u64)e2m1_pack8(y + 8) << 32);
    high = (u64)e2m1_pack8(y + 16) | ((u64)e2m1_pack8(y + 24) << 32);
    return (u8)byte;
  }
  u32 word[4];
  NV_UNROLL
  for (int w = 0; w < 4; ++w) {
    word[w] = 0;
    NV_UNROLL
    for (int i = 0; i < 8; ++i) word[w] |= Rule::code(x[8 * w + i], o) << (4 * i);
  }
  low = (u64)word[0] | ((u64)word[1] << 32);
  high = (u64)word[2] | ((u64)word[3] << 32);
  return (u8)byte;
}

}  // namespace nv
