// The checks that the ops on a CSR pattern share.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>

#include "ops/check.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist {

// Every row's bounds are looked at: kernels split the work by them, and write. That col lies in range is the caller's
// promise (CSR.from_edges looks): a pass over all edges takes 3 to 15 % of a product of width 16.
inline void check_csr(const char* op, const Tensor& rowptr, const Tensor& col) {
  check_vector(op, "rowptr", rowptr, ScalarType::Long);
  check_vector(op, "col", col, ScalarType::Int);
  PYG_DIST_CHECK(rowptr.size(0) >= 1, op, ": expected 'rowptr' to have one entry more than there are rows, got none");
  const auto* start = static_cast<const int64_t*>(rowptr.const_data_ptr());
  const int64_t num_rows = rowptr.size(0) - 1;
  PYG_DIST_CHECK(start[0] == 0 && start[num_rows] == col.size(0), op, ": expected 'rowptr' to run from 0 to the ",
                 col.size(0), " entries of 'col', got ", start[0], " to ", start[num_rows]);
  constexpr int64_t kRowsPerChunk = 1 << 15;
  std::atomic<bool> decreases{false};
  for_each_range(num_rows, kRowsPerChunk, [&](int64_t begin, int64_t end) {
    bool falls = false;
    for (int64_t row = begin; row < end; ++row) falls |= start[row + 1] < start[row];
    if (falls) decreases.store(true, std::memory_order_relaxed);
  });
  if (decreases) {
    const int64_t* bad = std::adjacent_find(start, start + num_rows + 1, std::greater<>()) + 1;
    fail(op, ": expected 'rowptr' not to decrease, got ", *bad, " after ", bad[-1], " at position ", bad - start);
  }
}

}  // namespace pyg_dist
