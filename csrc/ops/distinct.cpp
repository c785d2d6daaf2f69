#include "cpu/distinct.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor> distinct_op(Tensor known, Tensor value, MaybeTensor place_of) {
  const char* op = "distinct";
  device_of(op, known, value, place_of);
  PYG_DIST_CHECK(known.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  check_vector(op, "known", known, ScalarType::Long);
  const Integers values = integers_of(op, "value", value, value.numel());
  if (place_of) check_vector(op, "place_of", *place_of, ScalarType::Int);
  PYG_DIST_CHECK(known.size(0) + value.size(0) <= std::numeric_limits<int32_t>::max(), op,
                 ": expected fewer than 2^31 values, got ", known.size(0) + value.size(0));
  const Tensor place = new_output(known, {value.size(0)});
  std::vector<int64_t> found;
  const BadDistinct bad = distinct(
      {
          .known = static_cast<const int64_t*>(known.const_data_ptr()),
          .value = values,
          .num_known = known.size(0),
          .num_values = value.size(0),
          .place = static_cast<int64_t*>(place.mutable_data_ptr()),
          .place_of = place_of ? static_cast<int32_t*>(place_of->mutable_data_ptr()) : nullptr,
          .span = place_of ? place_of->size(0) : 0,
      },
      found);
  PYG_DIST_CHECK(bad.known.position < 0, op, ": expected distinct values in 'known', got ", bad.known.value,
                 " again at position ", bad.known.position);
  PYG_DIST_CHECK(bad.value.position < 0, op, ": expected values in 'place_of', got ", bad.value.value, " at position ",
                 bad.value.position);
  const Tensor first = new_output(known, {static_cast<int64_t>(found.size())});
  std::copy(found.begin(), found.end(), static_cast<int64_t*>(first.mutable_data_ptr()));
  return {first, place};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("distinct", TORCH_BOX(&distinct_op)); }

}  // namespace pyg_dist
