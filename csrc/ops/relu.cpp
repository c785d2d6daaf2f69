#include <tuple>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

int64_t num_bytes(int64_t num_bits) { return (num_bits + 7) / 8; }

void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  PYG_DIST_CHECK(tensor.is_contiguous(), op, ": expected '", name, "' to be contiguous, got shape ", shape_of(tensor),
                 " with gaps");
}

std::tuple<Tensor, Tensor> relu(Tensor x, bool keeps_mask) {
  const auto device = device_of("relu", x);
  check_contiguous("relu", "x", x);
  const Element element = element_of("relu", "x", x.scalar_type());
  const Tensor y = new_output_like(x);
  const Tensor passed = new_output(x, {keeps_mask ? num_bytes(x.numel()) : 0}, ScalarType::Byte);
  device->relu({
      .x = x.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .passed = keeps_mask ? static_cast<uint8_t*>(passed.mutable_data_ptr()) : nullptr,
      .num_elements = x.numel(),
      .element = element,
  });
  return {y, passed};
}

Tensor relu_grad(Tensor grad, Tensor passed) {
  const auto device = device_of("relu_grad", grad, passed);
  check_contiguous("relu_grad", "grad", grad);
  check_vector("relu_grad", "passed", passed, ScalarType::Byte, num_bytes(grad.numel()));
  const Element element = element_of("relu_grad", "grad", grad.scalar_type());
  const Tensor grad_x = new_output_like(grad);
  device->relu_grad({
      .grad = grad.const_data_ptr(),
      .passed = static_cast<const uint8_t*>(passed.const_data_ptr()),
      .grad_x = grad_x.mutable_data_ptr(),
      .num_elements = grad.numel(),
      .element = element,
  });
  return grad_x;
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_grad", TORCH_BOX(&relu_grad));
}

}  // namespace pyg_dist
