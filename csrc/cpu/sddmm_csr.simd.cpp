#include "cpu/shorter.h"
#include "cpu/table.h"
#include "problems/row_chunks.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kPrefetchEdges = 64;

// d[k] = <a, b[col[k]]> for K edges of a row, n >= L columns: a vector of sums for each, whose lanes are added
// together.
template <int K, int L, class T>
PYG_DIST_INLINE void dots(const T* a, const T* b, int64_t b_stride, const int32_t* col, int64_t n,
                          accumulator_t<T>* d) {
  using A = accumulator_t<T>;
  Vec<A, L> sum[K] = {};
  const T* row[K];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k) row[k] = b + col[k] * b_stride;
  int64_t c = 0;
  for (; c + L <= n; c += L) {
    const Vec<A, L> factor = load<L>(a + c);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) sum[k] += factor * load<L>(row[k] + c);
  }
  if constexpr (L > 1) {
    if (c < n) {  // the last vector is moved left, over columns that are done
      const auto is_done = first_lanes<L, A>(c + L - n);
      const Vec<A, L> factor = load<L>(a + n - L);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) sum[k] += is_done ? Vec<A, L>{} : factor * load<L>(row[k] + n - L);
    }
  }
  if constexpr (K == 4) {
    const auto sums = fold<L, A, 2>(join<L, A, 2>(join<L, A, 1>(sum[0], sum[1]), join<L, A, 1>(sum[2], sum[3])));
    __builtin_memcpy(d, &sums, sizeof(sums));
  } else {
    for (int k = 0; k < K; ++k) d[k] = horizontal_sum<L, A>(sum[k]);
  }
}

template <class T, int L>
void edges_of_lanes(const SddmmCsr& p, int64_t edge_begin, int64_t edge_end) {
  constexpr int K = L < 4 ? 1 : 4;  // edges at once
  const auto* b = static_cast<const T*>(p.b);
  auto* out = static_cast<accumulator_t<T>*>(p.out);
  const int64_t n = p.num_features;
  const auto ask = [&](int64_t e) {
    const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
    prefetch(b + p.col[ahead] * p.b_stride, n * static_cast<int64_t>(sizeof(T)));
  };
  int64_t e = edge_begin;
  for (int64_t row = row_of_edge(p.rowptr, p.num_rows, edge_begin); e < edge_end; ++row) {
    const T* a = static_cast<const T*>(p.a) + row * p.a_stride;
    const int64_t end = p.rowptr[row + 1] < edge_end ? p.rowptr[row + 1] : edge_end;
    for (; e + K <= end; e += K) {
      for (int k = 0; k < K; ++k) ask(e + k);
      dots<K, L>(a, b, p.b_stride, p.col + e, n, out + e);
    }
    for (; e < end; ++e) {
      ask(e);
      dots<1, L>(a, b, p.b_stride, p.col + e, n, out + e);
    }
  }
}

// Fewer columns than lanes: shorter vectors.
template <class T, int L = kLanes<accumulator_t<T>>>
void edges_of_type(const SddmmCsr& p, int64_t edge_begin, int64_t edge_end) {
  if constexpr (L > 1) {
    if (p.num_features < L) return edges_of_type<T, kShorter<L, accumulator_t<T>>>(p, edge_begin, edge_end);
  }
  edges_of_lanes<T, L>(p, edge_begin, edge_end);
}

}  // namespace

void sddmm_edges(const SddmmCsr& problem, int64_t edge_begin, int64_t edge_end) {
  return for_element(problem.element, [&]<class T>() { return edges_of_type<T>(problem, edge_begin, edge_end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
