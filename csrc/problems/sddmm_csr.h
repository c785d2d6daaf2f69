// Dense times dense, sampled at the entries of a CSR pattern: out[e] = <a[i], b[col[e]]> for e in
// [rowptr[i], rowptr[i + 1]). The derivative of spmm_csr by its edge weights.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct SddmmCsr {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_edges]
  const void* a;          // [num_rows, num_features], a_stride elements apart
  const void* b;          // rows of num_features, b_stride elements apart
  void* out;              // [num_edges], accumulator type
  int64_t num_rows;
  int64_t num_edges;
  int64_t num_features;
  int64_t a_stride;
  int64_t b_stride;
  Element element;
};

}  // namespace pyg_dist
