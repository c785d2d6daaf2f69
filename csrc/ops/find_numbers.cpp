#include "cpu/find_numbers.h"

#include <limits>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

Tensor find_numbers_op(Tensor id, Tensor count, Tensor first, Tensor given, Tensor given_number, Tensor value) {
  const char* op = "find_numbers";
  device_of(op, id, count, first, given, given_number, value);
  PYG_DIST_CHECK(id.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "id", id, ScalarType::Long);
  check_vector(op, "count", count, ScalarType::Long);
  check_vector(op, "first", first, ScalarType::Long);
  check_vector(op, "given", given, ScalarType::Long);
  check_vector(op, "given_number", given_number, ScalarType::Long, given.size(0));
  check_vector(op, "value", value, ScalarType::Long);
  PYG_DIST_CHECK(id.size(0) + given.size(0) <= std::numeric_limits<int32_t>::max(), op,
                 ": expected fewer than 2^31 ids, got ", id.size(0) + given.size(0));
  const auto* const counts = static_cast<const int64_t*>(count.const_data_ptr());
  PYG_DIST_CHECK(count.size(0) == 0 || first.size(0) > 0, op, ": expected groups for ", count.size(0), " lists");
  int64_t left = id.size(0);
  for (int64_t list = 0; list < count.size(0) && left >= 0; ++list) left = counts[list] < 0 ? -1 : left - counts[list];
  PYG_DIST_CHECK(left == 0, op, ": expected 'count' to sum up to the ", id.size(0), " ids");
  const Tensor number = new_output_like(value);
  find_numbers({
      .id = static_cast<const int64_t*>(id.const_data_ptr()),
      .count = counts,
      .first = static_cast<const int64_t*>(first.const_data_ptr()),
      .given = static_cast<const int64_t*>(given.const_data_ptr()),
      .given_number = static_cast<const int64_t*>(given_number.const_data_ptr()),
      .value = static_cast<const int64_t*>(value.const_data_ptr()),
      .num_lists = count.size(0),
      .num_groups = first.size(0),
      .num_given = given.size(0),
      .num_values = value.size(0),
      .number = static_cast<int64_t*>(number.mutable_data_ptr()),
  });
  return number;
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("find_numbers", TORCH_BOX(&find_numbers_op)); }

}  // namespace pyg_dist
