#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "kernels/bfloat16.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/parallel.h"

namespace pyg_dist {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 16;

template <class T>
bool is_positive_or_nan(T value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return !(widen(value) <= 0);
  } else {
    return !(value <= 0);
  }
}

// Memory sets the pace: plain loops, which compilers turn into vectors of the baseline, are as fast as wider ones.
template <class T>
void forward(const Tensor& x, const Tensor& y, const Tensor& passed) {
  const auto* from = static_cast<const T*>(x.const_data_ptr());
  auto* to = static_cast<T*>(y.mutable_data_ptr());
  auto* mask = passed.numel() == 0 ? nullptr : static_cast<uint8_t*>(passed.mutable_data_ptr());
  for_each_range(x.numel(), kElementsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = is_positive_or_nan(from[i]) ? from[i] : T{};
    if (mask == nullptr) return;
    for (int64_t i = begin; i < end; ++i) mask[i] = is_positive_or_nan(from[i]);
  });
}

template <class T>
void backward(const Tensor& grad, const Tensor& passed, const Tensor& out) {
  const auto* from = static_cast<const T*>(grad.const_data_ptr());
  const auto* mask = static_cast<const uint8_t*>(passed.const_data_ptr());
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  for_each_range(grad.numel(), kElementsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = mask[i] != 0 ? from[i] : T{};
  });
}

void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  PYG_DIST_CHECK(tensor.is_contiguous(), op, ": expected '", name, "' to be contiguous, got shape ", shape_of(tensor),
                 " with gaps");
}

std::tuple<Tensor, Tensor> relu(Tensor x, bool keeps_mask) {
  check_contiguous("relu", "x", x);
  const Element element = element_of("relu", "x", x.scalar_type());
  const Tensor y = new_output_like(x);
  const Tensor passed = new_output(x, {keeps_mask ? x.numel() : 0}, ScalarType::Byte);
  switch (element) {
    case Element::f32:
      forward<float>(x, y, passed);
      break;
    case Element::f64:
      forward<double>(x, y, passed);
      break;
    case Element::bf16:
      forward<BFloat16>(x, y, passed);
      break;
  }
  return {y, passed};
}

Tensor relu_grad(Tensor grad, Tensor passed) {
  check_contiguous("relu_grad", "grad", grad);
  check_vector("relu_grad", "passed", passed, ScalarType::Byte, grad.numel());
  const Element element = element_of("relu_grad", "grad", grad.scalar_type());
  const Tensor out = new_output_like(grad);
  switch (element) {
    case Element::f32:
      backward<float>(grad, passed, out);
      break;
    case Element::f64:
      backward<double>(grad, passed, out);
      break;
    case Element::bf16:
      backward<BFloat16>(grad, passed, out);
      break;
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_grad", TORCH_BOX(&relu_grad));
}

}  // namespace pyg_dist
