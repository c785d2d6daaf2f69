#include <type_traits>

#include "cpu/keyed_words.h"
#include "cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

// Calls body<L>(column) for vectors of L lanes, then for single columns.
template <int L, class Body>
PYG_DIST_INLINE void for_columns(int64_t begin, int64_t end, const Body& body) {
  int64_t column = begin;
  for (; column + L <= end; column += L) body.template operator()<L>(column);
  for (; column < end; ++column) body.template operator()<1>(column);
}

// sum of f(column) over a row: four vectors at once hide the latency of the additions.
template <class A, int L, class Function>
PYG_DIST_INLINE A row_sum(int64_t num_columns, const Function& f) {
  Vec<A, L> sum[4] = {};
  int64_t c = 0;
  for (; c + 4 * L <= num_columns; c += 4 * L) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sum[v] += f.template operator()<L>(c + v * L);
  }
  for (; c + L <= num_columns; c += L) sum[0] += f.template operator()<L>(c);
  A total = horizontal_sum<L, A>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; c < num_columns; ++c) total += f.template operator()<1>(c);
  return total;
}

template <class T>
struct Row {
  using A = accumulator_t<T>;
  const NormReLUDropout& p;
  const A* weight;
  const A* bias;
  const T* x = nullptr;
  A mean = 0, rstd = 1;

  explicit Row(const NormReLUDropout& problem)
      : p(problem), weight(static_cast<const A*>(problem.weight)), bias(static_cast<const A*>(problem.bias)) {}

  void take(int64_t row) { x = static_cast<const T*>(p.x) + row * p.keyed.num_columns; }

  void read_moments(int64_t row) {
    if (p.norm == RowNorm::layer) mean = static_cast<const A*>(p.mean)[row];
    if (p.norm != RowNorm::none) rstd = static_cast<const A*>(p.rstd)[row];
  }

  void compute_moments(int64_t row) {
    if (p.norm == RowNorm::none) return;
    if (p.moments == RowMoments::given) return read_moments(row);
    constexpr int L = kLanes<A>;
    const int64_t n = p.keyed.num_columns;
    if (p.norm == RowNorm::layer) {
      mean = row_sum<A, L>(n, [&]<int M>(int64_t c) { return load<M>(x + c); }) / static_cast<A>(n);
      static_cast<A*>(p.mean)[row] = mean;
    }
    const A squares = row_sum<A, L>(n, [&]<int M>(int64_t c) {
      const Vec<A, M> deviation = load<M>(x + c) - mean;
      return deviation * deviation;
    });
    if (p.moments == RowMoments::alone) {
      static_cast<A*>(p.rstd)[row] = squares / static_cast<A>(n);
      return;
    }
    const A variance = squares / static_cast<A>(n) + static_cast<A>(p.eps);
    rstd = A{1} / (sizeof(A) == 8 ? static_cast<A>(__builtin_sqrt(variance)) : __builtin_sqrtf(variance));
    static_cast<A*>(p.rstd)[row] = rstd;
  }

  template <int L>
  PYG_DIST_INLINE Vec<A, L> normed(int64_t c) const {
    return (load<L>(x + c) - mean) * rstd;
  }

  template <int L>
  PYG_DIST_INLINE Vec<A, L> affine(int64_t c, Vec<A, L> n) const {
    if (weight != nullptr) n *= load<L>(weight + c);
    if (bias != nullptr) n += load<L>(bias + c);
    return n;
  }

  // What v becomes: zero where z is not let through, which a NaN is, and times zero where the word drops it.
  template <int L>
  PYG_DIST_INLINE Vec<A, L> passed(Vec<A, L> v, Vec<A, L> z, const uint32_t* word) const {
    using Mask = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
    const A scale = static_cast<A>(p.scale);
    if (p.relu) v = z <= A{0} ? Vec<A, L>{} : v;
    if (word == nullptr) return v * scale;
    if constexpr (L == 1) {
      return v * (*word >= p.threshold ? scale : A{0});
    } else {
      return v * (convert<Mask, L, int32_t>(load<L>(word) >= p.threshold) ? Vec<A, L>{} + scale : Vec<A, L>{});
    }
  }
};

// Calls use(row, column, count, words or null) for runs of columns, row after row.
template <class Use>
PYG_DIST_INLINE void for_each_part(const NormReLUDropout& p, int64_t row_begin, int64_t row_end, const Use& use) {
  if (p.keyed.key != nullptr) {
    for_each_run(p.keyed, Stream::dropout, 1, row_begin, row_end, use);
  } else {
    for (int64_t row = row_begin; row < row_end; ++row) {
      use(row, int64_t{0}, p.keyed.num_columns, static_cast<const uint32_t*>(nullptr));
    }
  }
}

