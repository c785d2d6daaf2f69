#include "ops/allocate.h"

#include <algorithm>

namespace pyg_dist {
namespace {

size_t bytes_of(ScalarType dtype) {
  if (dtype == ScalarType::Byte || dtype == ScalarType::Bool) return 1;
  if (dtype == ScalarType::Long) return sizeof(int64_t);
  return static_cast<size_t>(bytes_of(element_of("new_output", "dtype", dtype)));
}

size_t bytes_of(Sizes sizes, size_t element_size) {
  auto num_bytes = static_cast<int64_t>(element_size);
  bool fits = true, is_empty = false;
  for (const int64_t size : sizes) {
    is_empty |= size == 0;
    fits &= size >= 0 && !__builtin_mul_overflow(num_bytes, std::max<int64_t>(size, 1), &num_bytes);
  }
  if (!fits) {
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    fail("output: expected sizes of 0 and more, and fewer than 2^63 bytes, got [", shape, "]");
  }
  return is_empty ? 0 : static_cast<size_t>(num_bytes);
}

Tensor empty_rows(Tensor like, int64_t num_rows, int64_t num_columns) {
  return new_output(like, {num_rows, num_columns});
}

}  // namespace

Tensor new_output(const Tensor& like, Sizes sizes, std::optional<ScalarType> dtype) {
  const size_t num_bytes = bytes_of(sizes, dtype ? bytes_of(*dtype) : like.element_size());
  return device_of("new_output", like)->allocate(like, sizes, dtype.value_or(like.scalar_type()), num_bytes);
}

PYG_DIST_OPS(m) { m.impl("empty_rows", TORCH_BOX(&empty_rows)); }

}  // namespace pyg_dist
