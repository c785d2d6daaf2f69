#include "cuda/kernels.h"
#include "cuda/row_reduction.cuh"
#include "formats/extreme.h"

namespace pyg_dist::gpu {
namespace {

template <class T, int kVec_, int kCount_>
struct ExtremeOp {
  using A = accumulator_t<T>;
  static constexpr int kVec = kVec_, kCount = kCount_, kThreadsAtOnce = 512;
  using Columns = LaneColumns<kVec, kCount>;

  ExtremeCsr p;

 protected:
  PYG_DIST_DEVICE const T* x() const { return static_cast<const T*>(p.x); }
  PYG_DIST_DEVICE const T* y() const { return static_cast<const T*>(p.y); }
};

template <bool kLargest, class T, int kVec, int kCount>
struct FindExtremes : ExtremeOp<T, kVec, kCount> {
  using Base = ExtremeOp<T, kVec, kCount>;
  using typename Base::A;
  using typename Base::Columns;

  static PYG_DIST_DEVICE A identity() {
    return kLargest ? -static_cast<A>(__builtin_inf()) : static_cast<A>(__builtin_inf());
  }
  static PYG_DIST_DEVICE A join(A a, A b) { return extreme_of<kLargest>(a, b); }

  PYG_DIST_DEVICE void add(int64_t, int64_t begin, int64_t end, const Columns& columns, A (&best)[kCount][kVec]) const {
    for_gathered(this->x(), this->p.x_stride, this->p.col, begin, end, columns, [&](int u, const A(&value)[kVec]) {
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) best[u][v] = extreme_of<kLargest>(best[u][v], value[v]);
    });
  }

  PYG_DIST_DEVICE void finish(int64_t row, const Columns& columns, A (&best)[kCount][kVec]) const {
    const bool is_empty = this->p.rowptr[row] == this->p.rowptr[row + 1];
    T* const to = static_cast<T*>(this->p.out) + row * this->p.num_features;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) best[u][v] = is_empty ? A{0} : best[u][v];
      store_values<T, kVec>(to + columns.at(u), best[u]);
    }
  }
};

// Counts ties.
template <class T, int kVec, int kCount>
struct ShareGradients : ExtremeOp<T, kVec, kCount> {
  using Base = ExtremeOp<T, kVec, kCount>;
  using typename Base::A;
  using typename Base::Columns;

  static PYG_DIST_DEVICE A identity() { return A{0}; }
  static PYG_DIST_DEVICE A join(A a, A b) { return a + b; }

  PYG_DIST_DEVICE void add(int64_t row, int64_t begin, int64_t end, const Columns& columns,
                           A (&count)[kCount][kVec]) const {
    A extreme[kCount][kVec] = {};
    load_extreme(row, columns, extreme);
    for_gathered(this->x(), this->p.x_stride, this->p.col, begin, end, columns, [&](int u, const A(&value)[kVec]) {
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) count[u][v] += tie(value[v], extreme[u][v], A{1});
    });
  }

  PYG_DIST_DEVICE void finish(int64_t row, const Columns& columns, A (&count)[kCount][kVec]) const {
    A extreme[kCount][kVec] = {};
    load_extreme(row, columns, extreme);
    const T* const g = static_cast<const T*>(this->p.g) + row * this->p.num_features;
    A* const to = static_cast<A*>(this->p.out) + row * this->p.num_features;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      A share[kVec];
      load_values<T, kVec>(g + columns.at(u), share);
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) share[v] = share[v] / (count[u][v] + tie(extreme[u][v], A{0}, A{1}));
      store_values<A, kVec>(to + columns.at(u), share);
    }
  }

 private:
  PYG_DIST_DEVICE void load_extreme(int64_t row, const Columns& columns, A (&extreme)[kCount][kVec]) const {
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (columns.has(u)) load_values<T, kVec>(this->y() + row * this->p.num_features + columns.at(u), extreme[u]);
    }
  }
};

template <class T, int kVec, int kCount>
struct SumShares : ExtremeOp<T, kVec, kCount> {
  using Base = ExtremeOp<T, kVec, kCount>;
  using typename Base::A;
  using typename Base::Columns;

  static PYG_DIST_DEVICE A identity() { return A{0}; }
  static PYG_DIST_DEVICE A join(A a, A b) { return a + b; }

  PYG_DIST_DEVICE void add(int64_t row, int64_t begin, int64_t end, const Columns& columns,
                           A (&sum)[kCount][kVec]) const {
    const auto* const shares = static_cast<const A*>(this->p.g);
    A own[kCount][kVec] = {};
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (columns.has(u)) load_values<T, kVec>(this->x() + row * this->p.x_stride + columns.at(u), own[u]);
    }
    PYG_DIST_UNROLL_BY(2)
    for (int64_t e = begin; e < end; ++e) {
      const int64_t from = this->p.col[e] * this->p.y_stride;
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        if (!columns.has(u)) continue;
        A extreme[kVec], share[kVec];
        load_values<T, kVec>(this->y() + from + columns.at(u), extreme);
        load_values<A, kVec>(shares + from + columns.at(u), share);
        // Multiplied, not selected: of a share that is infinite or NaN nothing is left out, as in torch.
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) sum[u][v] += share[v] * tie(extreme[v], own[u][v], A{1});
      }
    }
  }

  PYG_DIST_DEVICE void finish(int64_t row, const Columns& columns, A (&sum)[kCount][kVec]) const {
    T* const to = static_cast<T*>(this->p.out) + row * this->p.num_features;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (columns.has(u)) store_values<T, kVec>(to + columns.at(u), sum[u]);
    }
  }
};

// op.operator()<T, kVec, kCount>() makes the op.
template <class F>
void reduce(const ExtremeCsr& p, const Queue& queue, const F& op) {
  for_element(p.element, [&]<class T>() {
    using A = accumulator_t<T>;
    const int64_t n = p.num_features;
    Alignment<T> alignment(n);
    alignment.template rows<T>(p.x, p.x_stride).template rows<T>(p.y, p.y == nullptr ? 0 : p.y_stride);
    // Those of the sums' type, or of T: both divide.
    alignment.template rows<A>(p.g, n).template rows<T>(p.g, n).template rows<A>(p.out, n).template rows<T>(p.out, n);
    with_vectors<T>(alignment,
                    [&]<int kVec, int kCount>() { reduce_rows(op.template operator()<T, kVec, kCount>(), n, queue); });
  });
}

}  // namespace

void extreme_csr(const ExtremeCsr& problem, const Queue& queue) {
  const auto reduce_to = [&]<bool kLargest>() {
    reduce(problem, queue,
           [&]<class T, int kVec, int kCount>() { return FindExtremes<kLargest, T, kVec, kCount>{{problem}}; });
  };
  problem.largest ? reduce_to.template operator()<true>() : reduce_to.template operator()<false>();
}

void extreme_csr_shares(const ExtremeCsr& problem, const Queue& queue) {
  reduce(problem, queue, [&]<class T, int kVec, int kCount>() { return ShareGradients<T, kVec, kCount>{{problem}}; });
}

void extreme_csr_grad(const ExtremeCsr& problem, const Queue& queue) {
  reduce(problem, queue, [&]<class T, int kVec, int kCount>() { return SumShares<T, kVec, kCount>{{problem}}; });
}

}  // namespace pyg_dist::gpu
