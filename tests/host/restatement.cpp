// An independent restatement of recipes that no CPU package offers, and of the tensor-core step.
//
// Written from the spec pages alone and with other means than nvfp4viz: formats are lists of values searched for the
// nearest one, reciprocals and shifts are library calls on long double, nothing is a bit trick.  Slow and plain on
// purpose.  Compile with -O2 -ffp-contract=off: a fused multiply-add would round once where the kernels round twice.
//
//   restatement block RECIPE TABLE IN OUT     IN: u32 blocks, u32 length, f32 global[blocks], f32 x[blocks][length]
//                                             OUT: u8 scale[blocks], u8 code[blocks][length]
//   restatement step KIND IN OUT              IN: u32 steps, then per step u8 a[64], b[64], sa[4], sb[4], f32 c
//                                             OUT: u32 bits[steps]
//                                             KIND nvfp4, mxfp4, or mxf8f6f4: E4M3 a[32] times E2M1 b[32], sa[1], sb[1]
//   restatement rcp TABLE IN OUT              IN: u32 count, f32 x[count];  OUT: u32 bits[count]
// TABLE holds 2^23 signed bytes: ulps between the chip's reciprocal of 1.m and the correctly rounded one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Real = long double;
static_assert(std::numeric_limits<Real>::digits >= 64, "the step's sums need 64 significant bits");

const float kInf = std::numeric_limits<float>::infinity();
const Real kE2m1[8] = {0.0L, 0.5L, 1.0L, 1.5L, 2.0L, 3.0L, 4.0L, 6.0L};

std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// --------------------------------------------------------------------------------------------------- formats

Real e4m3_magnitude(int code) {  // code 0..126
  static const std::vector<Real> values = [] {
    std::vector<Real> list;
    for (int c = 0; c < 127; ++c)
      list.push_back(c < 8 ? std::ldexp(Real(c), -9) : std::ldexp(Real(8 + c % 8), c / 8 - 10));
    return list;
  }();
  return values[code];
}

// The code of the value nearest to `magnitude`; of two equally near, the even code.  The list is ascending.
template <class Value>
int nearest(Real magnitude, int count, const Value& value) {
  int best = 0;
  for (int code = 1; code < count; ++code) {
    const Real here = std::fabs(value(code) - magnitude), kept = std::fabs(value(best) - magnitude);
    if (here < kept || (here == kept && code % 2 == 0)) best = code;
  }
  return best;
}

enum class Ties { kEven, kTowardZero };

int e2m1_code(float y, Ties ties) {
  if (std::isnan(y)) return 7;  // the hardware's answer, whatever the sign of the NaN
  const Real magnitude = std::fabs(Real(y));
  int code = magnitude >= 6 ? 7 : nearest(magnitude, 8, [](int c) { return kE2m1[c]; });
  if (ties == Ties::kTowardZero && code > 0 && kE2m1[code] - magnitude == magnitude - kE2m1[code - 1]) --code;
  return std::signbit(y) ? code + 8 : code;
}

int e4m3_byte(float s) {
  if (std::isnan(s)) return 0x7F;
  const Real magnitude = std::fabs(Real(s));
  const int code = magnitude >= 448 ? 126 : nearest(magnitude, 127, e4m3_magnitude);
  return std::signbit(s) ? code + 128 : code;
}

float e4m3_value(int byte) {
  if (byte % 128 == 127) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = static_cast<float>(e4m3_magnitude(byte % 128));
  return byte >= 128 ? -magnitude : magnitude;
}

// ------------------------------------------------------------------------------------- rcp.approx.ftz.f32

std::vector<signed char> g_table;

float rcp_approx_ftz(float x) {
  if (std::isnan(x)) return x;
  const float sign = std::signbit(x) ? -1.0f : 1.0f;
  const float size = std::fabs(x);
  if (size < std::numeric_limits<float>::min()) return sign * kInf;  // zero and subnormal alike
  if (std::isinf(size)) return sign * 0.0f;
  const int exponent = std::ilogb(size);
  const float significand = std::scalbn(size, -exponent);  // [1, 2)
  const long index = std::lround(std::ldexp(double(significand) - 1.0, 23));
  float r = 1.0f / significand;
  for (int ulps = g_table.at(index); ulps != 0; ulps += ulps > 0 ? -1 : 1) r = std::nextafterf(r, ulps > 0 ? 4.0f : 0.0f);
  const double result = std::ldexp(double(r), -exponent);
  return result < std::numeric_limits<float>::min() ? sign * 0.0f : sign * static_cast<float>(result);
}

