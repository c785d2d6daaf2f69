// Dense times dense, sampled at the entries of a CSR pattern: out[e] = <a[i], b[col[e]]> for e in
// [rowptr[i], rowptr[i + 1]). The derivative of spmm_csr by its edge weights.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "kernels/cpu/level.h"

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

PYG_DIST_AT_EVERY_LEVEL(void sddmm_edges(const SddmmCsr& problem, int64_t edge_begin, int64_t edge_end))

}  // namespace pyg_dist
