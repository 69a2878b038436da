// kernels/mma_step.cuh on the CPU, asked as restatement.cpp is asked: `step KIND IN OUT`.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/mma_step.cuh"

namespace {

// 64 codes as the eight words of an operand.
void pack(const unsigned char* codes, unsigned (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    words[i] = 0;
    for (int j = 0; j < 8; ++j) words[i] |= static_cast<unsigned>(codes[8 * i + j]) << (4 * j);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || std::string(argv[1]) != "step") return 2;
  const nv::MmaKind kind = std::string(argv[2]) == "mxfp4" ? nv::kMxfp4 : nv::kNvfp4;
  std::FILE* in = std::fopen(argv[3], "rb");
  std::FILE* out = std::fopen(argv[4], "wb");
  std::uint32_t count = 0;
  if (!in || !out || std::fread(&count, sizeof count, 1, in) != 1) return 1;
  for (std::uint32_t i = 0; i < count; ++i) {
    unsigned char record[140];
    if (std::fread(record, sizeof record, 1, in) != 1) return 1;
    unsigned a[8], b[8], scales[2] = {0, 0}, c;
    pack(record, a);
    pack(record + 64, b);
    for (int side = 0; side < 2; ++side)
      for (int g = 0; g < 4; ++g) {
        // the question repeats an MXFP4 scale for its two groups; the instruction's word holds it once
        const int byte = kind == nv::kMxfp4 ? g / 2 : g;
        scales[side] |= static_cast<unsigned>(record[128 + 4 * side + g]) << (8 * byte);
      }
    std::memcpy(&c, record + 136, sizeof c);
    const std::uint32_t answer = nv::mma_step_codes(a, b, scales[0], scales[1], c, kind);
    std::fwrite(&answer, sizeof answer, 1, out);
  }
  return std::fclose(out) == 0 && std::fclose(in) == 0 ? 0 : 1;
}
