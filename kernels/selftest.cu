// The self-test's sweeps over all 2^32 float32 patterns: what this GPU's instructions give, against the software that
// stands in for them elsewhere (nvfp4viz/device/selftest.py).
//
// Every kernel adds to differing[i] how many patterns differ, and leaves one of them in example[i].

#include "recipes.cuh"

namespace nv {

struct Tally {
  u64 count;
  u32 last;
  __device__ __forceinline__ Tally() : count(0), last(0) {}
  __device__ __forceinline__ void compare(bool equal, u32 pattern) {
    if (!equal) ++count, last = pattern;
  }
  __device__ __forceinline__ void report(u64* differing, u32* example) const {
    if (count != 0) atomicAdd(differing, count), *example = last;
  }
};

// E2M1 by definition: how many midpoints lie below, where a midpoint beside an even code on its left belongs to it.
static __device__ __forceinline__ u32 e2m1_stated(float x) {
  if (is_nan(x)) return 7u;
  const float m = magnitude(x);
  const u32 code = (u32)(m > 0.25f) + (u32)(m >= 0.75f) + (u32)(m > 1.25f) + (u32)(m >= 1.75f) + (u32)(m > 2.5f) +
                   (u32)(m >= 3.5f) + (u32)(m > 5.0f);
  return code | ((bits(x) >> 28) & 8u);
}

}  // namespace nv

// Which instructions this build uses: FP4 conversions, E4M3 conversion, block-scaled MMA, approximate reciprocal.
extern "C" __global__ void nv_selftest_paths(int* out) {
  out[0] = out[1] = out[2] = out[3] = 0;
#if defined(NV_HW_FP4)
  out[0] = 1;
#endif
#if defined(NV_HW_E4M3)
  out[1] = 1;
#endif
#if defined(NV_HW_MMA)
  out[2] = 1;
#endif
#if defined(NV_HW_RCP)
  out[3] = 1;
#endif
}

// 0: E2M1 as compiled here against its definition; 1: in software; 2 and 3: the same, eight at a time;
// 4: E4M3 as compiled here against software; 5: UE8M0 as compiled here against software;
// 6: E2M1 of eight small numbers at a time, the software that ordinary blocks take, against the definition.
extern "C" __global__ void __launch_bounds__(256) nv_selftest_conversions(nv::u64* differing, nv::u32* example) {
  nv::Tally code, soft, packed, soft_packed, e4m3, ue8m0, small;
  const nv::u64 groups = 1ull << 29, stride = (nv::u64)gridDim.x * blockDim.x;
  for (nv::u64 group = (nv::u64)blockIdx.x * blockDim.x + threadIdx.x; group < groups; group += stride) {
    float product[8];
    nv::u32 stated = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const nv::u32 u = (nv::u32)(8 * group) + i;
      const float x = nv::value(u);
      const nv::u32 expected = nv::e2m1_stated(x);
      code.compare(nv::e2m1_code(x) == expected, u);
      soft.compare(nv::e2m1_code_soft(x) == expected, u);
      e4m3.compare(nv::e4m3_byte(x) == nv::e4m3_byte_soft(x), u);
      ue8m0.compare(nv::ue8m0_byte(x) == nv::ue8m0_byte_soft(x), u);
      product[i] = nv::multiply(x, 1.0f);
      stated |= expected << (4 * i);
    }
    packed.compare(nv::e2m1_pack8(product) == stated, (nv::u32)(8 * group));
    soft_packed.compare(nv::e2m1_pack8_soft(product) == stated, (nv::u32)(8 * group));
    if (nv::all_small(nv::block_max_nan(product), 1.0f)) small.compare(nv::e2m1_pack8_small(product, 1.0f) == stated, (nv::u32)(8 * group));
  }
  code.report(differing + 0, example + 0);
  soft.report(differing + 1, example + 1);
  packed.report(differing + 2, example + 2);
  soft_packed.report(differing + 3, example + 3);
  e4m3.report(differing + 4, example + 4);
  ue8m0.report(differing + 5, example + 5);
  small.report(differing + 6, example + 6);
}

// rcp.approx.ftz.f32 as compiled here, against the table measured on an H200.
extern "C" __global__ void __launch_bounds__(256) nv_selftest_reciprocal(const nv::i8* table, nv::u64* differing, nv::u32* example) {
  nv::Tally tally;
  const nv::u64 stride = (nv::u64)gridDim.x * blockDim.x;
  for (nv::u64 u = (nv::u64)blockIdx.x * blockDim.x + threadIdx.x; u < (1ull << 32); u += stride) {
    const float x = nv::value((nv::u32)u);
    const nv::u32 here = nv::bits(nv::rcp_approx_ftz(x, table)), expected = nv::bits(nv::rcp_table_ftz(x, table));
    const bool both_nan = (here & nv::kAbs) > nv::kInf && (expected & nv::kAbs) > nv::kInf;
    tally.compare(here == expected || both_nan, (nv::u32)u);
  }
  tally.report(differing, example);
}

// 0: the two values of every byte of packed codes, 1: the value of every E4M3 byte; as compiled here against software.
extern "C" __global__ void nv_selftest_unpack(nv::u64* differing, nv::u32* example) {
  nv::Tally codes, scales;
  const nv::u32 byte = threadIdx.x;
  float low, high;
  nv::e2m1_pair(byte, low, high);
  const bool equal = nv::bits(low) == nv::bits(nv::e2m1_value(byte)) && nv::bits(high) == nv::bits(nv::e2m1_value(byte >> 4));
  codes.compare(equal, byte);
  const float here = nv::e4m3_value(byte), soft = nv::e4m3_value_soft(byte);
  scales.compare(nv::is_nan(soft) ? nv::is_nan(here) : nv::bits(here) == nv::bits(soft), byte);
  codes.report(differing, example);
  scales.report(differing + 1, example + 1);
}
