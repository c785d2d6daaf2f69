// Random numbers keyed by (seed, key of the row, column); formats/keyed.h has the mapping.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct Keyed {
  const int64_t* key;  // [num_rows]
  int64_t num_rows;
  int64_t num_columns;
  int64_t column_offset;  // >= 0; column_offset + num_columns <= 2^33
  uint64_t seed;
};

// y[i, c] = x[i, c] * (scale if the word of (i, c) is at least `threshold`, else 0): NaN and infinities become NaN, as
// in torch. x and y are dense.
struct KeyedDropout {
  Keyed keyed;
  const void* x;
  void* y;
  uint32_t threshold;
  double scale;
  Element element;
};

// y[i, c] = what the word(s) of (i, c) make: a fraction in [0, 1), or a standard normal number. y is dense.
struct KeyedNumbers {
  Keyed keyed;
  void* y;
  Element element;
};

// y[i] = what stands at place[i] of the permutation of [0, size) that the seed names: formats/permutation.h.
struct KeyedPermutation {
  const int64_t* place;  // [num_places], in [0, size)
  int64_t* y;
  int64_t num_places;
  int64_t size;
  uint64_t seed;
};

}  // namespace pyg_dist
