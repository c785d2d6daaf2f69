#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "formats/bfloat16.h"
#include "kernels/cpu/row_chunks.h"
#include "kernels/cpu/table.h"
#include "ops/allocate.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

// Edges per chunk: about 2^18 multiplications, 20 to 50 microseconds, are enough to hide the cost of taking a chunk and
// few enough to keep many threads busy. A function of the width alone, so that sums do not depend on the threads.
int64_t chunk_work(int64_t num_features) { return std::clamp<int64_t>((1 << 18) / num_features, 256, 16384); }

// The sums of one piece of a hub row, over its own edges alone.
template <class A>
struct PartialSums {
  int64_t row;
  std::unique_ptr<A[]> sums;
};

template <class A>
PartialSums<A> sum_piece(const SpmmCsr& problem, const RowChunks::Piece& piece) {
  PartialSums<A> partial{piece.row, std::make_unique_for_overwrite<A[]>(static_cast<size_t>(problem.num_features))};
  // The piece as a matrix of one row. Edge numbers, and so col and weight, stay those of the whole matrix.
  const int64_t rowptr[] = {piece.edge_begin, piece.edge_end};
  SpmmCsr one_row = problem;
  one_row.rowptr = rowptr;
  one_row.row_scale = nullptr;
  one_row.accumulate = false;
  one_row.out = partial.sums.get();
  one_row.out_element = accumulator_of(problem.x_element);
  kernels().spmm_rows(one_row, 0, 1);
  return partial;
}

template <class T>
void finish_hub(const SpmmCsr& problem, int64_t row, const accumulator_t<T>* sums) {
  using A = accumulator_t<T>;
  const A scale = problem.row_scale == nullptr ? A{1} : static_cast<const A*>(problem.row_scale)[row];
  T* out = static_cast<T*>(problem.out) + row * problem.out_stride;
  for (int64_t c = 0; c < problem.num_features; ++c) {
    const A sum = problem.divide ? sums[c] / scale : scale * sums[c];
    if constexpr (std::is_same_v<T, BFloat16>) {
      out[c] = narrow((problem.accumulate ? widen(out[c]) : A{0}) + sum);
    } else {
      out[c] = (problem.accumulate ? out[c] : A{0}) + sum;
    }
  }
}

template <class T>
void run_columns(const SpmmCsr& problem) {
  using A = accumulator_t<T>;
  const RowChunks chunks(problem.rowptr, problem.num_rows, chunk_work(problem.num_features));
  // Two slots a chunk, head and tail: a hub's pieces stand in consecutive filled slots, the first one in a tail.
  std::vector<PartialSums<A>> partials(static_cast<size_t>(2 * chunks.size()));
  for_each_chunk(chunks.size(), [&](int64_t k) {
    const RowChunks::Chunk chunk = chunks[k];
    const auto slot = static_cast<size_t>(2 * k);
    if (chunk.head.row >= 0) partials[slot] = sum_piece<A>(problem, chunk.head);
    if (chunk.row_begin < chunk.row_end) kernels().spmm_rows(problem, chunk.row_begin, chunk.row_end);
    if (chunk.tail.row >= 0) partials[slot + 1] = sum_piece<A>(problem, chunk.tail);
  });
  PartialSums<A>* hub = nullptr;
  const auto finish = [&] {
    if (hub != nullptr) finish_hub<T>(problem, hub->row, hub->sums.get());
  };
  for (PartialSums<A>& partial : partials) {
    if (partial.sums == nullptr) continue;
    if (hub != nullptr && hub->row == partial.row) {
      for (int64_t c = 0; c < problem.num_features; ++c) hub->sums[c] += partial.sums[c];
    } else {
      finish();
      hub = &partial;
    }
  }
  finish();
}

// Columns by blocks of two or three cache lines, each copied out of x into a dense array before its edges go by. Rows
// of x are read once for each of their edges: a block of all of them stays in a cache that whole rows overflow, and
// dense, it uses every set of that cache. Each column's sum is the same as without blocks. Zen 4, one thread: 1.5 times
// as fast on 170k nodes, 2.3M edges, width 256; 2.2 times on 58k nodes, 14M edges, width 256.
//
// Rows of two or three lines are copied where that puts them into whole lines: 400k nodes, 12M edges, width 47, 188
// bytes: a row lies across 3.9 lines on average, and across three in the copy.
struct ColumnBlocks {
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kMinBlocks = 2;
  static constexpr int64_t kMinSourceBytes = 8 << 20;  // what fits a second-level cache or two needs no blocks
  static constexpr int64_t kMinReuse = 4;              // edges for each row copied and each row begun

  int64_t num_features, line_features, num_lines, size;
  bool copies;

  ColumnBlocks(const SpmmCsr& problem, int64_t element_bytes)
      : num_features(problem.num_features),
        line_features(kLine / element_bytes),
        num_lines((num_features + line_features - 1) / line_features) {
    const bool pay = problem.num_source_rows * num_lines * kLine >= kMinSourceBytes &&
                     problem.num_edges >= kMinReuse * (problem.num_rows + problem.num_source_rows);
    size = pay && num_lines / 2 >= kMinBlocks ? num_lines / 2 : 1;
    copies =
        size > 1 || (pay && is_smaller_in_whole_lines(num_features * element_bytes, problem.x_stride * element_bytes));
  }
  int64_t begin(int64_t block) const { return std::min(block * num_lines / size * line_features, num_features); }
  int64_t widest() const { return (num_lines + size - 1) / size * line_features; }

 private:
  // Whether whole lines save a fifth of the lines that are met, and take at most an eighth more memory.
  bool is_smaller_in_whole_lines(int64_t row_bytes, int64_t stride_bytes) const {
    const int64_t step = std::gcd(stride_bytes, kLine);  // rows begin at multiples of it within a line, all alike often
    return 4 * (kLine + row_bytes - step) >= 5 * num_lines * kLine && 8 * num_lines * kLine <= 9 * row_bytes;
  }
};

// Copies elements, each divided by `divisor` unless that is null; rounded to T, as if a tensor of quotients came in.
template <class T>
void copy_divided(const T* from, int64_t count, const accumulator_t<T>* divisor, T* to) {
  if (divisor == nullptr) {
    std::copy_n(from, count, to);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t c = 0; c < count; ++c) to[c] = narrow(widen(from[c]) / *divisor);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = from[c] / *divisor;
  }
}

// A row's divisor is met once per row of x, in the copy, and not once per edge: it needs a copy even without blocks.
template <class T>
void run(const SpmmCsr& problem, const Tensor& x) {
  const ColumnBlocks blocks(problem, sizeof(T));
  const auto* divisor = problem.divide ? static_cast<const accumulator_t<T>*>(problem.col_scale) : nullptr;
  if (!blocks.copies && divisor == nullptr) {
    run_columns<T>(problem);
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
    run_columns<T>(columns);
  }
}

}  // namespace

void spmm_csr(const SpmmCsr& problem, const Tensor& x) {
  switch (problem.x_element) {
    case Element::f32:
      return run<float>(problem, x);
    case Element::f64:
      return run<double>(problem, x);
    case Element::bf16:
      return run<BFloat16>(problem, x);
  }
}

}  // namespace pyg_dist::cpu
