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
constexpr int64_t kMaxRowGroups = 512, kElementsPerGroup = 1 << 15;

int64_t num_groups_of(const Tensor& x) { return std::clamp<int64_t>(x.numel() / kElementsPerGroup, 1, kMaxRowGroups); }

void check_rows_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_same_dtype(op, name, tensor, "x", x);
  PYG_DIST_CHECK(
      tensor.dim() == 2 && tensor.size(0) == x.size(0) && tensor.size(1) == x.size(1) && tensor.is_contiguous(), op,
      ": expected '", name, "' to be contiguous and shaped like 'x' ", shape_of(x), ", got shape ", shape_of(tensor));
}

NormReLUDropout problem_of(const char* op, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                           const MaybeTensor& key, int64_t norm, bool relu, double p, int64_t seed,
                           int64_t column_offset) {
  check_dense_rows(op, "x", x);
  PYG_DIST_CHECK(norm >= 0 && norm <= 2, op, ": expected 'norm' to be 0 (none), 1 (layer) or 2 (rms), got ", norm);
  PYG_DIST_CHECK(p >= 0 && p < 1, op, ": expected 'p' to lie in [0, 1), got ", p);
  const Element element = element_of(op, "x", x.scalar_type());
  NormReLUDropout problem{
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

void check_moments(const char* op, const NormReLUDropout& problem, const Tensor& mean, const Tensor& rstd) {
  const ScalarType dtype = accumulator_dtype(problem.element);
  const int64_t num_rows = problem.keyed.num_rows;
  check_vector(op, "mean", mean, dtype, problem.norm == RowNorm::layer ? num_rows : 0);
  check_vector(op, "rstd", rstd, dtype, problem.norm != RowNorm::none ? num_rows : 0);
}

std::tuple<Tensor, Tensor, Tensor> norm_relu_dropout(Tensor x, MaybeTensor weight, MaybeTensor bias, MaybeTensor key,
                                                     int64_t norm, double eps, bool relu, double p, int64_t seed,
                                                     int64_t column_offset) {
  const char* op = "norm_relu_dropout";
  const auto device = device_of(op, x, weight, bias, key);
  NormReLUDropout problem = problem_of(op, x, weight, bias, key, norm, relu, p, seed, column_offset);
  const ScalarType dtype = accumulator_dtype(problem.element);
  const Tensor y = new_output_like(x);
  const Tensor mean = torch::stable::new_zeros(x, {norm == 1 ? x.size(0) : 0}, dtype);  // zeros where F = 0
  const Tensor rstd = torch::stable::new_zeros(x, {norm != 0 ? x.size(0) : 0}, dtype);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  problem.y = y.mutable_data_ptr();
  problem.eps = eps;
  if (x.numel() > 0) device->norm_relu_dropout(problem);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_relu_dropout_grad(Tensor grad, Tensor x, Tensor mean, Tensor rstd,
                                                          MaybeTensor weight, MaybeTensor bias, MaybeTensor key,
                                                          int64_t norm, bool relu, double p, int64_t seed,
                                                          int64_t column_offset, bool is_part) {
  const char* op = "norm_relu_dropout_grad";
  const auto device = device_of(op, x, grad, mean, rstd, weight, bias, key);
  NormReLUDropout problem = problem_of(op, x, weight, bias, key, norm, relu, p, seed, column_offset);
  const ScalarType dtype = accumulator_dtype(problem.element);
  check_rows_like(op, "grad", grad, x);
  check_moments(op, problem, mean, rstd);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  const int64_t num_groups = num_groups_of(x);
  const Tensor grad_x = new_output_like(x);
  const Tensor sums = torch::stable::new_zeros(x, {num_groups, 3, x.size(1)}, dtype);
  const Tensor by_row = torch::stable::new_zeros(x, {is_part ? x.size(0) : 0, 2}, dtype);
  if (x.numel() > 0) {
    device->norm_relu_dropout_grad({
        .forward = problem,
        .grad = grad.const_data_ptr(),
        .grad_x = grad_x.mutable_data_ptr(),
        .sums = sums.mutable_data_ptr(),
        .num_groups = num_groups,
        .pass = is_part ? RowGrad::first : RowGrad::whole,
        .by_row = by_row.mutable_data_ptr(),
    });
  }
  return {grad_x, sums, by_row};
}

// The same in two passes, for rows whose other columns lie elsewhere.

std::tuple<Tensor, Tensor> row_moments(Tensor x, int64_t norm) {
  const char* op = "row_moments";
  const auto device = device_of(op, x);
  NormReLUDropout problem = problem_of(op, x, {}, {}, {}, norm, false, 0, 0, 0);
  const ScalarType dtype = accumulator_dtype(problem.element);
  const Tensor mean = torch::stable::new_zeros(x, {norm == 1 ? x.size(0) : 0}, dtype);  // zeros where F = 0
  const Tensor mean_square = torch::stable::new_zeros(x, {norm != 0 ? x.size(0) : 0}, dtype);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = mean_square.mutable_data_ptr();
  problem.moments = RowMoments::alone;
  if (x.numel() > 0 && norm != 0) device->norm_relu_dropout(problem);
  return {mean, mean_square};
}

Tensor norm_relu_dropout_of(Tensor x, Tensor mean, Tensor rstd, MaybeTensor weight, MaybeTensor bias, MaybeTensor key,
                            int64_t norm, bool relu, double p, int64_t seed, int64_t column_offset) {
  const char* op = "norm_relu_dropout_of";
  const auto device = device_of(op, x, mean, rstd, weight, bias, key);
  NormReLUDropout problem = problem_of(op, x, weight, bias, key, norm, relu, p, seed, column_offset);
  check_moments(op, problem, mean, rstd);
  const Tensor y = new_output_like(x);
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  problem.y = y.mutable_data_ptr();
  problem.moments = RowMoments::given;
  if (x.numel() > 0) device->norm_relu_dropout(problem);
  return y;
}

void row_norm_grad_(Tensor by_n, Tensor x, Tensor mean, Tensor rstd, Tensor by_row, int64_t norm) {
  const char* op = "row_norm_grad_";
  const auto device = device_of(op, x, by_n, mean, rstd, by_row);
  NormReLUDropout problem = problem_of(op, x, {}, {}, {}, norm, false, 0, 0, 0);
  check_rows_like(op, "by_n", by_n, x);
  check_moments(op, problem, mean, rstd);
  check_dense_rows(op, "by_row", by_row);
  check_shape(op, "by_row", by_row, x.size(0), 2);
  PYG_DIST_CHECK(by_row.scalar_type() == accumulator_dtype(problem.element), op,
                 ": expected 'by_row' in the dtype of sums of 'x'");
  problem.mean = mean.mutable_data_ptr();
  problem.rstd = rstd.mutable_data_ptr();
  if (x.numel() > 0) {
    device->norm_relu_dropout_grad({
        .forward = problem,
        .grad = nullptr,
        .grad_x = by_n.mutable_data_ptr(),
        .sums = nullptr,
        .num_groups = num_groups_of(x),
        .pass = RowGrad::second,
        .by_row = by_row.mutable_data_ptr(),
    });
  }
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("norm_relu_dropout", TORCH_BOX(&norm_relu_dropout));
  m.impl("norm_relu_dropout_grad", TORCH_BOX(&norm_relu_dropout_grad));
  m.impl("row_moments", TORCH_BOX(&row_moments));
  m.impl("norm_relu_dropout_of", TORCH_BOX(&norm_relu_dropout_of));
  m.impl("row_norm_grad_", TORCH_BOX(&row_norm_grad_));
}

}  // namespace pyg_dist
