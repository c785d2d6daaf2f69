#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "formats/bfloat16.h"
#include "kernels/cpu/row_chunks.h"
#include "kernels/cpu/table.h"
#include "ops/allocate.h"
#include "ops/cpu/parallel.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

using MaybeTensor = std::optional<Tensor>;

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
  one_row.out_element = problem.x_element == Element::f64 ? Element::f64 : Element::f32;
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
void run_columns(const SpmmCsr& problem, int64_t num_rows) {
  using A = accumulator_t<T>;
  const RowChunks chunks(problem.rowptr, num_rows, chunk_work(problem.num_features));
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

  ColumnBlocks(int64_t num_features, int64_t element_bytes, int64_t stride, int64_t num_rows, int64_t num_source_rows,
               int64_t num_edges)
      : num_features(num_features),
        line_features(kLine / element_bytes),
        num_lines((num_features + line_features - 1) / line_features) {
    const bool pay =
        num_source_rows * num_lines * kLine >= kMinSourceBytes && num_edges >= kMinReuse * (num_rows + num_source_rows);
    size = pay && num_lines / 2 >= kMinBlocks ? num_lines / 2 : 1;
    copies = size > 1 || (pay && is_smaller_in_whole_lines(num_features * element_bytes, stride * element_bytes));
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
void run(const SpmmCsr& problem, int64_t num_rows, const Tensor& x, const void* col_divisor) {
  const ColumnBlocks blocks(problem.num_features, sizeof(T), problem.x_stride, num_rows, x.size(0), problem.num_edges);
  if (!blocks.copies && col_divisor == nullptr) {
    run_columns<T>(problem, num_rows);
    return;
  }
  constexpr int64_t kRowsPerChunk = 2048;
  const auto* divisor = static_cast<const accumulator_t<T>*>(col_divisor);
  const Tensor packed = new_output(x, {x.size(0), blocks.widest()});
  auto* to = static_cast<T*>(packed.mutable_data_ptr());
  for (int64_t block = 0; block < blocks.size; ++block) {
    const int64_t column = blocks.begin(block), width = blocks.begin(block + 1) - column;
    const T* from = static_cast<const T*>(problem.x) + column;
    for_each_range(x.size(0), kRowsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        copy_divided(from + row * problem.x_stride, width, divisor == nullptr ? nullptr : divisor + row,
                     to + row * blocks.widest());
      }
    });
    SpmmCsr columns = problem;
    columns.x = to;
    columns.x_stride = blocks.widest();
    columns.out = static_cast<T*>(problem.out) + column;
    columns.num_features = width;
    run_columns<T>(columns, num_rows);
  }
}

void multiply(const Tensor& out, bool accumulate, const Tensor& rowptr, const Tensor& col, const Tensor& x,
              const MaybeTensor& weight, const MaybeTensor& row_scale, const MaybeTensor& col_scale, bool divide) {
  const Element element = element_of("spmm_csr", "x", x.scalar_type());
  const int64_t num_rows = rowptr.size(0) - 1;
  const void* of_columns = vector_data("spmm_csr", "col_scale", col_scale, element, x.size(0));
  const SpmmCsr problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .weight = vector_data("spmm_csr", "weight", weight, element, col.size(0)),
      .row_scale = vector_data("spmm_csr", "row_scale", row_scale, element, num_rows),
      .col_scale = divide ? nullptr : of_columns,
      .out = out.mutable_data_ptr(),
      .num_edges = col.size(0),
      .num_features = x.size(1),
      .x_stride = x.stride(0),
      .out_stride = out.stride(0),
      .x_element = element,
      .out_element = element,
      .accumulate = accumulate,
      .divide = divide,
  };
  const void* col_divisor = divide ? of_columns : nullptr;
  if (num_rows == 0 || problem.num_features == 0) return;
  switch (element) {
    case Element::f32:
      return run<float>(problem, num_rows, x, col_divisor);
    case Element::f64:
      return run<double>(problem, num_rows, x, col_divisor);
    case Element::bf16:
      return run<BFloat16>(problem, num_rows, x, col_divisor);
  }
}

void check(const Tensor& rowptr, const Tensor& col, const Tensor& x) {
  check_csr("spmm_csr", rowptr, col);
  check_rows("spmm_csr", "x", x);
  PYG_DIST_CHECK(x.size(0) > 0 || col.size(0) == 0, "spmm_csr: expected 'x' to have rows for ", col.size(0),
                 " edges, got none");
}

Tensor spmm_csr(Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale, MaybeTensor col_scale,
                bool divide) {
  check(rowptr, col, x);
  const Tensor out = new_output(x, {rowptr.size(0) - 1, x.size(1)});
  multiply(out, false, rowptr, col, x, weight, row_scale, col_scale, divide);
  return out;
}

void check_out(const Tensor& out, const Tensor& rowptr, const Tensor& col, const Tensor& x, const MaybeTensor& weight,
               const MaybeTensor& row_scale, const MaybeTensor& col_scale) {
  check(rowptr, col, x);
  check_written_rows("spmm_csr", "out", out);
  check_same_dtype("spmm_csr", "out", out, "x", x);
  PYG_DIST_CHECK(out.size(0) == rowptr.size(0) - 1 && out.size(1) == x.size(1),
                 "spmm_csr: expected 'out' to have shape [", rowptr.size(0) - 1, ", ", x.size(1), "], got ",
                 shape_of(out));
  check_apart("spmm_csr", "out", out, "rowptr", rowptr);
  check_apart("spmm_csr", "out", out, "col", col);
  check_apart("spmm_csr", "out", out, "x", x);
  check_apart("spmm_csr", "out", out, "weight", weight);
  check_apart("spmm_csr", "out", out, "row_scale", row_scale);
  check_apart("spmm_csr", "out", out, "col_scale", col_scale);
}

void spmm_csr_into(Tensor out, Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale,
                   MaybeTensor col_scale, bool divide) {
  check_out(out, rowptr, col, x, weight, row_scale, col_scale);
  multiply(out, false, rowptr, col, x, weight, row_scale, col_scale, divide);
}

void spmm_csr_add(Tensor out, Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale,
                  MaybeTensor col_scale, bool divide) {
  check_out(out, rowptr, col, x, weight, row_scale, col_scale);
  multiply(out, true, rowptr, col, x, weight, row_scale, col_scale, divide);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("spmm_csr", TORCH_BOX(&spmm_csr));
  m.impl("spmm_csr_into", TORCH_BOX(&spmm_csr_into));
  m.impl("spmm_csr_add", TORCH_BOX(&spmm_csr_add));
}

}  // namespace pyg_dist
