// The checks that ops on rows share.
#pragma once

#include "ops/device.h"

namespace pyg_dist {

inline void check_index(const char* op, const BadIndex& bad, int64_t num_rows) {
  PYG_DIST_CHECK(bad.position < 0, op, ": expected 'index' to lie in [0, ", num_rows, "), got ", bad.value,
                 " at position ", bad.position);
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t num_rows, int64_t num_columns) {
  PYG_DIST_CHECK(tensor.size(0) == num_rows && tensor.size(1) == num_columns, op, ": expected '", name,
                 "' to have shape [", num_rows, ", ", num_columns, "], got ", shape_of(tensor));
}

inline void check_dense_rows(const char* op, const char* name, const Tensor& tensor) {
  PYG_DIST_CHECK(tensor.dim() == 2 && tensor.is_contiguous(), op, ": expected '", name,
                 "' to be two-dimensional and contiguous, got shape ", shape_of(tensor));
}

}  // namespace pyg_dist