// ---------------------------------------------------------------------------------------------- recipes

struct Block {
  int scale;
  std::vector<int> codes;
};

// Maximum magnitude as max instructions see it: a NaN loses against any number.
float amax_ignoring_nan(const std::vector<float>& x) {
  float best = std::numeric_limits<float>::quiet_NaN();
  for (float v : x)
    if (!std::isnan(v) && !(std::fabs(v) <= best)) best = std::fabs(v);
  return best;
}

Block scaled(int scale, float multiplier, const std::vector<float>& x, Ties ties = Ties::kEven) {
  Block out{scale, {}};
  for (float v : x) out.codes.push_back(e2m1_code(v * multiplier, ties));
  return out;
}

Block vllm_cuda(const std::vector<float>& x, float g) {
  const float t = amax_ignoring_nan(x) * rcp_approx_ftz(6.0f);
  const int byte = e4m3_byte(g * t);
  const float scale = e4m3_value(byte);
  const float o = scale == 0 ? 0.0f : rcp_approx_ftz(scale * rcp_approx_ftz(g));
  return scaled(byte, o, x);
}

// The same order with IEEE divisions: t = amax / 6, o = g / S.
Block ieee(const std::vector<float>& x, float g) {
  const int byte = e4m3_byte(g * (amax_ignoring_nan(x) / 6.0f));
  const float scale = e4m3_value(byte);
  return scaled(byte, scale == 0 ? 0.0f : g / scale, x);
}

// floor(log2 amax) - 2, one more from a significand of 1.75 on; byte 0 stands for a scale of zero.
Block vllm_even(const std::vector<float>& x, float) {
  const float amax = amax_ignoring_nan(x);
  int byte = 0;
  if (std::isinf(amax)) {
    byte = 253;
  } else if (amax >= std::numeric_limits<float>::min()) {  // a NaN compares false: byte 0
    const int exponent = std::ilogb(amax);
    const bool bump = std::scalbn(amax, -exponent) >= 1.75f;
    byte = std::max(0, exponent + (bump ? 1 : 0) - 2 + 127);
  }
  // a subnormal amax has exponent field 0, or 1 after the bump: both give byte 0
  const float o = byte == 0 ? 0.0f : static_cast<float>(std::ldexp(1.0, 127 - byte));
  return scaled(byte, o, x);
}

// Smallest power of two not below v, as an E8M0 byte.
int e8m0_up(float v) {
  if (std::isnan(v)) return 255;
  int byte = 0;
  while (byte < 254 && std::ldexp(Real(1), byte - 127) < Real(v)) ++byte;
  return byte;
}

// FlashInfer 0.7.4: v = amax * rcp(6), rounded up to a power of two; the multiplier is 2^(127-byte) where that is a
// normal f32, and 0 at byte 0 and from byte 254 on.
Block flashinfer_ceil(const std::vector<float>& x, float) {
  const float v = amax_ignoring_nan(x) * rcp_approx_ftz(6.0f);
  const int byte = e8m0_up(v);
  return scaled(byte, byte == 0 || byte >= 254 ? 0.0f : static_cast<float>(std::ldexp(1.0, 127 - byte)), x);
}

// DeepGEMM: max(amax, 1e-4) / 6 rounded up to a power of two, ties toward zero, no negative zero code.
Block deepgemm_ceil(const std::vector<float>& x, float) {
  float amax = 0;
  for (float v : x) amax = std::isnan(v) || std::isnan(amax) ? NAN : std::max(amax, std::fabs(v));
  if (amax < 1e-4f) amax = 1e-4f;
  const int byte = std::min(254, std::max(1, e8m0_up(amax / 6.0f)));
  Block out = scaled(byte, static_cast<float>(std::ldexp(1.0, 127 - byte)), x, Ties::kTowardZero);
  for (int& code : out.codes)
    if (code == 8) code = 0;
  return out;
}

