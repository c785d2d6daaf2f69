#include "ops/rows.h"

namespace pyg_dist {
namespace {

void scatter_add_rows(Tensor out, Tensor index, Tensor rows) {
  const char* op = "scatter_add_rows";
  const auto device = device_of(op, out, index, rows);
  check_written_rows(op, "out", out);
  check_vector(op, "index", index, ScalarType::Long);
  check_rows(op, "rows", rows);
  check_same_dtype(op, "rows", rows, "out", out);
  check_shape(op, "rows", rows, index.size(0), out.size(1));
  check_apart(op, "out", out, "index", index);
  check_apart(op, "out", out, "rows", rows);
  const BadIndex bad = device->scatter_add_rows({
      .index = static_cast<const int64_t*>(index.const_data_ptr()),
      .order = nullptr,
      .rows = rows.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_rows = index.size(0),
      .num_out_rows = out.size(0),
      .num_features = out.size(1),
      .rows_stride = rows.stride(0),
      .out_stride = out.stride(0),
      .element = element_of(op, "out", out.scalar_type()),
  });
  check_index(op, bad, out.size(0));
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("scatter_add_rows", TORCH_BOX(&scatter_add_rows)); }

}  // namespace pyg_dist
