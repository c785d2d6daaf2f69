#include "ops/allocate.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

constexpr const char* kOp = "gather_rows";

void gather(const OnDevice& device, const Tensor& x, const Tensor& index, const Tensor& out) {
  const auto element_bytes = static_cast<int64_t>(x.element_size());
  const BadIndex bad = device->gather_rows({
      .x = static_cast<const char*>(x.const_data_ptr()),
      .index = static_cast<const int64_t*>(index.const_data_ptr()),
      .out = static_cast<char*>(out.mutable_data_ptr()),
      .num_source_rows = x.size(0),
      .num_rows = index.size(0),
      .row_bytes = x.size(1) * element_bytes,
      .x_stride = x.stride(0) * element_bytes,
      .out_stride = out.stride(0) * element_bytes,
  });
  check_index(kOp, bad, x.size(0));
}

Tensor gather_rows(Tensor x, Tensor index) {
  const auto device = device_of(kOp, x, index);
  check_rows(kOp, "x", x);
  check_vector(kOp, "index", index, ScalarType::Long);
  const Tensor out = new_output(x, {index.size(0), x.size(1)});
  gather(device, x, index, out);
  return out;
}

void gather_rows_into(Tensor out, Tensor x, Tensor index) {
  const auto device = device_of(kOp, x, index, out);
  check_rows(kOp, "x", x);
  check_vector(kOp, "index", index, ScalarType::Long);
  check_written_rows(kOp, "out", out);
  check_same_dtype(kOp, "out", out, "x", x);
  check_shape(kOp, "out", out, index.size(0), x.size(1));
  check_apart(kOp, "out", out, "x", x);
  check_apart(kOp, "out", out, "index", index);
  gather(device, x, index, out);
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("gather_rows_into", TORCH_BOX(&gather_rows_into));
}

}  // namespace pyg_dist
