// Rows, picked by an index or one after another, quantized and packed in one pass over memory; packed_rows.h has the
// formula and the layout.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "kernels/cpu/level.h"
#include "kernels/keyed.h"

namespace pyg_dist {

struct QuantizeRows {
  const int64_t* key;    // [num_rows]; read if stochastic
  const int32_t* index;  // [num_rows], or null: row r of x
  const void* x;         // rows of num_columns, x_stride elements apart
  uint8_t* packed;       // rows of packed_row_bytes(num_columns, bits), one after another
  int64_t num_columns;
  int64_t x_stride;
  uint64_t seed;
  int bits;  // 2, 4, 8 or 16
  bool stochastic;
  Element element;
};

constexpr int64_t kAllFinite = -1;

// Returns the first row with a NaN, an infinity or a range beyond float32 (with 16 bits: a value beyond bfloat16), or
// kAllFinite. What is written of such a row means nothing.
PYG_DIST_AT_EVERY_LEVEL(int64_t quantize_rows(const QuantizeRows& problem, int64_t row_begin, int64_t row_end))

}  // namespace pyg_dist
