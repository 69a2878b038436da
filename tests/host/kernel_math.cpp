// kernels/nvfp4_math.cuh, recipes.cuh and activation.cuh as g++ compiles them, with a C interface for ctypes, and two
// sweeps over all float32 patterns against a statement of the formats that shares nothing with them: a list of values, and
// the nearest of them.
//
// Compile with -O2 -ffp-contract=off -shared -fPIC -pthread.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "activation.cuh"
#include "recipes.cuh"

namespace {

// The format as a sorted list of its finite magnitudes.  What lies between two of them goes to the nearer one, to the
// even index when both are equally near; what lies above the last one goes there (saturation).
struct Grid {
  std::vector<double> values;

  int nearest(double size) const {
    const auto above = std::lower_bound(values.begin(), values.end(), size) - values.begin();  // first not below
    if (above == 0) return 0;
    if (above == static_cast<long>(values.size())) return static_cast<int>(values.size()) - 1;
    const double up = values[above] - size, down = size - values[above - 1];
    if (up != down) return static_cast<int>(up < down ? above : above - 1);
    return static_cast<int>(above % 2 == 0 ? above : above - 1);
  }
};

const Grid& e2m1() {
  static const Grid grid{{0, 0.5, 1, 1.5, 2, 3, 4, 6}};
  return grid;
}

const Grid& e4m3() {
  static const Grid grid = [] {
    Grid g;
    for (int i = 0; i < 8; ++i) g.values.push_back(i * std::pow(2.0, -9));  // zero and the subnormals
    for (int e = 1; e < 16; ++e)
      for (int m = 0; m < 8; ++m)
        if (e < 15 || m < 7) g.values.push_back((1 + m / 8.0) * std::pow(2.0, e - 7));  // the last code is NaN
    return g;
  }();
  return grid;
}

unsigned stated(const Grid& grid, float x, unsigned nan, unsigned sign_bit) {
  if (std::isnan(x)) return nan;
  return static_cast<unsigned>(grid.nearest(std::fabs(static_cast<double>(x)))) | (std::signbit(x) ? sign_bit : 0u);
}

// How many of the patterns first, first + 1, … (count of them) differ; `example` is one that does.
template <class Ours, class Theirs>
std::uint64_t sweep(std::uint64_t first, std::uint64_t count, unsigned threads, std::uint32_t* example, Ours ours, Theirs theirs) {
  std::atomic<std::uint64_t> differing{0};
  std::vector<std::thread> pool;
  for (unsigned t = 0; t < threads; ++t)
    pool.emplace_back([=, &differing] {
      std::uint64_t mine = 0;
      for (std::uint64_t u = first + count * t / threads; u < first + count * (t + 1) / threads; ++u) {
        const float x = nv::value(static_cast<std::uint32_t>(u));
        if (ours(x) != theirs(x)) {
          ++mine;
          *example = static_cast<std::uint32_t>(u);
        }
      }
      differing += mine;
    });
  for (auto& thread : pool) thread.join();
  return differing;
}

// Elements of 0 = BF16, 1 = FP16, 2 = float32, widened as the kernels widen them.
float element(const void* x, int dtype, std::size_t i) {
  if (dtype == 0) return nv::from_bf16(static_cast<const std::uint16_t*>(x)[i]);
  if (dtype == 1) return nv::from_f16(static_cast<const std::uint16_t*>(x)[i]);
  return static_cast<const float*>(x)[i];
}

template <class Recipe>
void blocks16(const void* x, int dtype, std::size_t n, const float* g, const nv::i8* table, nv::u64* packed, nv::u8* scales) {
  for (std::size_t b = 0; b < n; ++b) {
    float y[16];
    for (int i = 0; i < 16; ++i) y[i] = element(x, dtype, 16 * b + i);
    scales[b] = nv::quantize16(y, nv::block_max_nan(y), Recipe(g[b], table), packed[b]);
  }
}

template <class Rule>
void blocks32(const void* x, int dtype, std::size_t n, const nv::i8* table, nv::u64* packed, nv::u8* scales) {
  for (std::size_t b = 0; b < n; ++b) {
    float y[32];
    for (int i = 0; i < 32; ++i) y[i] = element(x, dtype, 32 * b + i);
    scales[b] = nv::quantize32<Rule>(y, nv::block_max_nan(y), table, packed[2 * b], packed[2 * b + 1]);
  }
}

}  // namespace

