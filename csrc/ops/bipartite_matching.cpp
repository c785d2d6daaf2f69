#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>

#include "ops/allocate.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor, Tensor> bipartite_matching(Tensor rowptr, Tensor col, int64_t num_cols) {
  const char* op = "bipartite_matching";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto device = device_of(op, rowptr, col);
  check_csr(op, device, rowptr, col);
  const int64_t num_rows = rowptr.size(0) - 1;
  PYG_DIST_CHECK(num_rows <= kMost && num_cols >= 0 && num_cols <= kMost, op,
                 ": expected fewer than 2^31 rows and columns, got ", num_rows, " and ", num_cols);
  const Tensor col_of = new_output(col, {num_rows}), row_reached = new_output(col, {num_rows}, ScalarType::Bool),
               col_reached = new_output(col, {num_cols}, ScalarType::Bool);
  const BadIndex bad = device->bipartite_matching({
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .num_rows = num_rows,
      .num_cols = num_cols,
      .num_entries = col.size(0),
      .col_of = static_cast<int32_t*>(col_of.mutable_data_ptr()),
      .row_reached = static_cast<bool*>(row_reached.mutable_data_ptr()),
      .col_reached = static_cast<bool*>(col_reached.mutable_data_ptr()),
  });
  PYG_DIST_CHECK(bad.position < 0, op, ": expected 'col' to lie in [0, ", num_cols, "), got ", bad.value,
                 " at position ", bad.position);
  return {col_of, row_reached, col_reached};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("bipartite_matching", TORCH_BOX(&bipartite_matching)); }

}  // namespace pyg_dist