template <class T>
void forward(const NormReLUDropout& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  Row<T> r(p);
  if (p.moments == RowMoments::alone) {
    for (int64_t row = row_begin; row < row_end; ++row) {
      r.take(row);
      r.compute_moments(row);
    }
    return;
  }
  for_each_part(p, row_begin, row_end, [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    if (column == 0) {
      r.take(row);
      r.compute_moments(row);
    }
    T* y = static_cast<T*>(p.y) + row * p.keyed.num_columns;
    for_columns<kLanes<A>>(column, column + count, [&]<int L>(int64_t c) {
      const Vec<A, L> z = r.template affine<L>(c, r.template normed<L>(c));
      store<L>(y + c, r.template passed<L>(z, z, words == nullptr ? nullptr : words + (c - column)));
    });
  });
}

// The gradient by x of a row, from that by n: its mean, and the mean of its product with n, go to zero.
template <class T, class N>
PYG_DIST_INLINE void gradient_by_x(const Row<T>& r, const N* by_n, accumulator_t<T> mean, accumulator_t<T> slope,
                                   T* by_x) {
  for_columns<kLanes<accumulator_t<T>>>(0, r.p.keyed.num_columns, [&]<int M>(int64_t c) {
    store<M>(by_x + c, (load<M>(by_n + c) - mean - r.template normed<M>(c) * slope) * r.rstd);
  });
}

template <class T>
void second_pass(const NormReLUDropoutGrad& g, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  const NormReLUDropout& p = g.forward;
  Row<T> r(p);
  for (int64_t row = row_begin; row < row_end; ++row) {
    r.take(row);
    r.read_moments(row);
    T* by_x = static_cast<T*>(g.grad_x) + row * p.keyed.num_columns;
    const A* means = static_cast<const A*>(g.by_row) + 2 * row;
    gradient_by_x(r, by_x, means[0], means[1], by_x);
  }
}

template <class T>
void backward(const NormReLUDropoutGrad& g, int64_t group) {
  using A = accumulator_t<T>;
  constexpr int L = kLanes<A>;
  const NormReLUDropout& p = g.forward;
  const int64_t num_rows = p.keyed.num_rows, num_columns = p.keyed.num_columns;
  const int64_t row_begin = group * num_rows / g.num_groups, row_end = (group + 1) * num_rows / g.num_groups;
  if (g.pass == RowGrad::second) return second_pass<T>(g, row_begin, row_end);
  auto* by_weight = static_cast<A*>(g.sums) + 3 * group * num_columns;
  auto *by_bias = by_weight + num_columns, *by_normed = by_bias + num_columns;  // the last: of one row
  Row<T> r(p);
  for_each_part(p, row_begin, row_end, [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    if (column == 0) {
      r.take(row);
      r.read_moments(row);
    }
    const T* grad = static_cast<const T*>(g.grad) + row * num_columns;
    for_columns<L>(column, column + count, [&]<int M>(int64_t c) {
      const Vec<A, M> n = r.template normed<M>(c), z = r.template affine<M>(c, n);
      const Vec<A, M> by_z =
          r.template passed<M>(load<M>(grad + c), z, words == nullptr ? nullptr : words + (c - column));
      store<M>(by_bias + c, load<M>(by_bias + c) + by_z);
      store<M>(by_weight + c, load<M>(by_weight + c) + by_z * n);
      store<M>(by_normed + c, r.weight == nullptr ? by_z : by_z * load<M>(r.weight + c));
    });
    if (column + count < num_columns) return;
    // The row is complete.
    A mean = 0, slope = 0;  // sums of by_normed, and of its product with n
    if (p.norm == RowNorm::layer) {
      mean = row_sum<A, L>(num_columns, [&]<int M>(int64_t c) { return load<M>(by_normed + c); });
    }
    if (p.norm != RowNorm::none) {
      slope = row_sum<A, L>(num_columns,
                            [&]<int M>(int64_t c) { return load<M>(by_normed + c) * r.template normed<M>(c); });
    }
    T* by_x = static_cast<T*>(g.grad_x) + row * num_columns;
    if (g.pass == RowGrad::first) {
      A* of_row = static_cast<A*>(g.by_row) + 2 * row;
      of_row[0] = mean;
      of_row[1] = slope;
    }
    if (p.norm == RowNorm::none || g.pass == RowGrad::first) {  // not 0 * n, which is NaN where x is infinite
      for_columns<L>(0, num_columns, [&]<int M>(int64_t c) { store<M>(by_x + c, load<M>(by_normed + c)); });
      return;
    }
    gradient_by_x(r, by_normed, mean / static_cast<A>(num_columns), slope / static_cast<A>(num_columns), by_x);
  });
}

}  // namespace

void epilogue_rows(const NormReLUDropout& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return forward<T>(problem, row_begin, row_end); });
}

void epilogue_grad_groups(const NormReLUDropoutGrad& problem, int64_t group_begin, int64_t group_end) {
  for (int64_t group = group_begin; group < group_end; ++group) {
    for_element(problem.forward.element, [&]<class T>() { backward<T>(problem, group); });
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
