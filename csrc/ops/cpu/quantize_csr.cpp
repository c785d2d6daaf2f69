#include <algorithm>
#include <atomic>
#include <memory>

#include "cpu/table.h"
#include "formats/packed_rows.h"
#include "ops/cpu/device.h"
#include "ops/cpu/hub_rows.h"

namespace pyg_dist::cpu {
namespace {

// Sums that wait in the first-level cache to be quantized.
constexpr int64_t kSumBytes = 1 << 14;

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

// A: what sums are kept in.
template <class A>
void quantize_sums(const QuantizeCsr& problem) {
  const SpmmCsr& sums = problem.sums;
  const int64_t n = sums.num_features, row_bytes = packed_row_bytes(n, problem.bits);
  std::atomic<int64_t> found{kAllFinite};
  const auto note = [&](int64_t bad) {
    if (bad == kAllFinite) return;
    int64_t first = found.load();
    while ((first == kAllFinite || bad < first) && !found.compare_exchange_weak(first, bad)) {
    }
  };
  for_each_row_by_work<A>(
      sums.rowptr, sums.num_rows, n, chunk_work(n),
      [&](int64_t begin, int64_t end) { note(quantize(problem, begin, end)); },
      [&](int64_t begin, int64_t end, A* hub) { sum_edges(sums, begin, end, hub); },
      [&](int64_t row, const A* hub) {
        const QuantizeRows one_row{
            .key = problem.key == nullptr ? nullptr : problem.key + row,
            .index = nullptr,
            .x = hub,
            .packed = problem.packed + row * row_bytes,
            .num_columns = n,
            .x_stride = n,
            .seed = problem.seed,
            .bits = problem.bits,
            .element = sums.out_element,
        };
        if (kernels().quantize_rows(one_row, 0, 1) != kAllFinite) note(row);
      });
  *problem.bad_row = found;
}

template <class T>
void dequantize(const DequantizeCsr& problem) {
  using A = accumulator_t<T>;
  const auto* row_scale = static_cast<const A*>(problem.row_scale);
  for_each_row_by_work<A>(
      problem.rowptr, problem.num_rows, problem.num_columns, chunk_work(problem.num_columns),
      [&](int64_t begin, int64_t end) { kernels().dequantize_add_rows(problem, begin, end); },
      [&](int64_t begin, int64_t end, A* sums) {
        const int64_t rowptr[] = {begin, end};
        DequantizeCsr one_row = problem;
        one_row.rowptr = rowptr;
        one_row.row_scale = nullptr;
        one_row.out = sums;
        one_row.element = accumulator_of(problem.element);
        std::fill_n(sums, problem.num_columns, A{0});
        kernels().dequantize_add_rows(one_row, 0, 1);
      },
      [&](int64_t row, const A* sums) {
        write_hub(sums, problem.num_columns, row_scale == nullptr ? A{1} : row_scale[row], false, true,
                  static_cast<T*>(problem.out) + row * problem.out_stride);
      });
}

}  // namespace

void quantize_csr(const QuantizeCsr& problem) {
  *problem.bad_row = kAllFinite;
  if (problem.sums.num_rows == 0 || problem.sums.num_features == 0) return;
  switch (problem.sums.out_element) {
    case Element::f64:
      return quantize_sums<double>(problem);
    default:
      return quantize_sums<float>(problem);
  }
}

void dequantize_csr_add(const DequantizeCsr& problem) {
  return for_element(problem.element, [&]<class T>() { return dequantize<T>(problem); });
}

}  // namespace pyg_dist::cpu