// ------------------------------------------------------------------------------------ the tensor-core step

struct Split {
  Real significand;
  int exponent;
};

Split split_e4m3(int byte) {  // the sign bit is not looked at
  const int field = byte / 8 % 16, mantissa = byte % 8;
  if (field == 0 && mantissa == 0) return {0, -126};
  if (field == 0) return {Real(mantissa) / 8, -6};
  return {1 + Real(mantissa) / 8, field - 7};
}

Split split_f32(float c) {
  if (c == 0) return {0, -126};
  const int exponent = std::max(-126, std::ilogb(c));
  return {std::ldexp(Real(c), -exponent), exponent};
}

// sum * 2^unit, cut toward zero to f32: to 24 bits, or to whole multiples of 2^-149.
std::uint32_t truncated_to_f32(Real sum, int unit) {
  if (sum == 0) return 0;
  const Real value = std::ldexp(sum, unit);
  const int quantum = std::max(std::ilogb(value) - 23, -149);
  const Real kept = std::ldexp(std::trunc(std::ldexp(value, -quantum)), quantum);
  if (std::fabs(kept) >= std::ldexp(Real(1), 128)) return bits_of(kept > 0 ? kInf : -kInf);
  return bits_of(static_cast<float>(kept));
}

std::uint32_t mma_step(bool mxfp4, const unsigned char* a, const unsigned char* b, const unsigned char* sa,
                       const unsigned char* sb, float c) {
  const std::uint32_t kCanonicalNan = 0x7FFFFFFFu;
  for (int g = 0; g < 4; ++g)
    for (int byte : {int(sa[g]), int(sb[g])})
      if (mxfp4 ? byte == 255 : byte % 128 == 127) return kCanonicalNan;
  if (std::isnan(c)) return kCanonicalNan;
  if (std::isinf(c)) return bits_of(c);

  std::vector<Split> terms{split_f32(c)};
  for (int g = 0; g < 4; ++g) {
    Real dot = 0;
    for (int i = 16 * g; i < 16 * g + 16; ++i) {
      const Real left = a[i] < 8 ? kE2m1[a[i]] : -kE2m1[a[i] - 8];
      const Real right = b[i] < 8 ? kE2m1[b[i]] : -kE2m1[b[i] - 8];
      dot += left * right;
    }
    const Split l = mxfp4 ? Split{1, sa[g] - 127} : split_e4m3(sa[g]);
    const Split r = mxfp4 ? Split{1, sb[g] - 127} : split_e4m3(sb[g]);
    terms.push_back({dot * l.significand * r.significand, l.exponent + r.exponent});
  }
  int top = terms[0].exponent;
  for (const Split& t : terms) top = std::max(top, t.exponent);
  Real sum = 0;  // in units of 2^(top - 35)
  for (const Split& t : terms) sum += std::trunc(std::ldexp(t.significand, t.exponent - top + 35));
  return truncated_to_f32(sum, top - 35);
}

// The K = 32 kind with E4M3 on one side and E2M1 on the other: 32 terms and the accumulator, cut at 25 places.
Split split_small(Real value, int smallest) {
  if (value == 0) return {0, -126};
  const int exponent = std::max(smallest, std::ilogb(value));
  return {std::ldexp(value, -exponent), exponent};
}

std::uint32_t mma_step_k32(const unsigned char* a, const unsigned char* b, int sa, int sb, float c) {
  const std::uint32_t kCanonicalNan = 0x7FFFFFFFu;
  if (sa == 255 || sb == 255 || std::isnan(c)) return kCanonicalNan;
  std::vector<Split> terms;
  for (int i = 0; i < 32; ++i) {
    if (a[i] % 128 == 127) return kCanonicalNan;
    const Split l = split_small(e4m3_value(a[i]), -6);
    const Split r = split_small(b[i] < 8 ? kE2m1[b[i]] : -kE2m1[b[i] - 8], 0);
    terms.push_back({l.significand * r.significand, l.exponent + r.exponent + sa - 127 + sb - 127});
  }
  if (std::isinf(c)) return bits_of(c);
  terms.push_back(split_f32(c));
  int top = terms[0].exponent;
  for (const Split& t : terms) top = std::max(top, t.exponent);
  Real sum = 0;  // in units of 2^(top - 25)
  for (const Split& t : terms) sum += std::trunc(std::ldexp(t.significand, t.exponent - top + 25));
  return truncated_to_f32(sum, top - 25);
}

