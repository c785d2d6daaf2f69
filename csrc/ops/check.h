// What every op asks of its arguments. Errors are std::runtime_error in one line, "<op>: expected ..., got ...";
// pyg_dist/backend/ops/call.py turns them into the package's own type.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/element.h"

namespace pyg_dist {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The message is put together only when the condition fails.
#define PYG_DIST_CHECK(condition, ...) \
  if (!(condition)) [[unlikely]]       \
  pyg_dist::fail(__VA_ARGS__)

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream line;
  (line << ... << parts);
  throw std::runtime_error(line.str());
}

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
  }
  return text + "]";
}

inline void check_vector(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  PYG_DIST_CHECK(tensor.dim() == 1 && tensor.scalar_type() == dtype && tensor.is_contiguous(), op, ": expected '", name,
                 "' to be a contiguous vector of dtype ", toString(dtype), ", got shape ", shape_of(tensor), ", dtype ",
                 toString(tensor.scalar_type()), tensor.is_contiguous() ? "" : ", not contiguous");
}

inline void check_vector(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int64_t size) {
  check_vector(op, name, tensor, dtype);
  PYG_DIST_CHECK(tensor.size(0) == size, op, ": expected '", name, "' to have ", size, " entries, got ",
                 tensor.size(0));
}

// Two dimensions, each row without gaps; the rows may be apart, as in a slice of columns.
inline void check_rows(const char* op, const char* name, const Tensor& tensor) {
  PYG_DIST_CHECK(tensor.dim() == 2, op, ": expected '", name, "' to be two-dimensional, got shape ", shape_of(tensor));
  // Nothing is read where there are no rows, and torch gives such tensors any strides.
  PYG_DIST_CHECK(tensor.size(0) == 0 || tensor.size(1) <= 1 || tensor.stride(1) == 1, op, ": expected the rows of '",
                 name, "' to be contiguous, got strides [", tensor.stride(0), ", ", tensor.stride(1),
                 "]; call .contiguous() first");
}

// As check_rows, for a tensor that is written: no two of its elements may share memory.
inline void check_written_rows(const char* op, const char* name, const Tensor& tensor) {
  check_rows(op, name, tensor);
  PYG_DIST_CHECK(tensor.size(0) <= 1 || tensor.stride(0) >= tensor.size(1), op, ": expected the rows of '", name,
                 "' not to overlap, got strides [", tensor.stride(0), ", ", tensor.stride(1), "]");
}

inline void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const char* model_name,
                             const Tensor& model) {
  PYG_DIST_CHECK(tensor.scalar_type() == model.scalar_type(), op, ": expected '", name, "' to have the dtype of '",
                 model_name, "' (", toString(model.scalar_type()), "), got ", toString(tensor.scalar_type()));
}

inline Element element_of(const char* op, const char* name, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Element::f32;
    case ScalarType::Double:
      return Element::f64;
    case ScalarType::BFloat16:
      return Element::bf16;
    default:
      fail(op, ": expected '", name, "' to be float32, float64 or bfloat16, got ", toString(dtype));
  }
}

// The dtype that sums of `element` are kept in.
inline ScalarType accumulator_dtype(Element element) {
  return element == Element::f64 ? ScalarType::Double : ScalarType::Float;
}

}  // namespace pyg_dist
