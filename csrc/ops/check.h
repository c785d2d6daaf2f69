// What every op asks of its arguments. Errors are std::runtime_error in one line, "<op>: expected ..., got ...";
// pyg_dist/backend/ops/library.py turns them into the package's own type.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "formats/element.h"
#include "problems/csr_from_edges.h"

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

// A vector of int32 or int64.
inline Integers integers_of(const char* op, const char* name, const Tensor& tensor, int64_t size) {
  const bool is_wide = tensor.scalar_type() == ScalarType::Long;
  check_vector(op, name, tensor, is_wide ? ScalarType::Long : ScalarType::Int, size);
  return {tensor.const_data_ptr(), is_wide};
}

inline Element element_of(const char* op, const char* name, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Element::f32;
    case ScalarType::Double:
      return Element::f64;
    case ScalarType::BFloat16:
      return Element::bf16;
    case ScalarType::Half:
      return Element::f16;
    default:
      fail(op, ": expected '", name, "' to be float32, float64, bfloat16 or float16, got ", toString(dtype));
  }
}

// The dtype that sums of `element` are kept in.
inline ScalarType accumulator_dtype(Element element) {
  return element == Element::f64 ? ScalarType::Double : ScalarType::Float;
}

// The values of an optional vector in the sum dtype, or null.
inline const void* vector_data(const char* op, const char* name, const std::optional<Tensor>& vector, Element element,
                               int64_t size) {
  if (!vector) return nullptr;
  check_vector(op, name, *vector, accumulator_dtype(element), size);
  return vector->const_data_ptr();
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

// The bytes from the first element of `tensor` to its last.
inline std::pair<uintptr_t, uintptr_t> byte_range(const Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * static_cast<int64_t>(tensor.element_size()))};
}

// Whether both are slices of columns of one larger matrix, and different columns.
inline bool are_columns_apart(const Tensor& a, const Tensor& b) {
  if (a.dim() != 2 || b.dim() != 2 || a.stride(0) * a.element_size() != b.stride(0) * b.element_size()) return false;
  const auto row = static_cast<uintptr_t>(a.stride(0)) * a.element_size();
  if (row == 0) return false;
  const uintptr_t a_begin = byte_range(a).first, b_begin = byte_range(b).first;
  const uintptr_t from = (row + b_begin % row - a_begin % row) % row;  // of b's columns, counted from a's
  return from >= static_cast<uintptr_t>(a.size(1)) * a.element_size() &&
         from + static_cast<uintptr_t>(b.size(1)) * b.element_size() <= row;
}

// An op reads its inputs while it writes: they must not share memory with what is written.
inline void check_apart(const char* op, const char* name, const Tensor& written, const char* read_name,
                        const Tensor& read) {
  if (written.numel() == 0 || read.numel() == 0) return;
  const auto [begin, end] = byte_range(written);
  const auto [read_begin, read_end] = byte_range(read);
  PYG_DIST_CHECK(end <= read_begin || read_end <= begin || are_columns_apart(written, read), op, ": expected '", name,
                 "' to share no memory with '", read_name, "': pass another tensor or a clone");
}

inline void check_apart(const char* op, const char* name, const Tensor& written, const char* read_name,
                        const std::optional<Tensor>& read) {
  if (read) check_apart(op, name, written, read_name, *read);
}

inline void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const char* model_name,
                             const Tensor& model) {
  PYG_DIST_CHECK(tensor.scalar_type() == model.scalar_type(), op, ": expected '", name, "' to have the dtype of '",
                 model_name, "' (", toString(model.scalar_type()), "), got ", toString(tensor.scalar_type()));
}

}  // namespace pyg_dist
