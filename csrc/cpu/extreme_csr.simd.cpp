#include "cpu/shorter.h"
#include "cpu/table.h"
#include "formats/extreme.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kPrefetchEdges = 32;  // as in spmm_csr

// Calls body<L, V>(column) for blocks of V vectors of L lanes that cover all columns. The last one may be moved left
// over columns that are done already, and does them again, alike.
template <class A, int L, class Body>
PYG_DIST_INLINE void for_each_block(int64_t width, const Body& body) {
  int64_t column = 0;
  for (; column + 4 * L <= width; column += 4 * L) body.template operator()<L, 4>(column);
  for (; column + L <= width; column += L) body.template operator()<L, 1>(column);
  if constexpr (L > 1) {
    if (column == width) return;
    if (width >= L) {
      body.template operator()<L, 1>(width - L);
    } else {
      for_each_block<A, kShorter<L, A>>(width, body);
    }
  }
}

template <int L, class A>
PYG_DIST_INLINE Vec<A, L> ties(Vec<A, L> a, Vec<A, L> b) {
  return tie(a, b, Vec<A, L>{} + A{1});
}

template <class T, bool kLargest>
void extremes(const ExtremeCsr& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  const auto* x = static_cast<const T*>(p.x);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = p.rowptr[row], end = p.rowptr[row + 1];
    T* to = static_cast<T*>(p.out) + row * p.num_features;
    for_each_block<A, kLanes<A>>(p.num_features, [&]<int L, int V>(int64_t column) {
      Vec<A, L> best[V] = {};
      for (int64_t e = begin; e < end; ++e) {
        const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
        prefetch(x + p.col[ahead] * p.x_stride + column, V * L * static_cast<int64_t>(sizeof(T)));
        const T* from = x + p.col[e] * p.x_stride + column;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const Vec<A, L> value = load<L>(from + v * L);
          best[v] = e == begin ? value : extreme_of<kLargest>(best[v], value);  // the first replaces the zero
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store<L>(to + column + v * L, best[v]);
    });
  }
}

template <class T>
void shares(const ExtremeCsr& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  const auto* x = static_cast<const T*>(p.x);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t first = row * p.num_features;
    const T *y = static_cast<const T*>(p.y) + first, *g = static_cast<const T*>(p.g) + first;
    A* to = static_cast<A*>(p.out) + first;
    for_each_block<A, kLanes<A>>(p.num_features, [&]<int L, int V>(int64_t column) {
      Vec<A, L> extreme[V], count[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        extreme[v] = load<L>(y + column + v * L);
        count[v] = ties<L, A>(extreme[v], Vec<A, L>{});
      }
      for (int64_t e = p.rowptr[row]; e < p.rowptr[row + 1]; ++e) {
        const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
        prefetch(x + p.col[ahead] * p.x_stride + column, V * L * static_cast<int64_t>(sizeof(T)));
        const T* from = x + p.col[e] * p.x_stride + column;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) count[v] += ties<L, A>(load<L>(from + v * L), extreme[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store<L>(to + column + v * L, load<L>(g + column + v * L) / count[v]);
    });
  }
}

template <class T>
void grads(const ExtremeCsr& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  const auto* y = static_cast<const T*>(p.y);
  const auto* share = static_cast<const A*>(p.g);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* to = static_cast<T*>(p.out) + row * p.num_features;
    for_each_block<A, kLanes<A>>(p.num_features, [&]<int L, int V>(int64_t column) {
      Vec<A, L> value[V], sum[V] = {};
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) value[v] = load<L>(x + column + v * L);
      for (int64_t e = p.rowptr[row]; e < p.rowptr[row + 1]; ++e) {
        const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
        const int64_t soon = p.col[ahead] * p.y_stride + column, from = p.col[e] * p.y_stride + column;
        prefetch(y + soon, V * L * static_cast<int64_t>(sizeof(T)));
        prefetch(share + soon, V * L * static_cast<int64_t>(sizeof(A)));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          // Multiplied, not selected: of a share that is infinite or NaN nothing is left out, as in torch.
          sum[v] += load<L>(share + from + v * L) * ties<L, A>(load<L>(y + from + v * L), value[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store<L>(to + column + v * L, sum[v]);
    });
  }
}

}  // namespace

void extreme_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() {
    return problem.largest ? extremes<T, true>(problem, row_begin, row_end)
                           : extremes<T, false>(problem, row_begin, row_end);
  });
}

void extreme_share_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return shares<T>(problem, row_begin, row_end); });
}

void extreme_grad_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return grads<T>(problem, row_begin, row_end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
