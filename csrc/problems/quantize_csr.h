// Rows of sums, as spmm_csr makes them, quantized and packed; formats/packed_rows.h has the formula and the layout.
#pragma once

#include <cstdint>

#include "problems/spmm_csr.h"

namespace pyg_dist {

constexpr int64_t kAllFinite = -1;

struct QuantizeCsr {
  SpmmCsr sums;        // its out is not used; no row_scale
  const int64_t* key;  // [num_rows], or null: to nearest
  uint8_t* packed;     // [num_rows, packed_row_bytes(num_features, bits)]
  // The first row with a NaN, an infinity or a range beyond float32 (with 16 bits: a value beyond bfloat16), or
  // kAllFinite. What is written of such a row means nothing; where nobody waits to hear of it, on a GPU, it is NaN.
  int64_t* bad_row;
  uint64_t seed;
  int bits;  // 2, 4, 8 or 16
};

}  // namespace pyg_dist
