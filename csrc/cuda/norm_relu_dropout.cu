#include "cuda/kernels.h"
#include "cuda/keyed.cuh"
#include "cuda/warp.cuh"
#include "problems/norm_relu_dropout.h"

namespace pyg_dist::gpu {
namespace {

constexpr int kColumns = 4;  // that a lane has at once: those of a counter of dropout

PYG_DIST_DEVICE float root(float value) { return sqrtf(value); }
PYG_DIST_DEVICE double root(double value) { return sqrt(value); }

// What forward and backward compute alike of one row.
template <class T>
struct EpilogueRow {
  using A = accumulator_t<T>;
  using Columns = CounterColumns<kColumns>;

  const NormReLUDropout& p;
  int64_t row;
  bool is_aligned;
  A mean, rstd;

  PYG_DIST_DEVICE EpilogueRow(const NormReLUDropout& problem, int64_t row_, bool aligned)
      : p(problem), row(row_), is_aligned(aligned), mean(0), rstd(1) {}

  PYG_DIST_DEVICE void read_moments() {
    if (p.norm == RowNorm::layer) mean = static_cast<const A*>(p.mean)[row];
    if (p.norm != RowNorm::none) rstd = static_cast<const A*>(p.rstd)[row];
  }

  PYG_DIST_DEVICE int64_t counters() const { return counters_of_row<kColumns>(p.keyed); }
  PYG_DIST_DEVICE Columns columns(int64_t counter) const { return columns_of_counter<kColumns>(p.keyed, row, counter); }

  PYG_DIST_DEVICE void load(const void* rows, const Columns& columns, A (&values)[kColumns]) const {
    load_columns<T, kColumns>(static_cast<const T*>(rows) + row * p.keyed.num_columns, columns, is_aligned, values);
  }
  PYG_DIST_DEVICE void store(void* rows, const Columns& columns, const A (&values)[kColumns]) const {
    store_columns<T, kColumns>(static_cast<T*>(rows) + row * p.keyed.num_columns, columns, is_aligned, values);
  }

  // n of values x, and by n, in place, z.
  PYG_DIST_DEVICE A normed(A x) const { return (x - mean) * rstd; }
  PYG_DIST_DEVICE A weight(const Columns& columns, int k) const {
    return p.weight != nullptr && columns.has(k) ? static_cast<const A*>(p.weight)[columns.first + k] : A{1};
  }
  PYG_DIST_DEVICE A affine(const Columns& columns, int k, A n) const {
    if (!columns.has(k)) return A{0};
    if (p.weight != nullptr) n *= static_cast<const A*>(p.weight)[columns.first + k];
    if (p.bias != nullptr) n += static_cast<const A*>(p.bias)[columns.first + k];
    return n;
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

// A group of lanes for each row, which it reads up to three times: the first time from far away.
template <class T>
struct EpilogueRows {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  NormReLUDropout p;
  int log_lanes;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t row = (block_id() * kThreads + thread_id()) >> log_lanes;
    if (row >= p.keyed.num_rows) return;
    const int lane = thread_id() & ((1 << log_lanes) - 1), lanes = 1 << log_lanes;
    const Lanes group = group_of(log_lanes);
    EpilogueRow<T> r(p, row, is_aligned);
    const A count = static_cast<A>(p.keyed.num_columns);
    if (p.moments == RowMoments::given) r.read_moments();
    if (p.norm == RowNorm::layer && p.moments != RowMoments::given) {
      A sum = 0;
      for (int64_t k = lane; k < r.counters(); k += lanes) sum += sum_of(r, r.columns(k), [](A x) { return x; });
      r.mean = sum_lanes(sum, log_lanes, group) / count;
      if (lane == 0) static_cast<A*>(p.mean)[row] = r.mean;
    }
    if (p.norm != RowNorm::none && p.moments != RowMoments::given) {
      A sum = 0;
      for (int64_t k = lane; k < r.counters(); k += lanes) {
        sum += sum_of(r, r.columns(k), [&](A x) { return (x - r.mean) * (x - r.mean); });
      }
      const A mean_square = sum_lanes(sum, log_lanes, group) / count;
      r.rstd = p.moments == RowMoments::alone ? mean_square : A{1} / root(mean_square + static_cast<A>(p.eps));
      if (lane == 0) static_cast<A*>(p.rstd)[row] = r.rstd;
    }
    if (p.moments == RowMoments::alone) return;
    for (int64_t k = lane; k < r.counters(); k += lanes) {
      const auto columns = r.columns(k);
      A x[kColumns], z[kColumns];
      r.load(p.x, columns, x);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) x[c] = z[c] = r.affine(columns, c, r.normed(x[c]));
      r.pass(columns, z, x);
      r.store(p.y, columns, x);
    }
  }

