#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/row_chunks.h"
#include "kernels/cpu/table.h"
#include "ops/allocate.h"
#include "ops/cpu/parallel.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

constexpr int64_t kWorkPerChunk = 1 << 18;  // as in spmm_csr

enum class Pass { extreme, shares, grad };

// `width` columns of one row as a problem of its own, whose only row is 0.
ExtremeCsr columns_of_row(const ExtremeCsr& problem, Pass pass, int64_t row, int64_t column, int64_t width) {
  const int64_t element = problem.element == Element::f64 ? 8 : problem.element == Element::f32 ? 4 : 2;
  const int64_t accumulator = problem.element == Element::f64 ? 8 : 4;
  const auto at = [](const void* data, int64_t offset) {
    return data == nullptr ? nullptr : static_cast<const char*>(data) + offset;
  };
  const int64_t own = row * problem.num_features + column;
  const bool gathers_x = pass != Pass::grad;
  ExtremeCsr piece = problem;
  piece.rowptr += row;
  piece.num_features = width;
  piece.x = at(problem.x, (gathers_x ? column : row * problem.x_stride + column) * element);
  piece.y = at(problem.y, (gathers_x ? own : column) * element);
  piece.g = at(problem.g, gathers_x ? own * element : column * accumulator);
  piece.out = static_cast<char*>(problem.out) + own * (pass == Pass::shares ? accumulator : element);
  return piece;
}

// All rows, in chunks of equal work; hubs after that, by blocks of columns, which nobody has to put together.
void for_each_row(const ExtremeCsr& problem, Pass pass, int64_t num_rows,
                  void (*rows)(const ExtremeCsr& problem, int64_t begin, int64_t end)) {
  constexpr int64_t kHubColumns = 32;
  const int64_t num_columns = problem.num_features;
  if (num_rows == 0 || num_columns == 0) return;
  const RowChunks chunks(problem.rowptr, num_rows, std::clamp<int64_t>(kWorkPerChunk / num_columns, 256, 16384));
  std::vector<int64_t> hubs(static_cast<size_t>(chunks.size()), -1);
  for_each_chunk(chunks.size(), [&](int64_t k) {
    const RowChunks::Chunk chunk = chunks[k];
    if (chunk.row_begin < chunk.row_end) rows(problem, chunk.row_begin, chunk.row_end);
    hubs[static_cast<size_t>(k)] = chunk.tail.row;
  });
  std::erase(hubs, -1);
  if (hubs.empty()) return;
  const int64_t num_blocks = (num_columns + kHubColumns - 1) / kHubColumns;
  for_each_chunk(static_cast<int64_t>(hubs.size()) * num_blocks, [&](int64_t k) {
    const int64_t column = k % num_blocks * kHubColumns;
    const int64_t width = std::min(kHubColumns, num_columns - column);
    rows(columns_of_row(problem, pass, hubs[static_cast<size_t>(k / num_blocks)], column, width), 0, 1);
  });
}

void check_dense(const char* op, const char* name, const Tensor& tensor, int64_t num_rows, int64_t num_columns,
                 ScalarType dtype) {
  PYG_DIST_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == num_columns &&
                     tensor.is_contiguous() && tensor.scalar_type() == dtype,
                 op, ": expected '", name, "' to be a contiguous [", num_rows, ", ", num_columns, "] of ",
                 toString(dtype), ", got shape ", shape_of(tensor), ", dtype ", toString(tensor.scalar_type()));
}

// The tensor whose rows `col` names.
void check_gathered(const char* op, const char* name, const Tensor& tensor, const Tensor& col) {
  PYG_DIST_CHECK(tensor.size(0) > 0 || col.size(0) == 0, op, ": expected '", name, "' to have rows for ", col.size(0),
                 " edges, got none");
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
      .y_stride = x.size(1),
      .element = element_of(op, "x", x.scalar_type()),
      .largest = true,
  };
}

Tensor extreme_csr(Tensor rowptr, Tensor col, Tensor x, bool largest) {
  ExtremeCsr problem = problem_of("extreme_csr", rowptr, col, x);
  check_gathered("extreme_csr", "x", x, col);
  const int64_t num_rows = rowptr.size(0) - 1;
  const Tensor y = new_output(x, {num_rows, x.size(1)});
  problem.out = y.mutable_data_ptr();
  problem.largest = largest;
  for_each_row(problem, Pass::extreme, num_rows, kernels().extreme_rows);
  return y;
}

Tensor extreme_csr_shares(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor grad) {
  const char* op = "extreme_csr_shares";
  ExtremeCsr problem = problem_of(op, rowptr, col, x);
  check_gathered(op, "x", x, col);
  const int64_t num_rows = rowptr.size(0) - 1;
  check_dense(op, "y", y, num_rows, x.size(1), x.scalar_type());
  check_dense(op, "grad", grad, num_rows, x.size(1), x.scalar_type());
  const Tensor shares = new_output(x, {num_rows, x.size(1)}, accumulator_dtype(problem.element));
  problem.y = y.const_data_ptr();
  problem.g = grad.const_data_ptr();
  problem.out = shares.mutable_data_ptr();
  for_each_row(problem, Pass::shares, num_rows, kernels().extreme_share_rows);
  return shares;
}

Tensor extreme_csr_grad(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor shares) {
  const char* op = "extreme_csr_grad";
  ExtremeCsr problem = problem_of(op, rowptr, col, x);
  PYG_DIST_CHECK(x.size(0) == rowptr.size(0) - 1, op, ": expected 'x' to have the ", rowptr.size(0) - 1,
                 " rows of the transposed pattern, got ", x.size(0));
  PYG_DIST_CHECK(y.dim() == 2, op, ": expected 'y' to be two-dimensional, got shape ", shape_of(y));
  check_gathered(op, "y", y, col);
  check_dense(op, "y", y, y.size(0), x.size(1), x.scalar_type());
  check_dense(op, "shares", shares, y.size(0), x.size(1), accumulator_dtype(problem.element));
  const Tensor grad = new_output(x, {x.size(0), x.size(1)});
  problem.y = y.const_data_ptr();
  problem.g = shares.const_data_ptr();
  problem.out = grad.mutable_data_ptr();
  for_each_row(problem, Pass::grad, x.size(0), kernels().extreme_grad_rows);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("extreme_csr", TORCH_BOX(&extreme_csr));
  m.impl("extreme_csr_shares", TORCH_BOX(&extreme_csr_shares));
  m.impl("extreme_csr_grad", TORCH_BOX(&extreme_csr_grad));
}

}  // namespace pyg_dist
