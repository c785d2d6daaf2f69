#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>

#include "ops/allocate.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

constexpr const char* kOp = "restrict_csr";
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

using Restricted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Restricted restrict_csr(Tensor rowptr, Tensor col, Tensor row, Tensor column, int64_t num_cols) {
  const auto device = device_of(kOp, rowptr, col, row, column);
  check_vector(kOp, "rowptr", rowptr, ScalarType::Long);
  check_vector(kOp, "col", col, ScalarType::Int);
  check_vector(kOp, "row", row, ScalarType::Long);
  check_vector(kOp, "column", column, ScalarType::Long);
  PYG_DIST_CHECK(rowptr.size(0) >= 1, kOp, ": expected 'rowptr' to have one entry more than there are rows, got none");
  PYG_DIST_CHECK(num_cols >= 0 && num_cols <= kMost && row.size(0) <= kMost, kOp,
                 ": expected fewer than 2^31 rows and columns, got ", row.size(0), " and ", num_cols);
  const Tensor out_rowptr = new_output(rowptr, {row.size(0) + 1});
  const Tensor turned_rowptr = new_output(rowptr, {column.size(0) + 1});
  Tensor out_col, entry, turned_col, turned_entry;
  const auto make_entries = [&](int64_t num_entries) -> RestrictedEntries {
    out_col = new_output(col, {num_entries});
    entry = new_output(rowptr, {num_entries});
    turned_col = new_output(col, {num_entries});
    turned_entry = new_output(rowptr, {num_entries});
    return {
        .col = static_cast<int32_t*>(out_col.mutable_data_ptr()),
        .entry = static_cast<int64_t*>(entry.mutable_data_ptr()),
        .turned_col = static_cast<int32_t*>(turned_col.mutable_data_ptr()),
        .turned_entry = static_cast<int64_t*>(turned_entry.mutable_data_ptr()),
    };
  };
  const RestrictCsr problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .row = static_cast<const int64_t*>(row.const_data_ptr()),
      .column = static_cast<const int64_t*>(column.const_data_ptr()),
      .num_all_rows = rowptr.size(0) - 1,
      .num_all_entries = col.size(0),
      .num_all_cols = num_cols,
      .num_rows = row.size(0),
      .num_cols = column.size(0),
      .out_rowptr = static_cast<int64_t*>(out_rowptr.mutable_data_ptr()),
      .turned_rowptr = static_cast<int64_t*>(turned_rowptr.mutable_data_ptr()),
  };
  const auto [bad_row, bad_column] = device->restrict_csr(problem, make_entries);
  PYG_DIST_CHECK(bad_row.position < 0, kOp, ": expected 'row' to name rows of 'rowptr' that lie in 'col', got ",
                 bad_row.value, " at position ", bad_row.position);
  PYG_DIST_CHECK(bad_column.position < 0, kOp, ": expected 'column' to ascend in [0, ", num_cols, "), got ",
                 bad_column.value, " at position ", bad_column.position);
  return {out_rowptr, out_col, entry, turned_rowptr, turned_col, turned_entry};
}

std::tuple<Tensor, Tensor, Tensor> transpose_csr(Tensor rowptr, Tensor col, int64_t num_cols) {
  const char* op = "transpose_csr";
  const auto device = device_of(op, rowptr, col);
  check_csr(op, device, rowptr, col);
  PYG_DIST_CHECK(num_cols >= 0 && rowptr.size(0) - 1 <= kMost, op, ": expected fewer than 2^31 rows, got ",
                 rowptr.size(0) - 1);
  const Tensor out_rowptr = new_output(rowptr, {num_cols + 1});
  const Tensor out_col = new_output_like(col);
  const Tensor entry = new_output(rowptr, {col.size(0)});
  const BadIndex bad = device->transpose_csr({
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .num_rows = rowptr.size(0) - 1,
      .num_cols = num_cols,
      .num_entries = col.size(0),
      .out_rowptr = static_cast<int64_t*>(out_rowptr.mutable_data_ptr()),
      .out_col = static_cast<int32_t*>(out_col.mutable_data_ptr()),
      .out_entry = static_cast<int64_t*>(entry.mutable_data_ptr()),
  });
  PYG_DIST_CHECK(bad.position < 0, op, ": expected 'col' to lie in [0, ", num_cols, "), got ", bad.value,
                 " at position ", bad.position);
  return {out_rowptr, out_col, entry};
}

bool equals_transpose_csr(Tensor rowptr, Tensor col) {
  const char* op = "equals_transpose_csr";
  const auto device = device_of(op, rowptr, col);
  check_csr(op, device, rowptr, col);
  return device->equals_transpose_csr(static_cast<const int64_t*>(rowptr.const_data_ptr()),
                                      static_cast<const int32_t*>(col.const_data_ptr()), rowptr.size(0) - 1);
}

Tensor find_sorted(Tensor sorted, Tensor value) {
  const auto device = device_of("find_sorted", sorted, value);
  check_vector("find_sorted", "sorted", sorted, ScalarType::Long);
  check_vector("find_sorted", "value", value, ScalarType::Long);
  const Tensor place = new_output_like(value);
  device->find_sorted({
      .sorted = static_cast<const int64_t*>(sorted.const_data_ptr()),
      .value = static_cast<const int64_t*>(value.const_data_ptr()),
      .place = static_cast<int64_t*>(place.mutable_data_ptr()),
      .size = sorted.size(0),
      .num_values = value.size(0),
  });
  return place;
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("restrict_csr", TORCH_BOX(&restrict_csr));
  m.impl("transpose_csr", TORCH_BOX(&transpose_csr));
  m.impl("equals_transpose_csr", TORCH_BOX(&equals_transpose_csr));
  m.impl("find_sorted", TORCH_BOX(&find_sorted));
}

}  // namespace pyg_dist
