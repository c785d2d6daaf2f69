// Rows, picked by an index or one after another, quantized and packed in one pass over memory.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "problems/quantize_csr.h"

namespace pyg_dist {

struct QuantizeRows {
  const int64_t* key;    // [num_rows], or null: to nearest
  const int32_t* index;  // [num_rows], or null: row r of x
  const void* x;         // rows of num_columns, x_stride elements apart
  uint8_t* packed;       // rows of packed_row_bytes(num_columns, bits), one after another
  int64_t num_columns;
  int64_t x_stride;
  uint64_t seed;
  int bits;  // 2, 4, 8 or 16
  Element element;
};

}  // namespace pyg_dist
