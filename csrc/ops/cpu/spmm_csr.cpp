#include <algorithm>
#include <numeric>

#include "cpu/table.h"
#include "ops/allocate.h"
#include "ops/cpu/device.h"
#include "ops/cpu/hub_rows.h"
#include "ops/cpu/last_cache.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

// Some columns of a product: `work` is that of all, so that hubs are cut alike, and sums have the same bits.
template <class T>
void run_columns(const SpmmCsr& problem, int64_t work) {
  using A = accumulator_t<T>;
  const auto* row_scale = static_cast<const A*>(problem.row_scale);
  for_each_row_by_work<A>(
      problem.rowptr, problem.num_rows, problem.num_features, work,
      [&](int64_t begin, int64_t end) { kernels().spmm_rows(problem, begin, end); },
      [&](int64_t begin, int64_t end, A* sums) { sum_edges(problem, begin, end, sums); },
      [&](int64_t row, const A* sums) {
        write_hub(sums, problem.num_features, row_scale == nullptr ? A{1} : row_scale[row], problem.divide,
                  problem.accumulate, static_cast<T*>(problem.out) + row * problem.out_stride);
      });
}

// Columns by blocks of two or three cache lines, each copied out of x into a dense array before its edges go by. Rows
// of x are read once for each of their edges: a block of all of them stays in a cache that whole rows overflow, and
// dense, it uses every set of that cache. Each column's sum is the same as without blocks. Zen 4, one thread: 1.5 times
// as fast on 170k nodes, 2.3M edges, width 256; 2.2 times on 58k nodes, 14M edges, width 256.
//
// Rows of two or three lines are copied where that puts them into whole lines: 400k nodes, 12M edges, width 47, 188
// bytes: a row lies across 3.9 lines on average, and across three in the copy.
//
// A cache that holds all of x makes them a loss: a Xeon with 300 MB of third-level cache took 1.2 to 1.8 times as long.
struct ColumnBlocks {
  static constexpr int64_t kMinBlocks = 2;
  static constexpr int64_t kMinSourceBytes = 8 << 20;  // what fits a second-level cache or two needs no blocks
  static constexpr int64_t kMinReuse = 4;              // edges for each row copied and each row begun

  int64_t num_features, line, line_features, num_lines, size = 1;
  bool copies = false;
  SpmmForm guess = SpmmForm::any;  // any: there is one form

  ColumnBlocks(int64_t num_rows, int64_t num_edges, int64_t num_source_rows, int64_t columns, int64_t stride,
               int64_t element_bytes, SpmmForm form)
      : num_features(columns),
        line(line_bytes()),
        line_features(line / element_bytes),
        num_lines((num_features + line_features - 1) / line_features) {
    const int64_t source_bytes = num_source_rows * num_lines * line;
    const bool is_large = source_bytes >= kMinSourceBytes && num_edges >= kMinReuse * (num_rows + num_source_rows);
    const int64_t blocks = num_lines / 2 >= kMinBlocks ? num_lines / 2 : 1;
    if (!is_large ||
        (blocks == 1 && !is_smaller_in_whole_lines(num_features * element_bytes, stride * element_bytes))) {
      return;
    }
    guess = source_bytes > cache_bytes() ? SpmmForm::blocks : SpmmForm::plain;
    if ((form == SpmmForm::any ? guess : form) == SpmmForm::plain) return;
    size = blocks;
    copies = true;
  }
  int64_t begin(int64_t block) const { return std::min(block * num_lines / size * line_features, num_features); }
  int64_t widest() const { return (num_lines + size - 1) / size * line_features; }

 private:
  // Of the cache: 64 on most processors, 256 on an A64FX.
  static int64_t line_bytes() {
    static const int64_t bytes = [] {
#if defined(__aarch64__)
      uint64_t type;  // CTR_EL0: DminLine, log2 of the words in the shortest line of all data caches
      asm("mrs %0, ctr_el0" : "=r"(type));
      return std::clamp<int64_t>(int64_t{4} << (type >> 16 & 15), 64, 256);
#else
      return int64_t{64};
#endif
    }();
    return bytes;
  }

  static int64_t cache_bytes() {
    static const int64_t found = last_cache_bytes(), bytes = found > 0 ? found : int64_t{32} << 20;
    return bytes;
  }

  // Whether whole lines save a fifth of the lines that are met, and take at most an eighth more memory.
  bool is_smaller_in_whole_lines(int64_t row_bytes, int64_t stride_bytes) const {
    const int64_t step = std::gcd(stride_bytes, line);  // rows begin at multiples of it within a line, all alike often
    return 4 * (line + row_bytes - step) >= 5 * num_lines * line && 8 * num_lines * line <= 9 * row_bytes;
  }
};

// Copies elements, each divided by `divisor` unless that is null; rounded to T, as if a tensor of quotients came in.
template <class T>
void copy_divided(const T* from, int64_t count, const accumulator_t<T>* divisor, T* to) {
  if (divisor == nullptr) {
    std::copy_n(from, count, to);
  } else if constexpr (kIsNarrow<T>) {
    for (int64_t c = 0; c < count; ++c) to[c] = narrow<T>(widen(from[c]) / *divisor);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = from[c] / *divisor;
  }
}

// A row's divisor is met once per row of x, in the copy, and not once per edge: it needs a copy even without blocks.
template <class T>
void run(const SpmmCsr& problem, const Tensor& x, SpmmForm form) {
  const ColumnBlocks blocks(problem.num_rows, problem.num_edges, problem.num_source_rows, problem.num_features,
                            problem.x_stride, sizeof(T), form);
  const auto* divisor = problem.divide ? static_cast<const accumulator_t<T>*>(problem.col_scale) : nullptr;
  if (!blocks.copies && divisor == nullptr) {
    run_columns<T>(problem, chunk_work(problem.num_features));
    return;
  }
  constexpr int64_t kRowsPerChunk = 2048;
  const Tensor packed = new_output(x, {problem.num_source_rows, blocks.widest()});
  auto* to = static_cast<T*>(packed.mutable_data_ptr());
  for (int64_t block = 0; block < blocks.size; ++block) {
    const int64_t column = blocks.begin(block), width = blocks.begin(block + 1) - column;
    const T* from = static_cast<const T*>(problem.x) + column;
    for_each_range(problem.num_source_rows, kRowsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        copy_divided(from + row * problem.x_stride, width, divisor == nullptr ? nullptr : divisor + row,
                     to + row * blocks.widest());
      }
    });
    SpmmCsr columns = problem;
    columns.x = to;
    columns.x_stride = blocks.widest();
    if (divisor != nullptr) columns.col_scale = nullptr;
    columns.out = static_cast<T*>(problem.out) + column;
    columns.num_features = width;
    run_columns<T>(columns, chunk_work(problem.num_features));
  }
}

}  // namespace

SpmmForm spmm_csr_guess(int64_t num_rows, int64_t num_edges, const Tensor& x) {
  const auto element_bytes = static_cast<int64_t>(x.element_size());
  return ColumnBlocks(num_rows, num_edges, x.size(0), x.size(1), x.stride(0), element_bytes, SpmmForm::any).guess;
}

void spmm_csr(const SpmmCsr& problem, const Tensor& x, SpmmForm form) {
  return for_element(problem.x_element, [&]<class T>() { return run<T>(problem, x, form); });
}

}  // namespace pyg_dist::cpu