 private:
  template <class F>
  PYG_DIST_DEVICE A sum_of(const EpilogueRow<T>& r, const CounterColumns<kColumns>& columns, const F& f) const {
    A x[kColumns], sum = 0;
    r.load(p.x, columns, x);
    PYG_DIST_UNROLL
    for (int c = 0; c < kColumns; ++c) sum += columns.has(c) ? f(x[c]) : A{0};
    return sum;
  }
};

// by_z of some columns of a row, and n.
template <class T>
PYG_DIST_DEVICE void gradient_of(const EpilogueRow<T>& r, const CounterColumns<kColumns>& columns, const void* grad,
                                 accumulator_t<T> (&n)[kColumns], accumulator_t<T> (&by_z)[kColumns]) {
  accumulator_t<T> z[kColumns];
  r.load(r.p.x, columns, n);
  r.load(grad, columns, by_z);
  PYG_DIST_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    n[c] = r.normed(n[c]);
    z[c] = r.affine(columns, c, n[c]);
  }
  r.pass(columns, z, by_z);
}

template <class T>
struct EpilogueGradRows {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  NormReLUDropoutGrad g;
  int log_lanes;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const NormReLUDropout& p = g.forward;
    const int64_t row = (block_id() * kThreads + thread_id()) >> log_lanes;
    if (row >= p.keyed.num_rows) return;
    const int lane = thread_id() & ((1 << log_lanes) - 1), lanes = 1 << log_lanes;
    const Lanes group = group_of(log_lanes);
    EpilogueRow<T> r(p, row, is_aligned);
    r.read_moments();
    if (g.pass == RowGrad::second) return second_pass(r, lane, lanes);
    A mean = 0, slope = 0;  // of by_n, and of its product with n
    if (p.norm != RowNorm::none) {
      for (int64_t k = lane; k < r.counters(); k += lanes) {
        const auto columns = r.columns(k);
        A n[kColumns], by_z[kColumns];
        gradient_of(r, columns, g.grad, n, by_z);
        PYG_DIST_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          if (!columns.has(c)) continue;
          const A by_n = by_z[c] * r.weight(columns, c);
          mean += by_n;
          slope += by_n * n[c];
        }
      }
      mean = p.norm == RowNorm::layer ? sum_lanes(mean, log_lanes, group) : A{0};
      slope = sum_lanes(slope, log_lanes, group);
      if (g.pass == RowGrad::first && lane == 0) {
        static_cast<A*>(g.by_row)[2 * row] = mean;
        static_cast<A*>(g.by_row)[2 * row + 1] = slope;
      }
      const A count = static_cast<A>(p.keyed.num_columns);
      mean /= count;
      slope /= count;
    }
    for (int64_t k = lane; k < r.counters(); k += lanes) {
      const auto columns = r.columns(k);
      A n[kColumns], by_x[kColumns];
      gradient_of(r, columns, g.grad, n, by_x);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        by_x[c] *= r.weight(columns, c);
        // Not 0 * n without a norm, which is NaN where x is infinite.
        if (p.norm != RowNorm::none && g.pass == RowGrad::whole) by_x[c] = (by_x[c] - mean - n[c] * slope) * r.rstd;
      }
      r.store(g.grad_x, columns, by_x);
    }
  }

 private:
  PYG_DIST_DEVICE void second_pass(const EpilogueRow<T>& r, int lane, int lanes) const {
    const A mean = static_cast<const A*>(g.by_row)[2 * r.row], slope = static_cast<const A*>(g.by_row)[2 * r.row + 1];
    for (int64_t k = lane; k < r.counters(); k += lanes) {
      const auto columns = r.columns(k);
      A x[kColumns], by_n[kColumns];
      r.load(r.p.x, columns, x);
      r.load(g.grad_x, columns, by_n);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) by_n[c] = (by_n[c] - mean - r.normed(x[c]) * slope) * r.rstd;
      r.store(g.grad_x, columns, by_n);
    }
  }
};

