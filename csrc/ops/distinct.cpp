#include "cpu/distinct.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor> distinct_op(Tensor known, Tensor value) {
  const char* op = "distinct";
  device_of(op, known, value);
  PYG_DIST_CHECK(known.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "known", known, ScalarType::Long);
  const Integers values = integers_of(op, "value", value, value.numel());
  PYG_DIST_CHECK(known.size(0) + value.size(0) <= std::numeric_limits<int32_t>::max(), op,
                 ": expected fewer than 2^31 values, got ", known.size(0) + value.size(0));
  const Tensor place = new_output(known, {value.size(0)});
  std::vector<int64_t> found;
  const BadIndex bad = distinct(
      {
          .known = static_cast<const int64_t*>(known.const_data_ptr()),
          .value = values,
          .num_known = known.size(0),
          .num_values = value.size(0),
          .place = static_cast<int64_t*>(place.mutable_data_ptr()),
      },
      found);
  PYG_DIST_CHECK(bad.position < 0, op, ": expected distinct values in 'known', got ", bad.value, " again at position ",
                 bad.position);
  const Tensor first = new_output(known, {static_cast<int64_t>(found.size())});
  std::copy(found.begin(), found.end(), static_cast<int64_t*>(first.mutable_data_ptr()));
  return {first, place};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("distinct", TORCH_BOX(&distinct_op)); }

}  // namespace pyg_dist
