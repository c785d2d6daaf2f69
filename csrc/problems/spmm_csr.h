// Sparse (CSR) times dense:
//   out[i, :] (+)= row_scale[i] * sum over e in [rowptr[i], rowptr[i + 1]) of
//                    weight[e] * col_scale[col[e]] * x[col[e], :]
// Each scale that is null counts as one; with `divide` both divide instead. A row's edges are
// added in their order, each column on its own, so a row's sum does not depend on which thread computes it.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct SpmmCsr {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_edges]
  const void* x;          // rows of num_features, x_stride elements apart
  const void* weight;     // [num_edges] accumulator type, or null
  const void* row_scale;  // [num_rows] accumulator type, or null
  const void* col_scale;  // [rows of x] accumulator type, or null
  void* out;              // rows of num_features, out_stride elements apart
  int64_t num_rows;
  int64_t num_source_rows;
  int64_t num_edges;
  int64_t num_features;
  int64_t x_stride;
  int64_t out_stride;
  Element x_element;
  Element out_element;  // x_element, or f32 when x is bf16
  bool accumulate;
  bool divide;
  int64_t prefetch_edges = 32;  // on a CPU rows of x are asked for so many edges ahead
};

// How a product goes about it, with the same bits: all columns of a row at once, or by blocks of columns that caches
// hold. Which is faster depends on the pattern, the width and the processor.
enum class SpmmForm : uint8_t { any, plain, blocks };

}  // namespace pyg_dist
