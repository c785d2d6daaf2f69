#include "ops/allocate.h"

namespace pyg_dist {
namespace {

size_t bytes_of(ScalarType dtype) {
  if (dtype == ScalarType::Byte) return 1;
  return static_cast<size_t>(bytes_of(element_of("new_output", "dtype", dtype)));
}

Tensor empty_rows(Tensor like, int64_t num_rows, int64_t num_columns) {
  return new_output(like, {num_rows, num_columns});
}

}  // namespace

Tensor new_output(const Tensor& like, Sizes sizes, std::optional<ScalarType> dtype) {
  size_t num_bytes = dtype ? bytes_of(*dtype) : like.element_size();
  for (const int64_t size : sizes) num_bytes *= static_cast<size_t>(size);
  return device_of("new_output", like)->allocate(like, sizes, dtype.value_or(like.scalar_type()), num_bytes);
}

PYG_DIST_OPS(m) { m.impl("empty_rows", TORCH_BOX(&empty_rows)); }

}  // namespace pyg_dist
