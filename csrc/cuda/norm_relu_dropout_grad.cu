// The gradients of norm + ReLU + dropout: by x, a row at a time, and by weight and bias, sums over the rows of a group.

#include "cuda/kernels.h"
#include "cuda/norm_relu_dropout.cuh"

namespace pyg_dist::gpu {
namespace {

// n and by_z of some columns of a row, whose x comes in n and whose gradient comes in by_z.
template <class T, int kHeld>
PYG_DIST_DEVICE void gradient_of(const EpilogueRow<T, kHeld>& r, const CounterColumns<kColumns>& columns,
                                 accumulator_t<T> (&n)[kColumns], accumulator_t<T> (&by_z)[kColumns]) {
  accumulator_t<T> z[kColumns];
  r.norm(n, n);
  r.affine(columns, n, z);
  r.pass(columns, z, by_z);
}

// The gradient by x of a row, or by n where the columns of others are still to come.
template <class T, int kHeld>
struct RowGradient {
  using A = accumulator_t<T>;
  using Row = EpilogueRow<T, kHeld>;
  using Columns = typename Row::Columns;
  static constexpr int kCounters = kHeld > 0 ? kHeld : 1;

  const NormReLUDropoutGrad& g;
  const Row& r;
  A n[kCounters][kColumns] = {}, by_z[kCounters][kColumns] = {};  // where lanes hold them

  PYG_DIST_DEVICE RowGradient(const NormReLUDropoutGrad& grad, const Row& row) : g(grad), r(row) {
    if constexpr (kHeld > 0) r.for_counters([&](int u, const Columns& columns) { make(u, columns); });
  }

  // All lanes of the warp come here; those behind the last row write nothing.
  PYG_DIST_DEVICE void write(int log_lanes, bool writes) {
    const NormReLUDropout& p = g.forward;
    A mean = 0, slope = 0;  // of by_n, and of its product with n
    if (p.norm != RowNorm::none) {
      r.for_counters([&](int u, const Columns& columns) {
        remake(u, columns);
        A weight[kColumns];
        r.of_columns(p.weight, columns, weight, A{1});
        PYG_DIST_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          if (!Row::has(columns, c)) continue;
          const A by_n = by_z[u][c] * weight[c];
          mean += by_n;
          slope += by_n * n[u][c];
        }
      });
      mean = p.norm == RowNorm::layer ? sum_lanes(mean, log_lanes, kAllLanes) : A{0};
      slope = sum_lanes(slope, log_lanes, kAllLanes);
      if (g.pass == RowGrad::first && writes && r.lane == 0) {
        static_cast<A*>(g.by_row)[2 * r.row] = mean;
        static_cast<A*>(g.by_row)[2 * r.row + 1] = slope;
      }
      const A count = static_cast<A>(p.keyed.num_columns);
      mean /= count;
      slope /= count;
    }
    if (!writes) return;
    r.for_counters([&](int u, const Columns& columns) {
      remake(u, columns);
      A by_x[kColumns], weight[kColumns];
      r.of_columns(p.weight, columns, weight, A{1});
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        by_x[c] = by_z[u][c] * weight[c];
        // Not 0 * n without a norm, which is NaN where x is infinite.
        if (p.norm != RowNorm::none && g.pass == RowGrad::whole) by_x[c] = (by_x[c] - mean - n[u][c] * slope) * r.rstd;
      }
      r.store(g.grad_x, columns, by_x);
    });
  }

 private:
  PYG_DIST_DEVICE void make(int u, const Columns& columns) {
    r.load(g.forward.x, columns, n[u]);
    r.load(g.grad, columns, by_z[u]);
    gradient_of(r, columns, n[u], by_z[u]);
  }
  PYG_DIST_DEVICE void remake(int u, const Columns& columns) {
    if constexpr (kHeld == 0) make(u, columns);
  }
};

// A row that no lane can hold: its gradient by a group of lanes, and sums over rows by EpilogueGradSums.
template <class T>
struct EpilogueGradRows {
  static constexpr int kThreads = 256;
  using Shared = NoShared;

  NormReLUDropoutGrad g;
  int log_lanes;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t at = (block_id() * kThreads + thread_id()) >> log_lanes, last = g.forward.keyed.num_rows - 1;
    EpilogueRow<T, 0> r(g.forward, at < last ? at : last, log_lanes, is_aligned);
    r.read_moments();
    if (g.pass == RowGrad::second) {
      if (at <= last) second_pass(r);
    } else {
      RowGradient<T, 0>(g, r).write(log_lanes, at <= last);
    }
  }

 private:
  PYG_DIST_DEVICE void second_pass(const EpilogueRow<T, 0>& r) const {
    using A = accumulator_t<T>;
    const A mean = static_cast<const A*>(g.by_row)[2 * r.row], slope = static_cast<const A*>(g.by_row)[2 * r.row + 1];
    r.for_counters([&](int, const CounterColumns<kColumns>& columns) {
      A n[kColumns], by_n[kColumns];
      r.load(r.p.x, columns, n);
      r.load(g.grad_x, columns, by_n);
      r.norm(n, n);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) by_n[c] = (by_n[c] - mean - n[c] * slope) * r.rstd;
      r.store(g.grad_x, columns, by_n);
    });
  }
};

// What the lanes of a block have summed up, put together in their order: those of each warp, of which each group of
// 2^log_lanes lanes has the same counters, and of all warps.
template <class A>
struct BlockSums {
  static constexpr int kWarps = 8;
  A sums[2][kWarps][kWarp * kColumns];  // by weight, by bias

