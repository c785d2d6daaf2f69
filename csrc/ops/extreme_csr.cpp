#include "ops/allocate.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

void check_dense(const char* op, const char* name, const Tensor& tensor, int64_t num_rows, int64_t num_columns,
                 ScalarType dtype) {
  PYG_DIST_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == num_columns &&
                     tensor.is_contiguous() && tensor.scalar_type() == dtype,
                 op, ": expected '", name, "' to be a contiguous [", num_rows, ", ", num_columns, "] of ",
                 toString(dtype), ", got shape ", shape_of(tensor), ", dtype ", toString(tensor.scalar_type()));
}

ExtremeCsr problem_of(const char* op, const OnDevice& device, const Tensor& rowptr, const Tensor& col,
                      const Tensor& x) {
  check_csr(op, device, rowptr, col);
  check_rows(op, "x", x);
  return {
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .y = nullptr,
      .g = nullptr,
      .out = nullptr,
      .num_rows = rowptr.size(0) - 1,
      .num_edges = col.size(0),
      .num_features = x.size(1),
      .x_stride = x.stride(0),
      .y_stride = x.size(1),
      .element = element_of(op, "x", x.scalar_type()),
      .largest = true,
  };
}

bool is_empty(const ExtremeCsr& problem) { return problem.num_rows == 0 || problem.num_features == 0; }

Tensor extreme_csr(Tensor rowptr, Tensor col, Tensor x, bool largest) {
  const char* op = "extreme_csr";
  const auto device = device_of(op, x, rowptr, col);
  ExtremeCsr problem = problem_of(op, device, rowptr, col, x);
  check_gathered(op, "x", x, col);
  const Tensor y = new_output(x, {problem.num_rows, x.size(1)});
  problem.out = y.mutable_data_ptr();
  problem.largest = largest;
  if (!is_empty(problem)) device->extreme_csr(problem);
  return y;
}

Tensor extreme_csr_shares(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor grad) {
  const char* op = "extreme_csr_shares";
  const auto device = device_of(op, x, rowptr, col, y, grad);
  ExtremeCsr problem = problem_of(op, device, rowptr, col, x);
  check_gathered(op, "x", x, col);
  check_dense(op, "y", y, problem.num_rows, x.size(1), x.scalar_type());
  check_dense(op, "grad", grad, problem.num_rows, x.size(1), x.scalar_type());
  const Tensor shares = new_output(x, {problem.num_rows, x.size(1)}, accumulator_dtype(problem.element));
  problem.y = y.const_data_ptr();
  problem.g = grad.const_data_ptr();
  problem.out = shares.mutable_data_ptr();
  if (!is_empty(problem)) device->extreme_csr_shares(problem);
  return shares;
}

Tensor extreme_csr_grad(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor shares) {
  const char* op = "extreme_csr_grad";
  const auto device = device_of(op, x, rowptr, col, y, shares);
  ExtremeCsr problem = problem_of(op, device, rowptr, col, x);
  PYG_DIST_CHECK(x.size(0) == problem.num_rows, op, ": expected 'x' to have the ", problem.num_rows,
                 " rows of the transposed pattern, got ", x.size(0));
  PYG_DIST_CHECK(y.dim() == 2, op, ": expected 'y' to be two-dimensional, got shape ", shape_of(y));
  check_gathered(op, "y", y, col);
  check_dense(op, "y", y, y.size(0), x.size(1), x.scalar_type());
  check_dense(op, "shares", shares, y.size(0), x.size(1), accumulator_dtype(problem.element));
  const Tensor grad = new_output(x, {x.size(0), x.size(1)});
  problem.y = y.const_data_ptr();
  problem.g = shares.const_data_ptr();
  problem.out = grad.mutable_data_ptr();
  if (!is_empty(problem)) device->extreme_csr_grad(problem);
  return grad;
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("extreme_csr", TORCH_BOX(&extreme_csr));
  m.impl("extreme_csr_shares", TORCH_BOX(&extreme_csr_shares));
  m.impl("extreme_csr_grad", TORCH_BOX(&extreme_csr_grad));
}

}  // namespace pyg_dist
