#include "cuda/kernels.h"
#include "cuda/norm_relu_dropout.cuh"

namespace pyg_dist::gpu {
namespace {

PYG_DIST_DEVICE float root(float value) { return sqrtf(value); }
PYG_DIST_DEVICE double root(double value) { return sqrt(value); }

// A group of lanes for each row: read once where lanes hold it, else up to three times, the first time from far away.
// Lanes behind the last row go along with it and write nothing.
template <class T, int kHeld>
struct EpilogueRows {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;
  using Row = EpilogueRow<T, kHeld>;
  using Columns = typename Row::Columns;
  using Held = A[kHeld > 0 ? kHeld : 1][kColumns];

  NormReLUDropout p;
  int log_lanes;
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t at = (block_id() * kThreads + thread_id()) >> log_lanes, last = p.keyed.num_rows - 1;
    Row r(p, at < last ? at : last, log_lanes, is_aligned);
    const bool writes = at <= last;
    const A count = static_cast<A>(p.keyed.num_columns);
    Held held = {};
    if constexpr (kHeld > 0) r.for_counters([&](int u, const Columns& columns) { r.load(p.x, columns, held[u]); });
    if (p.moments == RowMoments::given) r.read_moments();
    if (p.norm == RowNorm::layer && p.moments != RowMoments::given) {
      r.mean = sum_of(r, held, [](A x) { return x; }) / count;
      if (writes && r.lane == 0) static_cast<A*>(p.mean)[r.row] = r.mean;
    }
    if (p.norm != RowNorm::none && p.moments != RowMoments::given) {
      const A mean_square = sum_of(r, held, [&](A x) { return (x - r.mean) * (x - r.mean); }) / count;
      r.rstd = p.moments == RowMoments::alone ? mean_square : A{1} / root(mean_square + static_cast<A>(p.eps));
      if (writes && r.lane == 0) static_cast<A*>(p.rstd)[r.row] = r.rstd;
    }
    if (p.moments == RowMoments::alone || !writes) return;
    r.for_counters([&](int u, const Columns& columns) {
      A x[kColumns], z[kColumns];
      read(r, held, u, columns, x);
      r.norm(x, x);
      r.affine(columns, x, z);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) x[c] = z[c];
      r.pass(columns, z, x);
      r.store(p.y, columns, x);
    });
  }

 private:
  PYG_DIST_DEVICE void read(const Row& r, const Held& held, int u, const Columns& columns, A (&x)[kColumns]) const {
    if constexpr (kHeld > 0) {
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) x[c] = held[u][c];
    } else {
      r.load(p.x, columns, x);
    }
  }

  template <class F>
  PYG_DIST_DEVICE A sum_of(const Row& r, const Held& held, const F& f) const {
    A sum = 0;
    r.for_counters([&](int u, const Columns& columns) {
      A x[kColumns], part = 0;
      read(r, held, u, columns, x);
      PYG_DIST_UNROLL
      for (int c = 0; c < kColumns; ++c) part += Row::has(columns, c) ? f(x[c]) : A{0};
      sum += part;
    });
    return sum_lanes(sum, log_lanes, kAllLanes);
  }
};

}  // namespace

void norm_relu_dropout(const NormReLUDropout& problem, const Queue& queue) {
  const int log_lanes = log_lanes_for(counters_of_row<kColumns>(problem.keyed), 1);
  for_element(problem.element, [&]<class T>() {
    with_rows<T>(problem, problem.y, nullptr, [&]<int kHeld>(bool is_aligned) {
      using Kernel = EpilogueRows<T, kHeld>;
      launch(Kernel{problem, log_lanes, is_aligned}, blocks_for(problem.keyed.num_rows << log_lanes, Kernel::kThreads),
             queue.stream);
    });
  });
}

}  // namespace pyg_dist::gpu
