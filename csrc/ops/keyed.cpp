#include "ops/keyed.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/table.h"
#include "kernels/keyed_normal.h"
#include "ops/allocate.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 15;

template <class Problem>
void for_each_row(const Problem& problem, int64_t num_rows, void (*rows)(const Problem&, int64_t, int64_t)) {
  const int64_t num_columns = problem.keyed.num_columns;
  if (num_rows == 0 || num_columns == 0) return;
  for_each_range(num_rows, kElementsPerChunk / num_columns,
                 [&](int64_t begin, int64_t end) { rows(problem, begin, end); });
}

Tensor keyed_dropout(Tensor x, Tensor key, double p, int64_t seed, int64_t column_offset) {
  PYG_DIST_CHECK(x.dim() == 2 && x.is_contiguous(),
                 "keyed_dropout: expected 'x' to be two-dimensional and contiguous, got shape ", shape_of(x));
  PYG_DIST_CHECK(key.numel() == x.size(0), "keyed_dropout: expected 'key' to have ", x.size(0),
                 " entries, one a row of 'x', got ", key.numel());
  PYG_DIST_CHECK(p >= 0 && p <= 1, "keyed_dropout: expected 'p' to lie in [0, 1], got ", p);
  const Keyed keyed = keyed_of("keyed_dropout", key, x.size(1), seed, column_offset);
  const Element element = element_of("keyed_dropout", "x", x.scalar_type());
  const double threshold = std::nearbyint(std::ldexp(p, 32));
  if (threshold >= 0x1p32) return torch::stable::new_zeros(x, x.sizes());
  const Tensor y = new_output_like(x);
  const KeyedDropout problem{
      .keyed = keyed,
      .x = x.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .threshold = static_cast<uint32_t>(threshold),
      .scale = 1 / (1 - p),
      .element = element,
  };
  for_each_row(problem, x.size(0), kernels().dropout_rows);
  return y;
}

Tensor keyed_uniform(Tensor key, int64_t num_columns, int64_t seed, int64_t column_offset, ScalarType dtype) {
  const Keyed keyed = keyed_of("keyed_uniform", key, num_columns, seed, column_offset);
  const Element element = element_of("keyed_uniform", "dtype", dtype);
  const Tensor y = new_output(key, {key.size(0), num_columns}, dtype);
  for_each_row(KeyedUniform{keyed, y.mutable_data_ptr(), element}, key.size(0), kernels().uniform_rows);
  return y;
}

Tensor keyed_normal(Tensor key, int64_t num_columns, int64_t seed, int64_t column_offset, ScalarType dtype) {
  const Keyed keyed = keyed_of("keyed_normal", key, num_columns, seed, column_offset);
  const Element element = element_of("keyed_normal", "dtype", dtype);
  const Tensor y = new_output(key, {key.size(0), num_columns}, dtype);
  for_each_row(KeyedNormal{keyed, y.mutable_data_ptr(), element}, key.size(0), normal_rows);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("keyed_dropout", TORCH_BOX(&keyed_dropout));
  m.impl("keyed_uniform", TORCH_BOX(&keyed_uniform));
  m.impl("keyed_normal", TORCH_BOX(&keyed_normal));
}

}  // namespace pyg_dist
