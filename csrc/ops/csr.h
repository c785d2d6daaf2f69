// The checks that the ops on a CSR pattern share.
#pragma once

#include "ops/check.h"

namespace pyg_dist {

// Constant time: the ends of rowptr are looked at. That rowptr does not decrease and that col lies in range is the
// caller's promise, since a look at every edge would cost as much as some of the products.
inline void check_csr(const char* op, const Tensor& rowptr, const Tensor& col) {
  check_vector(op, "rowptr", rowptr, ScalarType::Long);
  check_vector(op, "col", col, ScalarType::Int);
  PYG_DIST_CHECK(rowptr.size(0) >= 1, op, ": expected 'rowptr' to have one entry more than there are rows, got none");
  const auto* ends = static_cast<const int64_t*>(rowptr.const_data_ptr());
  const int64_t first = ends[0], last = ends[rowptr.size(0) - 1];
  PYG_DIST_CHECK(first == 0 && last == col.size(0), op, ": expected 'rowptr' to run from 0 to the ", col.size(0),
                 " entries of 'col', got ", first, " to ", last);
}

}  // namespace pyg_dist