// Sums over the rows of a group: a block takes 32 counters' columns, each of its warps every eighth row; the warps'
// sums are added in their order.
template <class T>
struct EpilogueGradSums {
  static constexpr int kThreads = 256, kWarps = kThreads / kWarp;
  using A = accumulator_t<T>;
  struct Shared {
    A sums[2][kWarps][kWarp * kColumns];  // by weight, by bias
  };

  NormReLUDropoutGrad g;
  int64_t counters;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    const NormReLUDropout& p = g.forward;
    const int64_t group = block_id(), num_rows = p.keyed.num_rows, num_columns = p.keyed.num_columns;
    const int64_t begin = group * num_rows / g.num_groups, end = (group + 1) * num_rows / g.num_groups;
    const int64_t counter = block_slice() * kWarp + lane_id();
    const int warp = thread_id() / kWarp;
    A by_weight[kColumns] = {}, by_bias[kColumns] = {};
    for (int64_t row = begin + warp; row < end && counter < counters; row += kWarps) {
      EpilogueRow<T> r(p, row, is_aligned);
      r.read_moments();
      A n[kColumns], by_z[kColumns];
      gradient_of(r, r.columns(counter), g.grad, n, by_z);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        by_bias[c] += by_z[c];
        by_weight[c] += by_z[c] * n[c];
      }
    }
    PYG_DIST_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      shared.sums[0][warp][c * kWarp + lane_id()] = by_weight[c];
      shared.sums[1][warp][c * kWarp + lane_id()] = by_bias[c];
    }
    block_sync();
    const int which = thread_id() / (kThreads / 2), place = thread_id() % (kThreads / 2);
    static_assert(kWarp * kColumns == kThreads / 2);
    A sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared.sums[which][w][place];
    const auto columns = columns_of_counter<kColumns>(p.keyed, 0, block_slice() * kWarp + place % kWarp);
    const int c = place / kWarp;
    if (columns.has(c)) static_cast<A*>(g.sums)[(3 * group + which) * num_columns + columns.first + c] = sum;
  }
};

template <class T>
bool is_aligned(const NormReLUDropout& p, const void* other, const void* another) {
  const int64_t n = p.keyed.num_columns;
  Alignment<T> alignment(n);
  alignment.template rows<T>(p.x, n).template rows<T>(other, n).template rows<T>(another, n);
  return are_aligned<T, kColumns>(p.keyed, alignment);
}

}  // namespace

void norm_relu_dropout(const NormReLUDropout& problem, const Queue& queue) {
  for_element(problem.element, [&]<class T>() {
    const int log_lanes = log_lanes_for(counters_of_row<kColumns>(problem.keyed), 1);
    launch(EpilogueRows<T>{problem, log_lanes, is_aligned<T>(problem, problem.y, nullptr)},
           blocks_for(problem.keyed.num_rows << log_lanes, EpilogueRows<T>::kThreads), queue.stream);
  });
}

void norm_relu_dropout_grad(const NormReLUDropoutGrad& problem, const Queue& queue) {
  const Keyed& keyed = problem.forward.keyed;
  const int64_t counters = counters_of_row<kColumns>(keyed);
  const int log_lanes = log_lanes_for(counters, 1);
  for_element(problem.forward.element, [&]<class T>() {
    const bool aligned = is_aligned<T>(problem.forward, problem.grad, problem.grad_x);
    launch(EpilogueGradRows<T>{problem, log_lanes, aligned},
           blocks_for(keyed.num_rows << log_lanes, EpilogueGradRows<T>::kThreads), queue.stream);
    const bool has_sums = problem.forward.weight != nullptr || problem.forward.bias != nullptr;
    if (problem.pass == RowGrad::second || !has_sums) return;
    launch(EpilogueGradSums<T>{problem, counters, aligned}, problem.num_groups, queue.stream,
           blocks_for(counters, kWarp));
  });
}

}  // namespace pyg_dist::gpu
