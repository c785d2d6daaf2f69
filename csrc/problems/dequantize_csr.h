// Sparse (CSR) times packed rows (formats/packed_rows.h), unpacked in registers:
//   out[i, :] += row_scale[i] * sum over e in [rowptr[i], rowptr[i + 1]) of weight[e] * (Z + S q)[col[e], :]
// A factor that is null counts as one. Sums are kept in float32, in the order of the edges.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct DequantizeCsr {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_edges]
  const uint8_t* packed;  // rows of packed_row_bytes(num_columns, bits), one after another
  const uint8_t* packed_end;
  const void* weight;     // [num_edges] accumulator type of out, or null
  const void* row_scale;  // [num_rows] accumulator type of out, or null
  void* out;              // rows of num_columns, out_stride elements apart
  int64_t num_rows;
  int64_t num_edges;
  int64_t num_columns;
  int64_t out_stride;
  int bits;  // 2, 4, 8 or 16
  Element element;
};

}  // namespace pyg_dist
