// Standard normal numbers keyed by (seed, key of the row, column): the Box-Muller transform of two uniforms u, v of a
// pair of columns. With words as in philox.h, stream `normal`:
//
//   f32, bf16:  block = c / 4, words 2 p and 2 p + 1 of pair p = (c % 4) / 2:  u = (word + 1) / 2^32,  v = word / 2^32
//   f64:        block = c / 2, two words each, low word first, upper 53 bits:  u = (bits + 1) / 2^53,  v = bits / 2^53
//
// and then sqrt(-2 ln u) cos(2 pi v) for the even column of the pair, sin for the odd one. Computed in double, whatever
// the element type; one version for all instruction sets, equal to the last bit wherever the C library is.
#pragma once

#include <cstdint>

#include "kernels/keyed.h"

namespace pyg_dist {

struct KeyedNormal {
  Keyed keyed;
  void* y;  // [rows, num_columns], dense
  Element element;
};

void normal_rows(const KeyedNormal& problem, int64_t row_begin, int64_t row_end);

}  // namespace pyg_dist
