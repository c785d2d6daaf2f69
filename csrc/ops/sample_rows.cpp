#include "cpu/sample_rows.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "ops/allocate.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor, Tensor> sample_rows_op(Tensor rowptr, Tensor col, MaybeTensor place, Tensor row, Tensor key,
                                                  int64_t count, bool replace, int64_t seed) {
  const char* op = "sample_rows";
  constexpr int64_t kRowsPerChunk = 1 << 10;
  device_of(op, rowptr, col, place, row, key);
  PYG_DIST_CHECK(rowptr.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "rowptr", rowptr, ScalarType::Long);
  check_vector(op, "col", col, ScalarType::Int);
  check_vector(op, "row", row, ScalarType::Long);
  check_vector(op, "key", key, ScalarType::Long, row.size(0));
  PYG_DIST_CHECK(rowptr.size(0) >= 1, op, ": expected 'rowptr' to have one entry more than there are rows, got none");
  PYG_DIST_CHECK(!replace || count >= 0, op, ": expected 'count' not to be negative with replacement, got ", count);
  const Tensor out_rowptr = new_output(rowptr, {row.size(0) + 1});
  const SampleRows problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .place = place ? integers_of(op, "place", *place, col.size(0)) : Integers{nullptr, true},
      .row = static_cast<const int64_t*>(row.const_data_ptr()),
      .key = static_cast<const int64_t*>(key.const_data_ptr()),
      .num_all_rows = rowptr.size(0) - 1,
      .num_entries = col.size(0),
      .num_rows = row.size(0),
      .count = count,
      .replace = replace,
      .seed = static_cast<uint64_t>(seed),
      .out_rowptr = static_cast<int64_t*>(out_rowptr.mutable_data_ptr()),
  };
  const BadIndex bad = count_sampled(problem);
  PYG_DIST_CHECK(bad.position < 0, op, ": expected 'row' to name rows of 'rowptr', got ", bad.value, " at position ",
                 bad.position);
  const int64_t size = problem.out_rowptr[problem.num_rows];
  const Tensor out_col = new_output(col, {size}), out_place = new_output(rowptr, {size});
  auto* const columns = static_cast<int32_t*>(out_col.mutable_data_ptr());
  auto* const places = static_cast<int64_t*>(out_place.mutable_data_ptr());
  for_each_range(problem.num_rows, kRowsPerChunk,
                 [&](int64_t begin, int64_t end) { sample_rows(problem, columns, places, begin, end); });
  return {out_rowptr, out_col, out_place};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("sample_rows", TORCH_BOX(&sample_rows_op)); }

}  // namespace pyg_dist
