#include "cpu/add_places.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

Tensor add_places_op(Tensor place_of, Tensor value, int64_t next, MaybeTensor again) {
  const char* op = "add_places";
  device_of(op, place_of, value, again);
  PYG_DIST_CHECK(place_of.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "place_of", place_of, ScalarType::Int);
  PYG_DIST_CHECK(place_of.size(0) <= std::numeric_limits<int32_t>::max(), op, ": expected less than 2^31 places, got ",
                 place_of.size(0));
  const Integers values = integers_of(op, "value", value, value.numel());
  if (again) check_vector(op, "again", *again, ScalarType::Long);
  const int64_t num_again = again ? again->size(0) : 0, size = value.size(0) + num_again;
  PYG_DIST_CHECK(next >= 0 && next <= std::numeric_limits<int32_t>::max() - size, op,
                 ": expected places from 0 to 2^31, got ", next, " and ", size, " values");
  std::vector<int32_t> added;
  const BadIndex bad = add_places(
      {
          .place_of = static_cast<int32_t*>(place_of.mutable_data_ptr()),
          .value = values,
          .span = place_of.size(0),
          .num_values = value.size(0),
          .next = next,
          .again = again ? static_cast<const int64_t*>(again->const_data_ptr()) : nullptr,
          .num_again = num_again,
      },
      added);
  PYG_DIST_CHECK(bad.position < 0, op, ": expected values in 'place_of', got ", bad.value, " at position ",
                 bad.position);
  const Tensor found = new_output(place_of, {static_cast<int64_t>(added.size())}, ScalarType::Long);
  std::copy(added.begin(), added.end(), static_cast<int64_t*>(found.mutable_data_ptr()));
  return found;
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("add_places", TORCH_BOX(&add_places_op)); }

}  // namespace pyg_dist
