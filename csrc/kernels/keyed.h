// Random numbers keyed by (seed, key of the row, column); philox.h has the mapping.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "formats/philox.h"
#include "kernels/cpu/level.h"

namespace pyg_dist {

struct Keyed {
  const int64_t* key;  // [num_rows]
  int64_t num_columns;
  int64_t column_offset;  // >= 0; column_offset + num_columns <= 2^33
  uint64_t seed;
};

// y[i, c] = x[i, c] * scale if the word of (i, c) is at least `threshold`, else 0. x and y are dense.
struct KeyedDropout {
  Keyed keyed;
  const void* x;
  void* y;
  uint32_t threshold;
  double scale;
  Element element;
};

// y[i, c] = the word(s) of (i, c) as a fraction in [0, 1): the upper 24, 53 or 8 bits for f32, f64, bf16. y is dense.
struct KeyedUniform {
  Keyed keyed;
  void* y;
  Element element;
};

PYG_DIST_AT_EVERY_LEVEL(void dropout_rows(const KeyedDropout& problem, int64_t row_begin, int64_t row_end))
PYG_DIST_AT_EVERY_LEVEL(void uniform_rows(const KeyedUniform& problem, int64_t row_begin, int64_t row_end))

}  // namespace pyg_dist
