#include "cpu/count_less.h"

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

Tensor count_less_op(Tensor value, Tensor number, Tensor size) {
  const char* op = "count_less";
  device_of(op, value, number, size);
  PYG_DIST_CHECK(value.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "value", value, ScalarType::Long);
  check_vector(op, "number", number, ScalarType::Long);
  check_vector(op, "size", size, ScalarType::Long);
  const auto* const sizes = static_cast<const int64_t*>(size.const_data_ptr());
  int64_t sum = 0;
  for (int64_t list = 0; list < size.size(0) && sum >= 0; ++list) sum = sizes[list] < 0 ? -1 : sum + sizes[list];
  PYG_DIST_CHECK(sum == number.size(0), op, ": expected 'size' to sum up to the ", number.size(0), " numbers, got ",
                 sum);
  const Tensor out = new_output_like(value);
  count_less({
      .value = static_cast<const int64_t*>(value.const_data_ptr()),
      .number = static_cast<const int64_t*>(number.const_data_ptr()),
      .size = sizes,
      .num_values = value.size(0),
      .num_lists = size.size(0),
      .out = static_cast<int64_t*>(out.mutable_data_ptr()),
  });
  return out;
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("count_less", TORCH_BOX(&count_less_op)); }

}  // namespace pyg_dist
