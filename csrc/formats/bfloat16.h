// bfloat16 to float and back, rounding to nearest even; vec.h has the vector form for .simd.cpp files.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

inline float widen(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

inline BFloat16 narrow(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace pyg_dist
