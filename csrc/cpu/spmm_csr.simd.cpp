#include <utility>

#include "cpu/table.h"
#include "cpu/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

// `width` columns of the rows, in V vectors of L lanes that stay in registers while a row's edges go by. The last
// vector is moved left to end at the last column, so that no mask is needed; columns that two vectors cover are
// computed twice, alike.
template <class X, class Out, int L, int V, bool kWeight, bool kColScale>
void rows_of_width(const SpmmCsr& p, int64_t row_begin, int64_t row_end, int64_t column, int64_t width) {
  using A = accumulator_t<X>;
  const auto* x = static_cast<const X*>(p.x) + column;
  const auto* weight = static_cast<const A*>(p.weight);
  const auto* row_scale = static_cast<const A*>(p.row_scale);
  const auto* col_scale = static_cast<const A*>(p.col_scale);
  const auto offset = [last = width - L](int v) { return v < V - 1 ? int64_t{v} * L : last; };

  const bool straddles = p.x_stride * static_cast<int64_t>(sizeof(X)) % kCacheLine != 0;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t end = p.rowptr[row + 1];
    if (p.accumulate && p.rowptr[row] == end) continue;  // most rows, where few of many get an addend
    Vec<A, L> sum[V] = {};
    for (int64_t e = p.rowptr[row]; e < end; ++e) {
      const int64_t ahead = e + p.prefetch_edges < p.num_edges ? e + p.prefetch_edges : p.num_edges - 1;
      const X* next = x + p.col[ahead] * p.x_stride;
      prefetch(next, V * L * static_cast<int64_t>(sizeof(X)));
      if (straddles) prefetch(next + width - 1, 1);  // the line that its end reaches into
      const int64_t source = p.col[e];
      const X* from = x + source * p.x_stride;
      [[maybe_unused]] A factor = 1;
      if constexpr (kWeight) factor *= weight[e];
      if constexpr (kColScale) factor *= col_scale[source];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        if constexpr (kWeight || kColScale) {
          sum[v] += load<L>(from + offset(v)) * factor;
        } else {
          sum[v] += load<L>(from + offset(v));
        }
      }
    }
    Out* to = static_cast<Out*>(p.out) + row * p.out_stride + column;
    if (row_scale != nullptr) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[v] = p.divide ? sum[v] / row_scale[row] : sum[v] * row_scale[row];
    }
    if (p.accumulate) {  // all loads come before the first store, as the last two vectors may overlap
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[v] += load<L>(to + offset(v));
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store<L>(to + offset(v), sum[v]);
  }
}

using RowsOfWidth = void (*)(const SpmmCsr&, int64_t, int64_t, int64_t, int64_t);

template <class X, class Out, int L, int V>
RowsOfWidth with_factors(const SpmmCsr& p) {
  if (p.weight != nullptr) {
    return p.col_scale != nullptr ? rows_of_width<X, Out, L, V, true, true> : rows_of_width<X, Out, L, V, true, false>;
  }
  return p.col_scale != nullptr ? rows_of_width<X, Out, L, V, false, true> : rows_of_width<X, Out, L, V, false, false>;
}

template <class X, class Out, int L, int... Vs>
RowsOfWidth with_vectors(const SpmmCsr& p, int64_t num_vectors, std::integer_sequence<int, Vs...>) {
  RowsOfWidth chosen = nullptr;
  (void)((num_vectors == Vs + 1 && (chosen = with_factors<X, Out, L, Vs + 1>(p))) || ...);
  return chosen;
}

// Fewer columns than one full vector: shorter vectors, one or two of them.
template <class X, class Out, int L>
RowsOfWidth fewer_columns(const SpmmCsr& p, int64_t width) {
  if constexpr (L == 1) {
    return with_factors<X, Out, 1, 1>(p);
  } else {
    if (width < L) return fewer_columns<X, Out, L / 2>(p, width);
    return width == L ? with_factors<X, Out, L, 1>(p) : with_factors<X, Out, L, 2>(p);
  }
}

template <class X, class Out>
void rows_of_types(const SpmmCsr& p, int64_t row_begin, int64_t row_end) {
  constexpr int L = kLanes<accumulator_t<X>>;
  const int64_t width = p.num_features;
  if (width < L) {
    fewer_columns<X, Out, L / 2>(p, width)(p, row_begin, row_end, 0, width);
    return;
  }
  // Wide rows go by blocks of nearly equal width: each holds a full vector, the last one too.
  constexpr auto kCounts = std::make_integer_sequence<int, kMaxVectors>{};
  const int64_t num_vectors = (width + L - 1) / L;
  const int64_t num_blocks = (num_vectors + kMaxVectors - 1) / kMaxVectors;
  if (num_blocks == 1) {
    with_vectors<X, Out, L>(p, num_vectors, kCounts)(p, row_begin, row_end, 0, width);
    return;
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t begin = block * num_vectors / num_blocks, end = (block + 1) * num_vectors / num_blocks;
      const int64_t column = begin * L, end_column = end * L < width ? end * L : width;
      with_vectors<X, Out, L>(p, end - begin, kCounts)(p, row, row + 1, column, end_column - column);
    }
  }
}

}  // namespace

void spmm_rows(const SpmmCsr& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.x_element, [&]<class X>() {
    return problem.out_element == problem.x_element ? rows_of_types<X, X>(problem, row_begin, row_end)
                                                    : rows_of_types<X, accumulator_t<X>>(problem, row_begin, row_end);
  });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
