// bfloat16 to float and back, rounding to nearest even; kernels/cpu/vec.h has the vector form for .simd.cpp files.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

PYG_DIST_PORTABLE float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

PYG_DIST_PORTABLE BFloat16 narrow(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace pyg_dist
