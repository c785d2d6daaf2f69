// The checks that the ops on a CSR pattern share.
#pragma once

#include "ops/device.h"

namespace pyg_dist {

// Every row's bounds are looked at: kernels split the work by them, and write. That col lies in range is the caller's
// promise (CSR looks, once): a pass over all edges takes 3 to 15 % of a product of width 16. On a GPU so are the
// bounds: a look would wait for it.
inline void check_csr(const char* op, const OnDevice& device, const Tensor& rowptr, const Tensor& col) {
  check_vector(op, "rowptr", rowptr, ScalarType::Long);
  check_vector(op, "col", col, ScalarType::Int);
  PYG_DIST_CHECK(rowptr.size(0) >= 1, op, ": expected 'rowptr' to have one entry more than there are rows, got none");
  if (device->scan_rowptr == nullptr) return;
  const RowptrScan scan = device->scan_rowptr(static_cast<const int64_t*>(rowptr.const_data_ptr()), rowptr.size(0) - 1);
  PYG_DIST_CHECK(scan.first == 0 && scan.last == col.size(0), op, ": expected 'rowptr' to run from 0 to the ",
                 col.size(0), " entries of 'col', got ", scan.first, " to ", scan.last);
  PYG_DIST_CHECK(scan.falls_at < 0, op, ": expected 'rowptr' not to decrease, got ", scan.after, " after ", scan.before,
                 " at position ", scan.falls_at);
}

// The tensor whose rows `col` names.
inline void check_gathered(const char* op, const char* name, const Tensor& tensor, const Tensor& col) {
  PYG_DIST_CHECK(tensor.size(0) > 0 || col.size(0) == 0, op, ": expected '", name, "' to have rows for ", col.size(0),
                 " edges, got none");
}

}  // namespace pyg_dist
