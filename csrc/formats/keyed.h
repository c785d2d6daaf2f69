// Which random word belongs to which element, and what is made of it: the one place that fixes both.
// tests/reference_ops.py mirrors it, and kernels of every device follow it.
//
//   words = philox4x32_10(counter, key), four 32-bit numbers for consecutive columns; philox.h
//
// Column c (the caller's column plus column_offset) takes
//   one 32-bit word:    block = c / 4, word c % 4                             dropout, uniforms but those of float64
//   two 32-bit words:   block = c / 2, words 2 (c % 2) and 2 (c % 2) + 1      float64 uniforms (low word first)
//   two bytes:          see packed_rows.h                                     rounding, with seven rounds instead of
//   ten
//
// and of its words is made
//   dropout     kept if the word is at least p 2^32
//   uniform     the upper 24 (float32), 53 (float64), 8 (bfloat16) or 11 (float16) bits as a fraction in [0, 1)
//   normal      the Box-Muller transform of two uniforms u, v of a pair of columns:
//                 others:     block = c / 4, words 2 p and 2 p + 1 of pair p = (c % 4) / 2:
//                             u = (word + 1) / 2^32,  v = word / 2^32
//                 f64:        block = c / 2, two words each, low word first, upper 53 bits:
//                             u = (bits + 1) / 2^53,  v = bits / 2^53
//               and then sqrt(-2 ln u) cos(2 pi v) for the even column of the pair, sin for the odd one. Computed in
//               double, whatever the element type: equal to the last bit wherever the mathematical library is
//
// So a value depends on (seed, row_key, column, stream) only: not on ranks, threads, the order or number of rows, the
// device or the instruction set.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/element.h"
#include "formats/philox.h"

namespace pyg_dist {

// Bits of a uniform number of T, as many as T holds exactly in [0, 1).
template <class T>
struct UniformBits {
  static constexpr int value = 24;
};
template <>
struct UniformBits<double> {
  static constexpr int value = 53;
};
template <>
struct UniformBits<BFloat16> {
  static constexpr int value = 8;
};
template <>
struct UniformBits<Float16> {
  static constexpr int value = 11;
};

// The normal numbers of two columns.
struct NormalPair {
  double even, odd;
};

// Pair `pair` (0 or 1; 0 for double) of the columns of a block, as element type T.
template <class T>
PYG_DIST_PORTABLE NormalPair normal_pair(const Words& words, int pair) {
  constexpr double kTwoPi = 6.283185307179586476925286766559;
  double u, v;
  if constexpr (sizeof(T) == 8) {
    const uint32_t* w = words.word;
    u = (static_cast<double>((uint64_t{w[1]} << 32 | w[0]) >> 11) + 1) * 0x1p-53;
    v = static_cast<double>((uint64_t{w[3]} << 32 | w[2]) >> 11) * 0x1p-53;
  } else {
    u = (static_cast<double>(words.word[2 * pair]) + 1) * 0x1p-32;
    v = static_cast<double>(words.word[2 * pair + 1]) * 0x1p-32;
  }
  const double radius = std::sqrt(-2 * std::log(u)), angle = kTwoPi * v;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace pyg_dist
