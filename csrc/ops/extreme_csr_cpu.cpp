#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "kernels/row_chunks.h"
#include "kernels/table.h"
#include "ops/allocate.h"
#include "ops/csr.h"
#include "ops/parallel.h"

namespace pyg_dist {
namespace {

constexpr int64_t kWorkPerChunk = 1 << 18;  // as in spmm_csr

// All rows, in chunks of equal work. A hub is done whole by the thread that has its first edge.
void for_each_row(const ExtremeCsr& problem, int64_t num_rows,
                  void (*rows)(const ExtremeCsr& problem, int64_t begin, int64_t end)) {
  if (num_rows == 0 || problem.num_features == 0) return;
  const RowChunks chunks(problem.rowptr, num_rows,
                         std::clamp<int64_t>(kWorkPerChunk / problem.num_features, 256, 16384));
  for_each_chunk(chunks.size(), [&](int64_t k) {
    const RowChunks::Chunk chunk = chunks[k];
    if (chunk.row_begin < chunk.row_end) rows(problem, chunk.row_begin, chunk.row_end);
    if (chunk.tail.row >= 0) rows(problem, chunk.tail.row, chunk.tail.row + 1);
  });
}

void check_dense(const char* op, const char* name, const Tensor& tensor, int64_t num_rows, int64_t num_columns,
                 ScalarType dtype) {
  PYG_DIST_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == num_columns &&
                     tensor.is_contiguous() && tensor.scalar_type() == dtype,
                 op, ": expected '", name, "' to be a contiguous [", num_rows, ", ", num_columns, "] of ",
                 toString(dtype), ", got shape ", shape_of(tensor), ", dtype ", toString(tensor.scalar_type()));
}

ExtremeCsr problem_of(const char* op, const Tensor& rowptr, const Tensor& col, const Tensor& x) {
  check_csr(op, rowptr, col);
  check_rows(op, "x", x);
  return {
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .y = nullptr,
      .g = nullptr,
      .out = nullptr,
      .num_edges = col.size(0),
      .num_features = x.size(1),
      .x_stride = x.stride(0),
      .element = element_of(op, "x", x.scalar_type()),
      .largest = true,
  };
}

Tensor extreme_csr(Tensor rowptr, Tensor col, Tensor x, bool largest) {
  ExtremeCsr problem = problem_of("extreme_csr", rowptr, col, x);
  PYG_DIST_CHECK(x.size(0) > 0 || col.size(0) == 0, "extreme_csr: expected 'x' to have rows for ", col.size(0),
                 " edges, got none");
  const int64_t num_rows = rowptr.size(0) - 1;
  const Tensor y = in_huge_pages(torch::stable::new_empty(x, {num_rows, x.size(1)}));
  problem.out = y.mutable_data_ptr();
  problem.largest = largest;
  for_each_row(problem, num_rows, kernels().extreme_rows);
  return y;
}

Tensor extreme_csr_shares(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor grad) {
  const char* op = "extreme_csr_shares";
  ExtremeCsr problem = problem_of(op, rowptr, col, x);
  const int64_t num_rows = rowptr.size(0) - 1;
  check_dense(op, "y", y, num_rows, x.size(1), x.scalar_type());
  check_dense(op, "grad", grad, num_rows, x.size(1), x.scalar_type());
  const Tensor shares =
      in_huge_pages(torch::stable::new_empty(x, {num_rows, x.size(1)}, accumulator_dtype(problem.element)));
  problem.y = y.const_data_ptr();
  problem.g = grad.const_data_ptr();
  problem.out = shares.mutable_data_ptr();
  for_each_row(problem, num_rows, kernels().extreme_share_rows);
  return shares;
}

Tensor extreme_csr_grad(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor shares) {
  const char* op = "extreme_csr_grad";
  ExtremeCsr problem = problem_of(op, rowptr, col, x);
  PYG_DIST_CHECK(x.size(0) == rowptr.size(0) - 1, op, ": expected 'x' to have the ", rowptr.size(0) - 1,
                 " rows of the transposed pattern, got ", x.size(0));
  check_dense(op, "y", y, y.size(0), x.size(1), x.scalar_type());
  check_dense(op, "shares", shares, y.size(0), x.size(1), accumulator_dtype(problem.element));
  const Tensor grad = in_huge_pages(torch::stable::new_empty(x, {x.size(0), x.size(1)}));
  problem.y = y.const_data_ptr();
  problem.g = shares.const_data_ptr();
  problem.out = grad.mutable_data_ptr();
  for_each_row(problem, x.size(0), kernels().extreme_grad_rows);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("extreme_csr", TORCH_BOX(&extreme_csr));
  m.impl("extreme_csr_shares", TORCH_BOX(&extreme_csr_shares));
  m.impl("extreme_csr_grad", TORCH_BOX(&extreme_csr_grad));
}

}  // namespace pyg_dist
