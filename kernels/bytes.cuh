// Byte permutation, for the host and the device.
#pragma once

#include "nvfp4_math.cuh"

namespace nv {

// The bytes of {low, high} that the low three bits of each nibble of `selector` name, four at a time.
NV_HD unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned index = (selector >> (4 * i)) & 7u;
    picked |= (((index < 4 ? low : high) >> (8 * (index & 3u))) & 0xFFu) << (8 * i);
  }
  return picked;
#endif
}

}  // namespace nv
