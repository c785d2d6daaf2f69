// What norm + ReLU + dropout forward and backward have alike: a row, and its columns in the lanes of its group.
// problems/norm_relu_dropout.h has the formulas.
#pragma once

#include "cuda/keyed.cuh"
#include "cuda/warp.cuh"
#include "problems/norm_relu_dropout.h"

namespace pyg_dist::gpu {

constexpr int kColumns = 4;  // that a lane has at once: those of a counter of dropout

// How the columns of a row lie: kHeld > 0 says that counters are whole and their columns aligned, and that a lane of
// the row's group has kHeld of them at most, which it holds in registers; 0 says nothing, and rows are read anew each
// time.
//
// What forward and backward compute alike of one row.
template <class T, int kHeld>
struct EpilogueRow {
  using A = accumulator_t<T>;
  using Columns = CounterColumns<kColumns>;
  static constexpr bool kIsWhole = kHeld > 0;

  const NormReLUDropout& p;
  int64_t row;
  int lane, lanes;  // of the row's group
  bool is_aligned;
  A mean, rstd;

  PYG_DIST_DEVICE EpilogueRow(const NormReLUDropout& problem, int64_t row_, int log_lanes, bool aligned)
      : p(problem), row(row_), lanes(1 << log_lanes), is_aligned(aligned), mean(0), rstd(1) {
    lane = lane_id() & (lanes - 1);
  }

  PYG_DIST_DEVICE void read_moments() {
    if (p.norm == RowNorm::layer) mean = static_cast<const A*>(p.mean)[row];
    if (p.norm != RowNorm::none) rstd = static_cast<const A*>(p.rstd)[row];
  }

  // Calls use(u, columns) for each counter of this lane, u being its number.
  template <class Use>
  PYG_DIST_DEVICE void for_counters(const Use& use) const {
    if constexpr (kIsWhole) {
      const int end = static_cast<int>(p.keyed.num_columns);
      const auto block = static_cast<uint32_t>(p.keyed.column_offset / kColumns);
      PYG_DIST_UNROLL
      for (int u = 0; u < kHeld; ++u) {
        const int counter = lane + u * lanes, first = counter * kColumns;
        if (first < end) use(u, Columns{row, first, end, block + static_cast<uint32_t>(counter)});
      }
    } else {
      const int64_t counters = counters_of_row<kColumns>(p.keyed);
      for (int64_t k = lane; k < counters; k += lanes) use(0, columns_of_counter<kColumns>(p.keyed, row, k));
    }
  }
  static PYG_DIST_DEVICE bool has(const Columns& columns, int k) { return kIsWhole || columns.has(k); }

  PYG_DIST_DEVICE void load(const void* rows, const Columns& columns, A (&values)[kColumns]) const {
    const T* const from = static_cast<const T*>(rows) + row * p.keyed.num_columns;
    if constexpr (kIsWhole) {
      load_values<T, kColumns>(from + columns.first, values);
    } else {
      load_columns<T, kColumns>(from, columns, is_aligned, values);
    }
  }
  PYG_DIST_DEVICE void store(void* rows, const Columns& columns, const A (&values)[kColumns]) const {
    T* const to = static_cast<T*>(rows) + row * p.keyed.num_columns;
    if constexpr (kIsWhole) {
      store_values<T, kColumns>(to + columns.first, values);
    } else {
      store_columns<T, kColumns>(to, columns, is_aligned, values);
    }
  }

  PYG_DIST_DEVICE void norm(const A (&x)[kColumns], A (&n)[kColumns]) const {
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) n[k] = (x[k] - mean) * rstd;
  }
  PYG_DIST_DEVICE void affine(const Columns& columns, const A (&n)[kColumns], A (&z)[kColumns]) const {
    A weight[kColumns], bias[kColumns];
    of_columns(p.weight, columns, weight, A{1});
    of_columns(p.bias, columns, bias, A{0});
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) {
      z[k] = p.weight != nullptr ? n[k] * weight[k] : n[k];
      if (p.bias != nullptr) z[k] += bias[k];
      if (!has(columns, k)) z[k] = A{0};
    }
  }
  // Values of a vector with one for each column; `other` where there are none.
  PYG_DIST_DEVICE void of_columns(const void* vector, const Columns& columns, A (&values)[kColumns], A other) const {
    const A* const from = static_cast<const A*>(vector);
    if (kIsWhole && from != nullptr) {
      load_values<A, kColumns>(from + columns.first, values);
      return;
    }
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) {
      values[k] = from != nullptr && has(columns, k) ? from[columns.first + k] : other;
    }
  }

  // What v[k] becomes: zero where z is not let through, which a NaN is, and times zero where the word drops it.
  PYG_DIST_DEVICE void pass(const Columns& columns, const A (&z)[kColumns], A (&v)[kColumns]) const {
    const A scale = static_cast<A>(p.scale);
    Words words{};
    if (p.keyed.key != nullptr) {
      words = philox(p.keyed.seed, static_cast<uint64_t>(p.keyed.key[row]), columns.block, pyg_dist::Stream::dropout);
    }
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) {
      if (p.relu) v[k] = z[k] <= A{0} ? A{0} : v[k];
      v[k] *= p.keyed.key == nullptr || words.word[k] >= p.threshold ? scale : A{0};
    }
  }
};

// Calls f.operator()<kHeld>(is_aligned).
template <class T, class F>
void with_rows(const NormReLUDropout& p, const void* other, const void* another, const F& f) {
  const int64_t n = p.keyed.num_columns, counters = counters_of_row<kColumns>(p.keyed);
  Alignment<T> alignment(n);
  alignment.template rows<T>(p.x, n).template rows<T>(other, n).template rows<T>(another, n);
  const bool is_aligned = are_aligned<T, kColumns>(p.keyed, alignment);
  const auto bits = reinterpret_cast<uintptr_t>(p.weight) | reinterpret_cast<uintptr_t>(p.bias);
  constexpr int kMost = sizeof(T) == 8 ? 2 : 4;  // of float64, registers do not reach for four
  if (!is_aligned || n % kColumns != 0 || bits % 16 != 0 || counters > kMost * kWarp) {
    f.template operator()<0>(is_aligned);
  } else if (counters <= kWarp) {
    f.template operator()<1>(true);
  } else if (counters <= 2 * kWarp) {
    f.template operator()<2>(true);
  } else {
    f.template operator()<kMost>(true);
  }
}

}  // namespace pyg_dist::gpu
