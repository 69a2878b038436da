// SiLU and GELU of a BF16 gate, as a table.
//
// A BF16 gate has 65536 values, and what vLLM's kernels do with it before it meets `up` depends on it alone.  So
// nvfp4viz.moe computes it for every gate from 2^-24 to 2^7 of both signs (7936 floats in 31.5 KiB), and the kernels look it
// up: the CPU's bits on every GPU, whatever its exp and tanh are.  Outside of that range both functions are simple.
// tests/host compares all gates.

#pragma once

#include "nvfp4_math.cuh"

namespace nv {

const u32 kFirstMagnitude = 103u << 7;    // BF16 pattern of 2^-24
const u32 kPerSign = 31u << 7;            // patterns from there to below 2^7
const u32 kNegative = 4096u;              // where the negative gates begin in the table
const u32 kTableSize = kNegative + kPerSign;

// What a gate becomes before it meets `up`.
struct Activation {
  const float* table;
  bool rounds_tiny;  // GELU is rounded to BF16 before it meets `up`; the fused SiLU is not

  // `moved` is the pattern less kFirstMagnitude: the sign stays where it was, three bits above the place in the table.
  NV_HD float inside(u32 moved) const {
    return table[(moved & 0xFFFu) + ((moved & 0x8000u) >> 3)];
  }
  // Below 2^-24 half the gate; from 2^7 on the gate itself, -0 if negative; NaN for minus infinity and NaN.
  NV_HD float outside(u32 gate) const {
    const u32 size = gate & 0x7FFFu;
    const float x = value(gate << 16), half = multiply(x, 0.5f);
    if (size < kFirstMagnitude) return rounds_tiny ? from_bf16(to_bf16(half)) : half;
    if (size > 0x7F80u || gate == 0xFF80u) return value(kNan);
    return gate >> 15 ? value(0x80000000u) : x;
  }
  NV_HD float of(u32 gate) const {
    return (gate & 0x7FFFu) - kFirstMagnitude < kPerSign ? inside(gate - kFirstMagnitude) : outside(gate);
  }
};

}  // namespace nv