  // All threads of the block come here. first: the counter of lane 0.
  PYG_DIST_DEVICE void write(const NormReLUDropoutGrad& g, int log_lanes, int64_t first, const A (&by_weight)[kColumns],
                             const A (&by_bias)[kColumns]) {
    const int warp = thread_id() / kWarp, lanes = 1 << log_lanes;
    PYG_DIST_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      sums[0][warp][c * kWarp + lane_id()] = by_weight[c];
      sums[1][warp][c * kWarp + lane_id()] = by_bias[c];
    }
    block_sync();
    const int which = thread_id() / (kWarp * kColumns), place = thread_id() % (kWarp * kColumns);
    const int lane = place % kWarp, c = place / kWarp;
    if (lane < lanes) {
      A sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        for (int group = lane; group < kWarp; group += lanes) sum += sums[which][w][c * kWarp + group];
      }
      const auto columns = columns_of_counter<kColumns>(g.forward.keyed, 0, first + lane);
      const int64_t row = 3 * block_id() + which;
      if (columns.has(c)) static_cast<A*>(g.sums)[row * g.forward.keyed.num_columns + columns.first + c] = sum;
    }
    block_sync();
  }
};

// Sums over the rows of a group: a block takes 32 counters' columns, each of its warps every eighth row.
template <class T>
struct EpilogueGradSums {
  using A = accumulator_t<T>;
  using Shared = BlockSums<A>;
  static constexpr int kThreads = Shared::kWarps * kWarp;

  NormReLUDropoutGrad g;
  int64_t counters;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    const NormReLUDropout& p = g.forward;
    const int64_t group = block_id(), num_rows = p.keyed.num_rows;
    const int64_t begin = group * num_rows / g.num_groups, end = (group + 1) * num_rows / g.num_groups;
    const int64_t counter = block_slice() * kWarp + lane_id();
    A by_weight[kColumns] = {}, by_bias[kColumns] = {};
    for (int64_t row = begin + thread_id() / kWarp; row < end && counter < counters; row += Shared::kWarps) {
      EpilogueRow<T, 0> r(p, row, 5, is_aligned);
      r.read_moments();
      const auto columns = columns_of_counter<kColumns>(p.keyed, row, counter);
      A n[kColumns], by_z[kColumns];
      r.load(p.x, columns, n);
      r.load(g.grad, columns, by_z);
      gradient_of(r, columns, n, by_z);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        by_bias[c] += by_z[c];
        by_weight[c] += by_z[c] * n[c];
      }
    }
    shared.write(g, 5, block_slice() * kWarp, by_weight, by_bias);
  }
};

// Both in one pass over rows that lanes can hold: a block takes the rows of a group, each group of lanes some of them.
template <class T, int kHeld>
struct EpilogueGradGroups {
  using A = accumulator_t<T>;
  using Shared = BlockSums<A>;
  using Row = EpilogueRow<T, kHeld>;
  static constexpr int kThreads = Shared::kWarps * kWarp;

  NormReLUDropoutGrad g;
  int log_lanes;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    const NormReLUDropout& p = g.forward;
    const int64_t num_rows = p.keyed.num_rows;
    const int64_t begin = block_id() * num_rows / g.num_groups, end = (block_id() + 1) * num_rows / g.num_groups;
    const int at_once = kThreads >> log_lanes;
    A by_weight[kHeld][kColumns] = {}, by_bias[kHeld][kColumns] = {};
    for (int64_t first = begin; first < end; first += at_once) {
      const int64_t row = first + (thread_id() >> log_lanes);
      const bool is_there = row < end;
      Row r(p, is_there ? row : end - 1, log_lanes, true);
      r.read_moments();
      RowGradient<T, kHeld> gradient(g, r);
      gradient.write(log_lanes, is_there);
      if (!is_there) continue;
      PYG_DIST_UNROLL
      for (int u = 0; u < kHeld; ++u) {
        PYG_DIST_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          by_bias[u][c] += gradient.by_z[u][c];
          by_weight[u][c] += gradient.by_z[u][c] * gradient.n[u][c];
        }
      }
    }
    PYG_DIST_UNROLL
    for (int u = 0; u < kHeld; ++u) shared.write(g, log_lanes, u << log_lanes, by_weight[u], by_bias[u]);
  }
};

}  // namespace

void norm_relu_dropout_grad(const NormReLUDropoutGrad& problem, const Queue& queue) {
  const NormReLUDropout& p = problem.forward;
  const int64_t counters = counters_of_row<kColumns>(p.keyed);
  const int log_lanes = log_lanes_for(counters, 1);
  for_element(p.element, [&]<class T>() {
    with_rows<T>(p, problem.grad, problem.grad_x, [&]<int kHeld>(bool is_aligned) {
      if constexpr (kHeld > 0) {
        if (problem.pass != RowGrad::second) {
          return launch(EpilogueGradGroups<T, kHeld>{problem, log_lanes}, problem.num_groups, queue.stream);
        }
      }
      using Rows = EpilogueGradRows<T>;
      launch(Rows{problem, log_lanes, is_aligned}, blocks_for(p.keyed.num_rows << log_lanes, Rows::kThreads),
             queue.stream);
      if (problem.pass == RowGrad::second) return;
      launch(EpilogueGradSums<T>{problem, counters, is_aligned}, problem.num_groups, queue.stream,
             blocks_for(counters, kWarp));
    });
  });
}

}  // namespace pyg_dist::gpu
