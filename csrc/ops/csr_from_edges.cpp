#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>

#include "ops/device.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor, Tensor> csr_from_edges(Tensor row, Tensor col, MaybeTensor edge, int64_t num_rows,
                                                  int64_t num_cols) {
  const char* op = "csr_from_edges";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto device = device_of(op, row, col, edge);
  PYG_DIST_CHECK(num_rows >= 0 && num_rows <= kMost && num_cols >= 0 && num_cols <= kMost, op,
                 ": expected 'num_rows' and 'num_cols' to lie in [0, 2^31), got ", num_rows, " and ", num_cols);
  const int64_t num_entries = row.numel();
  CsrFromEdges problem{
      .row = integers_of(op, "row", row, num_entries),
      .col = integers_of(op, "col", col, num_entries),
      .edge = edge ? integers_of(op, "edge", *edge, num_entries) : Integers{nullptr, num_entries > kMost},
      .rowptr = nullptr,
      .sorted_col = nullptr,
      .sorted_edge = {nullptr, false},
      .num_rows = num_rows,
      .num_cols = num_cols,
      .num_entries = num_entries,
  };
  const EntriesScan scan = device->scan_entries(problem);
  PYG_DIST_CHECK(scan.bad < 0, op, ": expected entries with rows in [0, ", num_rows, ") and columns in [0, ", num_cols,
                 "), got row ", problem.row[scan.bad], " and column ", problem.col[scan.bad], " at position ",
                 scan.bad);
  const Tensor rowptr = torch::stable::new_empty(row, {num_rows + 1}, ScalarType::Long);
  const Tensor sorted_col = torch::stable::new_empty(row, {num_entries}, ScalarType::Int);
  const bool stays = scan.is_sorted && !edge;
  const Tensor sorted_edge = torch::stable::new_empty(row, {stays ? 0 : num_entries},
                                                      problem.edge.is_wide ? ScalarType::Long : ScalarType::Int);
  problem.rowptr = static_cast<int64_t*>(rowptr.mutable_data_ptr());
  problem.sorted_col = static_cast<int32_t*>(sorted_col.mutable_data_ptr());
  problem.sorted_edge = {stays ? nullptr : sorted_edge.mutable_data_ptr(), problem.edge.is_wide};
  device->csr_from_edges(problem, scan.is_sorted, row);
  return {rowptr, sorted_col, sorted_edge};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("csr_from_edges", TORCH_BOX(&csr_from_edges)); }

}  // namespace pyg_dist
