// bfloat16 and float16 to float and back, rounding to nearest even; cpu/vec.h has the vector form for .simd.cpp
// files.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

template <class T>
PYG_DIST_PORTABLE T narrow(float value);

PYG_DIST_PORTABLE float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <>
PYG_DIST_PORTABLE BFloat16 narrow<BFloat16>(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

PYG_DIST_PORTABLE float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  uint32_t bits = (rest << 13) + (112u << 23);  // the exponent's bias is 15 here, and 127 there
  if (rest >= 0x7c00u) bits = 0x7f800000u | rest << 13 | (rest > 0x7c00u ? 0x400000u : 0u);
  if (rest < 0x0400u) {  // a multiple of 2^-24, which float holds
    const float small = static_cast<float>(rest) * 0x1p-24f;
    __builtin_memcpy(&bits, &small, sizeof(bits));
  }
  bits |= sign;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <>
PYG_DIST_PORTABLE Float16 narrow<Float16>(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t rounded = ((rest + 0xfffu + (rest >> 13 & 1u)) >> 13) - (112u << 10);
  if (rest >= 0x477ff000u) rounded = 0x7c00u;                         // half a step over the largest one, and more
  if (rest > 0x7f800000u) rounded = 0x7e00u | (rest >> 13 & 0x3ffu);  // NaN
  if (rest < 0x38800000u) {                                           // added to 1/2, whose step is 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &rest, sizeof(magnitude));
    magnitude += 0.5f;
    __builtin_memcpy(&rounded, &magnitude, sizeof(rounded));
    rounded -= 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

}  // namespace pyg_dist
