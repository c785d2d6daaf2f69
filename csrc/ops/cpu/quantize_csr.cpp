#include <algorithm>
#include <atomic>
#include <memory>

#include "formats/packed_rows.h"
#include "kernels/cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

// Values read per chunk of rows, as for spmm_csr.
constexpr int64_t kValuesPerChunk = 1 << 18;

// Sums that wait in the first-level cache to be quantized.
constexpr int64_t kSumBytes = 1 << 14;

int64_t rows_per_chunk(int64_t num_rows, int64_t num_edges, int64_t num_columns) {
  const int64_t values_per_row = (num_edges / std::max<int64_t>(num_rows, 1) + 1) * std::max<int64_t>(num_columns, 1);
  return std::max<int64_t>(kValuesPerChunk / values_per_row, 1);
}

// Rows [row_begin, row_end): those that are a row of x as it is are quantized where they lie, the others are summed
// into a small buffer and quantized there. Each kind comes in long runs.
int64_t quantize(const QuantizeCsr& problem, int64_t row_begin, int64_t row_end) {
  const SpmmCsr& sums = problem.sums;
  const int64_t n = sums.num_features, row_bytes = packed_row_bytes(n, problem.bits);
  const bool has_factors = sums.weight != nullptr || sums.col_scale != nullptr;
  const auto is_sum = [&](int64_t row) { return has_factors || sums.rowptr[row + 1] - sums.rowptr[row] != 1; };
  const int64_t sum_bytes = bytes_of(sums.out_element);
  const int64_t sums_at_once = std::max<int64_t>(kSumBytes / (n * sum_bytes), 1);
  std::unique_ptr<char[]> buffer;
  int64_t first_bad = kAllFinite;
  for (int64_t begin = row_begin, end = row_begin; begin < row_end; begin = end) {
    const bool summed = is_sum(begin);
    const int64_t limit = summed ? std::min(begin + sums_at_once, row_end) : row_end;
    while (end < limit && is_sum(end) == summed) ++end;
    QuantizeRows run{
        .key = problem.key == nullptr ? nullptr : problem.key + begin,
        .index = nullptr,
        .x = sums.x,
        .packed = problem.packed + begin * row_bytes,
        .num_columns = n,
        .x_stride = sums.x_stride,
        .seed = problem.seed,
        .bits = problem.bits,
        .element = sums.x_element,
    };
    if (summed) {
      if (buffer == nullptr) {
        buffer = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(sums_at_once * n * sum_bytes));
      }
      SpmmCsr block = sums;
      block.rowptr = sums.rowptr + begin;
      block.out = buffer.get();
      kernels().spmm_rows(block, 0, end - begin);
      run.x = buffer.get();
      run.x_stride = n;
      run.element = sums.out_element;
    } else {
      run.index = sums.col + sums.rowptr[begin];
    }
    const int64_t bad = kernels().quantize_rows(run, 0, end - begin);
    if (bad != kAllFinite && first_bad == kAllFinite) first_bad = begin + bad;
  }
  return first_bad;
}

}  // namespace

void quantize_csr(const QuantizeCsr& problem) {
  const SpmmCsr& sums = problem.sums;
  *problem.bad_row = kAllFinite;
  if (sums.num_rows == 0 || sums.num_features == 0) return;
  std::atomic<int64_t> found{kAllFinite};
  for_each_range(sums.num_rows, rows_per_chunk(sums.num_rows, sums.num_edges, sums.num_features),
                 [&](int64_t begin, int64_t end) {
                   const int64_t bad = quantize(problem, begin, end);
                   if (bad == kAllFinite) return;
                   int64_t first = found.load();
                   while ((first == kAllFinite || bad < first) && !found.compare_exchange_weak(first, bad)) {
                   }
                 });
  *problem.bad_row = found;
}

void dequantize_csr_add(const DequantizeCsr& problem) {
  for_each_range(problem.num_rows, rows_per_chunk(problem.num_rows, problem.num_edges, problem.num_columns),
                 [&](int64_t begin, int64_t end) { kernels().dequantize_add_rows(problem, begin, end); });
}

}  // namespace pyg_dist::cpu
