#include "kernels/cpu/table.h"
#include "kernels/cpu/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kPrefetchEdges = 32;  // as in spmm_csr

// Four sums at once hide the latency of the additions.
template <class T>
accumulator_t<T> dot(const T* a, const T* b, int64_t n) {
  using A = accumulator_t<T>;
  constexpr int L = kLanes<A>;
  Vec<A, L> sum[4] = {};
  int64_t c = 0;
  for (; c + 4 * L <= n; c += 4 * L) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sum[v] += load<L>(a + c + v * L) * load<L>(b + c + v * L);
  }
  for (; c + L <= n; c += L) sum[0] += load<L>(a + c) * load<L>(b + c);
  A total = horizontal_sum<L, A>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; c < n; ++c) total += load<1>(a + c) * load<1>(b + c);
  return total;
}

int64_t row_of_edge(const int64_t* rowptr, int64_t num_rows, int64_t edge) {
  int64_t low = 0, high = num_rows;  // the last row that starts at or before the edge
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (rowptr[middle] <= edge) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
void edges_of_type(const SddmmCsr& p, int64_t edge_begin, int64_t edge_end) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  auto* out = static_cast<accumulator_t<T>*>(p.out);
  int64_t row = row_of_edge(p.rowptr, p.num_rows, edge_begin);
  for (int64_t e = edge_begin; e < edge_end; ++e) {
    while (p.rowptr[row + 1] <= e) ++row;
    const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
    prefetch(b + p.col[ahead] * p.b_stride, p.num_features * static_cast<int64_t>(sizeof(T)));
    out[e] = dot(a + row * p.a_stride, b + p.col[e] * p.b_stride, p.num_features);
  }
}

}  // namespace

void sddmm_edges(const SddmmCsr& problem, int64_t edge_begin, int64_t edge_end) {
  switch (problem.element) {
    case Element::f32:
      return edges_of_type<float>(problem, edge_begin, edge_end);
    case Element::f64:
      return edges_of_type<double>(problem, edge_begin, edge_end);
    case Element::bf16:
      return edges_of_type<BFloat16>(problem, edge_begin, edge_end);
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