// ------------------------------------------------------------------------------------------------- files

std::vector<unsigned char> read_file(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  std::vector<unsigned char> data;
  unsigned char chunk[65536];
  for (std::size_t n; (n = std::fread(chunk, 1, sizeof chunk, file)) > 0;) data.insert(data.end(), chunk, chunk + n);
  std::fclose(file);
  return data;
}

void write_file(const char* path, const void* data, std::size_t size) {
  std::FILE* file = std::fopen(path, "wb");
  if (!file || std::fwrite(data, 1, size, file) != size) throw std::runtime_error("cannot write the answer");
  std::fclose(file);
}

template <class T>
T take(const unsigned char*& p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  p += sizeof value;
  return value;
}

void load_table(const char* path) {
  const auto raw = read_file(path);
  if (raw.size() != (1u << 23)) throw std::runtime_error("the reciprocal table has the wrong size");
  g_table.assign(raw.begin(), raw.end());
}

void run_blocks(const std::string& recipe, const char* in, const char* out) {
  const std::map<std::string, Block (*)(const std::vector<float>&, float)> recipes{
      {"vllm-cuda", vllm_cuda},           {"ieee", ieee},
      {"vllm-even", vllm_even},           {"flashinfer-ceil", flashinfer_ceil},
      {"deepgemm-ceil", deepgemm_ceil},
  };
  const auto run = recipes.at(recipe);
  const auto data = read_file(in);
  const unsigned char* p = data.data();
  const auto blocks = take<std::uint32_t>(p), length = take<std::uint32_t>(p);
  std::vector<float> global(blocks);
  for (float& g : global) g = take<float>(p);
  std::vector<unsigned char> scales, codes;
  std::vector<float> x(length);
  for (std::uint32_t i = 0; i < blocks; ++i) {
    for (float& v : x) v = take<float>(p);
    const Block block = run(x, global[i]);
    scales.push_back(static_cast<unsigned char>(block.scale));
    for (int code : block.codes) codes.push_back(static_cast<unsigned char>(code));
  }
  scales.insert(scales.end(), codes.begin(), codes.end());
  write_file(out, scales.data(), scales.size());
}

void run_steps(const std::string& kind, const char* in, const char* out) {
  if (kind != "nvfp4" && kind != "mxfp4" && kind != "mxf8f6f4") throw std::runtime_error("unknown kind");
  const auto data = read_file(in);
  const unsigned char* p = data.data();
  std::vector<std::uint32_t> answers(take<std::uint32_t>(p));
  for (auto& answer : answers) {
    float c;
    std::memcpy(&c, p + 136, sizeof c);
    answer = kind == "mxf8f6f4" ? mma_step_k32(p, p + 64, p[128], p[132], c)
                                : mma_step(kind == "mxfp4", p, p + 64, p + 128, p + 132, c);
    p += 140;
  }
  write_file(out, answers.data(), answers.size() * sizeof answers[0]);
}

void run_reciprocals(const char* in, const char* out) {
  const auto data = read_file(in);
  const unsigned char* p = data.data();
  std::vector<std::uint32_t> answers(take<std::uint32_t>(p));
  for (auto& answer : answers) {
    const float x = take<float>(p);
    answer = std::isnan(x) ? 0x7FFFFFFFu : bits_of(rcp_approx_ftz(x));
  }
  write_file(out, answers.data(), answers.size() * sizeof answers[0]);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> arg(argv + 1, argv + argc);
  if (arg.size() == 5 && arg[0] == "block") {
    load_table(argv[3]);
    run_blocks(arg[1], argv[4], argv[5]);
  } else if (arg.size() == 4 && arg[0] == "step") {
    run_steps(arg[1], argv[3], argv[4]);
  } else if (arg.size() == 4 && arg[0] == "rcp") {
    load_table(argv[2]);
    run_reciprocals(argv[3], argv[4]);
  } else {
    throw std::runtime_error("usage: see the top of restatement.cpp");
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "restatement: %s\n", error.what());
  return 1;
}
