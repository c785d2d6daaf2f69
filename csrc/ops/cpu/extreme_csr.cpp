#include <algorithm>
#include <vector>

#include "cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"
#include "problems/row_chunks.h"

namespace pyg_dist::cpu {
namespace {

constexpr int64_t kWorkPerChunk = 1 << 18;  // as in spmm_csr

enum class Pass { extreme, shares, grad };

// `width` columns of one row as a problem of its own, whose only row is 0.
ExtremeCsr columns_of_row(const ExtremeCsr& problem, Pass pass, int64_t row, int64_t column, int64_t width) {
  const int64_t element = bytes_of(problem.element), accumulator = bytes_of(accumulator_of(problem.element));
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
void for_each_row(const ExtremeCsr& problem, Pass pass,
                  void (*rows)(const ExtremeCsr& problem, int64_t begin, int64_t end)) {
  constexpr int64_t kHubColumns = 32;
  const int64_t num_columns = problem.num_features;
  const RowChunks chunks(problem.rowptr, problem.num_rows,
                         std::clamp<int64_t>(kWorkPerChunk / num_columns, 256, 16384));
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

}  // namespace

void extreme_csr(const ExtremeCsr& problem) { for_each_row(problem, Pass::extreme, kernels().extreme_rows); }

void extreme_csr_shares(const ExtremeCsr& problem) {
  for_each_row(problem, Pass::shares, kernels().extreme_share_rows);
}

void extreme_csr_grad(const ExtremeCsr& problem) { for_each_row(problem, Pass::grad, kernels().extreme_grad_rows); }

}  // namespace pyg_dist::cpu
