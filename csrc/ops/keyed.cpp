#include "ops/keyed.h"

#include <cmath>

#include "ops/allocate.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 62;

bool is_empty(const Keyed& keyed) { return keyed.num_rows == 0 || keyed.num_columns == 0; }

Tensor keyed_dropout(Tensor x, Tensor key, double p, int64_t seed, int64_t column_offset) {
  const char* op = "keyed_dropout";
  const auto device = device_of(op, x, key);
  check_dense_rows(op, "x", x);
  PYG_DIST_CHECK(key.numel() == x.size(0), op, ": expected 'key' to have ", x.size(0),
                 " entries, one a row of 'x', got ", key.numel());
  PYG_DIST_CHECK(p >= 0 && p <= 1, op, ": expected 'p' to lie in [0, 1], got ", p);
  const Keyed keyed = keyed_of(op, key, x.size(1), seed, column_offset);
  const Element element = element_of(op, "x", x.scalar_type());
  const double threshold = std::nearbyint(std::ldexp(p, 32));
  const bool drops_all = threshold >= 0x1p32;
  const Tensor y = new_output_like(x);
  const KeyedDropout problem{
      .keyed = keyed,
      .x = x.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .threshold = drops_all ? 0 : static_cast<uint32_t>(threshold),
      .scale = drops_all ? 0 : 1 / (1 - p),
      .element = element,
  };
  if (!is_empty(keyed)) device->keyed_dropout(problem);
  return y;
}

Tensor draw(const char* op, void (*DeviceOps::*numbers)(const KeyedNumbers&), const Tensor& key, int64_t num_columns,
            int64_t seed, int64_t column_offset, ScalarType dtype) {
  const auto device = device_of(op, key);
  const Keyed keyed = keyed_of(op, key, num_columns, seed, column_offset);
  const Element element = element_of(op, "dtype", dtype);
  const Tensor y = new_output(key, {key.size(0), num_columns}, dtype);
  if (!is_empty(keyed)) ((*device).*numbers)({keyed, y.mutable_data_ptr(), element});
  return y;
}

Tensor keyed_uniform(Tensor key, int64_t num_columns, int64_t seed, int64_t column_offset, ScalarType dtype) {
  return draw("keyed_uniform", &DeviceOps::keyed_uniform, key, num_columns, seed, column_offset, dtype);
}

Tensor keyed_normal(Tensor key, int64_t num_columns, int64_t seed, int64_t column_offset, ScalarType dtype) {
  return draw("keyed_normal", &DeviceOps::keyed_normal, key, num_columns, seed, column_offset, dtype);
}

Tensor keyed_permutation(Tensor place, int64_t size, int64_t seed) {
  const char* op = "keyed_permutation";
  const auto device = device_of(op, place);
  check_vector(op, "place", place, ScalarType::Long);
  PYG_DIST_CHECK(size >= 1 && size <= kMaxSize, op, ": expected 'size' to lie in [1, 2^62], got ", size);
  const Tensor y = new_output_like(place);
  const BadIndex bad = device->keyed_permutation({
      .place = static_cast<const int64_t*>(place.const_data_ptr()),
      .y = static_cast<int64_t*>(y.mutable_data_ptr()),
      .num_places = place.size(0),
      .size = size,
      .seed = static_cast<uint64_t>(seed),
  });
  PYG_DIST_CHECK(bad.position < 0, op, ": expected 'place' to lie in [0, ", size, "), got ", bad.value, " at position ",
                 bad.position);
  return y;
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("keyed_dropout", TORCH_BOX(&keyed_dropout));
  m.impl("keyed_uniform", TORCH_BOX(&keyed_uniform));
  m.impl("keyed_normal", TORCH_BOX(&keyed_normal));
  m.impl("keyed_permutation", TORCH_BOX(&keyed_permutation));
}

}  // namespace pyg_dist