extern "C" {

std::uint64_t sweep_e2m1(std::uint64_t first, std::uint64_t count, unsigned threads, std::uint32_t* example) {
  e2m1();
  return sweep(first, count, threads, example, [](float x) { return nv::e2m1_code(x); },
               [](float x) { return stated(e2m1(), x, 7u, 8u); });
}

std::uint64_t sweep_e4m3(std::uint64_t first, std::uint64_t count, unsigned threads, std::uint32_t* example) {
  e4m3();
  return sweep(first, count, threads, example, [](float x) { return nv::e4m3_byte(x); },
               [](float x) { return stated(e4m3(), x, 0x7Fu, 0x80u); });
}

// Eight neighbours at a time, as ordinary blocks are packed; groups with a number of 7 or more are not for it.
std::uint64_t sweep_e2m1_small(std::uint64_t first, std::uint64_t count, unsigned threads, std::uint32_t* example) {
  e2m1();
  const auto ours = [](float x) {
    if (nv::bits(x) % 8 != 0) return 0u;
    float group[8];
    for (unsigned i = 0; i < 8; ++i) group[i] = nv::value(nv::bits(x) + i);
    return nv::all_small(nv::block_max_nan(group), 1.0f) ? nv::e2m1_pack8_small(group, 1.0f) : 0u;
  };
  const auto theirs = [](float x) {
    if (nv::bits(x) % 8 != 0) return 0u;
    unsigned codes = 0;
    for (unsigned i = 0; i < 8; ++i) {
      const float y = nv::value(nv::bits(x) + i);
      if (!(std::fabs(y) < 7)) return 0u;
      codes |= stated(e2m1(), y, 7u, 8u) << (4 * i);
    }
    return codes;
  };
  return sweep(first, count, threads, example, ours, theirs);
}

// Recipes 0 ieee, 1 vllm-cuda; one global scale a block.
void nvfp4_blocks(int recipe, const void* x, int dtype, std::size_t n, const float* g, const nv::i8* table, nv::u64* packed, nv::u8* scales) {
  if (recipe == 0) return blocks16<nv::Ieee>(x, dtype, n, g, table, packed, scales);
  blocks16<nv::VllmCuda>(x, dtype, n, g, table, packed, scales);
}

// Rules 0 ocp-floor, 1 vllm-even, 2 flashinfer-ceil, 3 deepgemm-ceil.
void mxfp4_blocks(int rule, const void* x, int dtype, std::size_t n, const nv::i8* table, nv::u64* packed, nv::u8* scales) {
  if (rule == 0) return blocks32<nv::OcpFloor>(x, dtype, n, table, packed, scales);
  if (rule == 1) return blocks32<nv::VllmEven>(x, dtype, n, table, packed, scales);
  if (rule == 2) return blocks32<nv::FlashinferCeil>(x, dtype, n, table, packed, scales);
  blocks32<nv::DeepgemmCeil>(x, dtype, n, table, packed, scales);
}

void encode_e4m3(const float* x, std::size_t n, nv::u8* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<nv::u8>(nv::e4m3_byte(x[i]));
}
void encode_ue8m0(const float* x, std::size_t n, nv::u8* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<nv::u8>(nv::ue8m0_byte(x[i]));
}
void encode_bf16(const float* x, std::size_t n, std::uint16_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = nv::to_bf16(x[i]);
}
void encode_f16(const float* x, std::size_t n, std::uint16_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = nv::to_f16(x[i]);
}
void decode_f16(const std::uint16_t* x, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = nv::from_f16(x[i]);
}
void reciprocals(const float* x, std::size_t n, const nv::i8* table, std::uint32_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = nv::bits(nv::rcp_approx_ftz(x[i], table));
}
// What each of the 65536 BF16 patterns becomes as a gate.
void activate_all(const float* table, int rounds_tiny, float* out) {
  for (unsigned gate = 0; gate < 65536; ++gate) out[gate] = nv::Activation{table, rounds_tiny != 0}.of(gate);
}
// Every code's value: 16 of E2M1, 256 of E4M3, 256 of UE8M0.
void decode_all(float* e2m1_values, float* e4m3_values, float* ue8m0_values) {
  for (unsigned c = 0; c < 256; c += 1) {
    float low, high;
    nv::e2m1_pair(c, low, high);
    e2m1_values[c & 15u] = low;
    e2m1_values[c >> 4] = high;
    e4m3_values[c] = nv::e4m3_value(c);
    ue8m0_values[c] = nv::ue8m0_value(c);
  }
}
}
