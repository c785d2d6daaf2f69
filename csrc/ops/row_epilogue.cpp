#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "ops/allocate.h"
#include "ops/keyed.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

// Partial sums over rows of the backward pass: enough for load balance, and a number that no thread count changes.
constexpr int64_t kMaxRowGroups = 64, kElementsPerGroup = 1 << 15;

void check_rows_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_same_dtype(op, name, tensor, "x", x);
  PYG_DIST_CHECK(
      tensor.dim() == 2 && tensor.size(0) == x.size(0) && tensor.size(1) == x.size(1) && tensor.is_contiguous(), op,
      ": expected '", name, "' to be contiguous and shaped like 'x' ", shape_of(x), ", got shape ", shape_of(tensor));
}

RowEpilogue problem_of(const char* op, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                       const MaybeTensor& key, int64_t norm, bool relu, double p, int64_t seed, int64_t column_offset) {
  check_dense_rows(op, "x", x);
  PYG_DIST_CHECK(norm >= 0 && norm <= 2, op, ": expected 'norm' to be 0 (none), 1 (layer) or 2 (rms), got ", norm);
  PYG_DIST_CHECK(p >= 0 && p < 1, op, ": expected 'p' to lie in [0, 1), got ", p);
  const Element element = element_of(op, "x", x.scalar_type());
  RowEpilogue problem{
      .keyed = {.key = nullptr, .num_rows = x.size(0), .num_columns = x.size(1), .column_offset = 0, .seed = 0},
      .x = x.const_data_ptr(),
      .weight = vector_data(op, "weight", weight, element, x.size(1)),
      .bias = vector_data(op, "bias", bias, element, x.size(1)),
      .mean = nullptr,
      .rstd = nullptr,
      .y = nullptr,
      .eps = 0,
      .scale = 1 / (1 - p),
      .threshold = static_cast<uint32_t>(std::min(std::nearbyint(std::ldexp(p, 32)), 0x1p32 - 1)),
      .norm = static_cast<RowNorm>(norm),
      .relu = relu,
      .element = element,
  };
  if (key) {
    problem.keyed = keyed_of(op, *key, x.size(1), seed, column_offset);
    PYG_DIST_CHECK(key->size(0) == x.size(0), op, ": expected 'key' to have ", x.size(0),
                   " entries, one a row of 'x', got ", key->size(0));
  }
  return problem;
}

std::tuple<Tensor, Tensor, Tensor> row_epilogue(Tensor x, MaybeTensor weight, MaybeTensor bias, MaybeTensor key,
                                                int64_t norm, double eps, bool relu, double p, int64_t seed,
                                                int64_t column_offset) {
  const char* op = "row_epilogue";
  const auto device = device_of(op, x, weight, bias, key);
  RowEpilogue problem = problem_of(op, x, weight, bias, key, norm, relu, p, seed, column_offset);
  const ScalarType dtype = accumulator_dtype(problem.element);
  const Tensor y = new_output_like(x);
  const Tensor mean = torch::stable::new_zeros(x, {norm == 1 ? x.size(0) : 0}, dtype);  // zeros where F = 0
  const Tensor rstd = torch::stable::new_zeros(x, {norm != 0 ? x.size(0) : 0}, dtype);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  problem.y = y.mutable_data_ptr();
  problem.eps = eps;
  if (x.numel() > 0) device->row_epilogue(problem);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor> row_epilogue_grad(Tensor grad, Tensor x, Tensor mean, Tensor rstd, MaybeTensor weight,
                                             MaybeTensor bias, MaybeTensor key, int64_t norm, bool relu, double p,
                                             int64_t seed, int64_t column_offset) {
  const char* op = "row_epilogue_grad";
  const auto device = device_of(op, x, grad, mean, rstd, weight, bias, key);
  RowEpilogue problem = problem_of(op, x, weight, bias, key, norm, relu, p, seed, column_offset);
  const ScalarType dtype = accumulator_dtype(problem.element);
  check_rows_like(op, "grad", grad, x);
  check_vector(op, "mean", mean, dtype, norm == 1 ? x.size(0) : 0);
  check_vector(op, "rstd", rstd, dtype, norm != 0 ? x.size(0) : 0);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  const int64_t num_groups = std::clamp<int64_t>(x.numel() / kElementsPerGroup, 1, kMaxRowGroups);
  const Tensor grad_x = new_output_like(x);
  const Tensor sums = torch::stable::new_zeros(x, {num_groups, 3, x.size(1)}, dtype);
  if (x.numel() > 0) {
    device->row_epilogue_grad({
        .forward = problem,
        .grad = grad.const_data_ptr(),
        .grad_x = grad_x.mutable_data_ptr(),
        .sums = sums.mutable_data_ptr(),
        .num_groups = num_groups,
    });
  }
  return {grad_x, sums};
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("row_epilogue", TORCH_BOX(&row_epilogue));
  m.impl("row_epilogue_grad", TORCH_BOX(&row_epilogue_grad));
}

}  // namespace pyg_dist
