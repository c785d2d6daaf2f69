// Edges of a row and the rows that they name, added up: problems/spmm_csr.h.
#pragma once

#include "cuda/row_reduction.cuh"
#include "problems/spmm_csr.h"

namespace pyg_dist::gpu {

// kDivide: by the scales. A division is a call, and most products multiply.
template <class X, class Out, int kVec_, int kCount_, bool kDivide>
struct SumEdges {
  using A = accumulator_t<X>;
  static constexpr int kVec = kVec_, kCount = kCount_;
  static constexpr int kAhead = kCount == 4 ? 2 : 4;  // rows in flight, as far as registers reach
  static constexpr int kThreadsAtOnce = kDivide || sizeof(X) == 8 ? 512 : 1024;

  SpmmCsr p;

  static PYG_DIST_DEVICE A identity() { return A{0}; }
  static PYG_DIST_DEVICE A join(A a, A b) { return a + b; }

  PYG_DIST_DEVICE void add(int64_t, int64_t begin, int64_t end, const LaneColumns<kVec, kCount>& columns,
                           A (&sum)[kCount][kVec]) const {
    int64_t e = begin;
    for (; e + kAhead <= end; e += kAhead) add_edges<kAhead>(e, columns, sum);
    for (; e < end; ++e) add_edges<1>(e, columns, sum);
  }

  PYG_DIST_DEVICE void finish(int64_t row, const LaneColumns<kVec, kCount>& columns, A (&sum)[kCount][kVec]) const {
    if (p.accumulate && p.rowptr[row] == p.rowptr[row + 1]) return;  // most rows, where few of many get an addend
    Out* const to = static_cast<Out*>(p.out) + row * p.out_stride;
    const auto* const row_scale = static_cast<const A*>(p.row_scale);
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      A before[kVec] = {};
      if (p.accumulate) load_values<Out, kVec>(to + columns.at(u), before);
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) {
        if (row_scale != nullptr) sum[u][v] = kDivide ? sum[u][v] / row_scale[row] : sum[u][v] * row_scale[row];
        if (p.accumulate) sum[u][v] += before[v];
      }
      store_values<Out, kVec>(to + columns.at(u), sum[u]);
    }
  }

 private:
  template <int kEdges>
  PYG_DIST_DEVICE void add_edges(int64_t e, const LaneColumns<kVec, kCount>& columns, A (&sum)[kCount][kVec]) const {
    const auto* const x = static_cast<const X*>(p.x);
    const auto* const weight = static_cast<const A*>(p.weight);
    const auto* const col_scale = static_cast<const A*>(p.col_scale);
    int64_t source[kEdges];
    PYG_DIST_UNROLL
    for (int k = 0; k < kEdges; ++k) source[k] = p.col[e + k];  // first, so that all rows can be asked for at once
    Pack<X, kVec> value[kEdges][kCount];
    A factor[kEdges];
    PYG_DIST_UNROLL
    for (int k = 0; k < kEdges; ++k) {
      const X* const from = x + source[k] * p.x_stride;
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        value[k][u] = columns.has(u) ? load<kVec>(from + columns.at(u)) : Pack<X, kVec>{};
      }
      factor[k] = weight == nullptr ? A{1} : weight[e + k];
      if (!kDivide && col_scale != nullptr) factor[k] *= col_scale[source[k]];
    }
    PYG_DIST_UNROLL
    for (int k = 0; k < kEdges; ++k) {
      const A divisor = kDivide && col_scale != nullptr ? col_scale[source[k]] : A{1};
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) {
          A term = to_sum(value[k][u].value[v]);
          // Rounded as if a tensor of quotients came in.
          if (kDivide && col_scale != nullptr) term = to_sum(from_sum<X>(term / divisor));
          sum[u][v] += term * factor[k];
        }
      }
    }
  }
};

// Calls f.operator()<kDivide>().
template <class F>
void with_scales(const SpmmCsr& p, const F& f) {
  if (p.divide && (p.row_scale != nullptr || p.col_scale != nullptr)) {
    f.template operator()<true>();
  } else {
    f.template operator()<false>();
  }
}

}  // namespace pyg_dist::gpu
