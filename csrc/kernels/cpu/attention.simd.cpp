#include "kernels/cpu/attention.h"

#include "kernels/cpu/keyed_words.h"
#include "kernels/cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kPrefetchEdges = 32;  // as in spmm_csr

// ---- Columns of one head
// -----------------------------------------------------------------------------------------------

// Calls f.operator()<L>(c) for vectors of columns [c, c + L) of n: full ones, then shorter and shorter ones.
template <int L, class F>
PYG_DIST_INLINE void for_rest(int64_t c, int64_t n, const F& f) {
  if constexpr (L >= 1) {
    if (n - c >= L) {
      f.template operator()<L>(c);
      c += L;
    }
    for_rest<L / 2>(c, n, f);
  }
}

template <class A, class F>
PYG_DIST_INLINE void for_vectors(int64_t n, const F& f) {
  constexpr int L = kLanes<A>;
  int64_t c = 0;
  for (; c + L <= n; c += L) f.template operator()<L>(c);
  if (c < n) for_rest<L / 2>(c, n, f);
}

struct Plus {
  template <class V>
  PYG_DIST_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};

// The sum over n columns of what f gives for each.
template <class A, class F>
PYG_DIST_INLINE A sum_columns(int64_t n, const F& f) {
  constexpr int L = kLanes<A>;
  Vec<A, L> sum = {};
  A rest = 0;
  for_vectors<A>(n, [&]<int K>(int64_t c) __attribute__((always_inline)) {
    if constexpr (K == L) {
      sum += f.template operator()<K>(c);
    } else {
      rest += reduce<K, A>(f.template operator()<K>(c), Plus{});
    }
  });
  return n >= L ? reduce<L, A>(sum, Plus{}) + rest : rest;
}

template <class A, class T, class U>
PYG_DIST_INLINE A dot(const T* a, const U* b, int64_t n) {
  return sum_columns<A>(
      n, [&]<int K>(int64_t c) __attribute__((always_inline)) { return load<K>(a + c) * load<K>(b + c); });
}

// sum += x * factor
template <class A, class T>
PYG_DIST_INLINE void add(A* sum, const T* x, A factor, int64_t n) {
  for_vectors<A>(n, [&]<int K>(int64_t c) __attribute__((always_inline)) {
    store<K>(sum + c, load<K>(sum + c) + load<K>(x + c) * factor);
  });
}

// sum += factor[b] * row(b), one b after another: sums of a few vectors of columns stay in registers meanwhile.
template <class A, class Row>
PYG_DIST_INLINE void add_rows(A* sum, const A* factor, int64_t count, int64_t n, const Row& row) {
  constexpr int L = kLanes<A>;
  constexpr int kVectors = 4;
  int64_t c = 0;
  for (; c + kVectors * L <= n; c += kVectors * L) {
    Vec<A, L> sums[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) sums[k] = load<L>(sum + c + k * L);
    for (int64_t b = 0; b < count; ++b) {
      const auto* x = row(b) + c;
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) sums[k] += load<L>(x + k * L) * factor[b];
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) store<L>(sum + c + k * L, sums[k]);
  }
  for_vectors<A>(n - c, [&]<int K>(int64_t rest) __attribute__((always_inline)) {
    Vec<A, K> sums = load<K>(sum + c + rest);
    for (int64_t b = 0; b < count; ++b) sums += load<K>(row(b) + c + rest) * factor[b];
    store<K>(sum + c + rest, sums);
  });
}

// sum and the numbers, one after another.
template <class A>
PYG_DIST_INLINE A total_of(A sum, const A* numbers, int64_t count) {
  for (int64_t b = 0; b < count; ++b) sum += numbers[b];
  return sum;
}

// The largest of both; NaN if one of them is.
struct Most {
  template <class V>
  PYG_DIST_INLINE V operator()(V a, V b) const {
    return (b > a) | (b != b) ? b : a;
  }
};

template <class A, int K>
PYG_DIST_INLINE Vec<A, K> leaky_slope(Vec<A, K> u, A slope) {
  return u > 0 ? Vec<A, K>{} + A{1} : Vec<A, K>{} + slope;
}

// Of a choice between u and u * slope GCC 12 makes wrong sums in half a vector of SVE with 512 bits.
template <class A, int K>
PYG_DIST_INLINE Vec<A, K> leaky(Vec<A, K> u, A slope) {
  return u * leaky_slope<A, K>(u, slope);
}

// exp(x) for x <= 0 or NaN, to an ulp or two: 2^n times the Taylor series of |r| <= ln(2) / 2. Zero where the result
// would be denormal.
template <class A, int L>
PYG_DIST_INLINE Vec<A, L> exp_of(Vec<A, L> x) {
  constexpr bool kDouble = sizeof(A) == 8;
  using Int = std::conditional_t<kDouble, int64_t, int32_t>;
  constexpr int kMantissa = kDouble ? 52 : 23, kTerms = kDouble ? 13 : 7;
  constexpr A kLeast = kDouble ? A(-708) : A(-87);
  constexpr A kShift = kDouble ? A(0x1.8p52) : A(0x1.8p23);  // x + kShift has the nearest integer in its lowest bits
  constexpr A kLog2E = A(1.44269504088896340736);
  // ln(2) in two parts, the first of few bits, so that its product with n is exact.
  constexpr A kHigh = kDouble ? A(6.93147180369123816490e-01) : A(0x1.62e4p-1);
  constexpr A kLow = kDouble ? A(1.90821492927058770002e-10) : A(0x1.7f7d1cp-20);
  const Vec<A, L> clamped = x < kLeast ? Vec<A, L>{} + kLeast : x;
  const Vec<A, L> shifted = clamped * kLog2E + kShift;
  const Vec<A, L> n = shifted - kShift;
  const Vec<A, L> r = (clamped - n * kHigh) - n * kLow;
  Vec<A, L> series = Vec<A, L>{} + A{1};
#pragma GCC unroll 13
  for (int k = kTerms; k >= 1; --k) series = series * r * (A{1} / static_cast<A>(k)) + A{1};
  using Bits = std::conditional_t<kDouble, uint64_t, uint32_t>;
  constexpr Bits kBias = kDouble ? 1023 : 127;
  const auto power = (bit_cast<Vec<Bits, L>>(shifted) + kBias) << kMantissa;
  const Vec<A, L> result = series * bit_cast<Vec<A, L>>(power);
  static_assert(sizeof(Int) == sizeof(A));
  return x < kLeast ? Vec<A, L>{} : result;
}

PYG_DIST_INLINE float log_of(float x) { return __builtin_logf(x); }
PYG_DIST_INLINE double log_of(double x) { return __builtin_log(x); }

// ---- One edge, and a batch of them
// ---------------------------------------------------------------------------------------

template <class T, AttentionForm kForm>
struct Edges {
  using A = accumulator_t<T>;
  static constexpr int L = kLanes<A>;
  static constexpr int64_t B = kAttentionBatch;

  const Attention& p;
  const int64_t num_heads, num_columns, num_edge_columns, row;
  const A slope, scale;
  A *const logit, *const weight, *const keep, *const mean, *const slope_of, *const columns, *const sums;
  int64_t words_of_edge;

  explicit Edges(const Attention& attention)
      : p(attention),
        num_heads(p.num_heads),
        num_columns(p.num_columns),
        num_edge_columns(p.num_edge_columns),
        row(num_heads * num_columns),
        slope(static_cast<A>(p.slope)),
        scale(static_cast<A>(p.scale)),
        logit(static_cast<A*>(p.scratch)),
        weight(logit + num_heads * B),
        keep(weight + num_heads * B),
        mean(keep + num_heads * B),
        slope_of(mean + num_heads * B),
        columns(slope_of + num_heads * B),
        sums(columns + row),
        words_of_edge((num_heads + 3) / 4) {
    for (int64_t k = 0; k < num_heads * B; ++k) keep[k] = A{1};
  }

  // How many edges are looked at together: words of dropout for all of them lie in one batch of numbers.
  int64_t batch() const {
    const int64_t most = p.edge_key == nullptr ? B : kBatch / words_of_edge;
    return most < B ? most : B;
  }

  PYG_DIST_INLINE const T* value(int64_t source) const {
    return static_cast<const T*>(p.value) + source * p.value_stride;
  }
  PYG_DIST_INLINE const T* key(int64_t source) const { return static_cast<const T*>(p.key) + source * p.key_stride; }
  PYG_DIST_INLINE const T* query(int64_t target) const {
    return static_cast<const T*>(p.query) + target * p.query_stride;
  }
  PYG_DIST_INLINE const T* edge_attr(int64_t place) const {
    return static_cast<const T*>(p.edge_attr) + place * p.edge_attr_stride;
  }
  PYG_DIST_INLINE const T* edge_weight(int64_t target) const {
    return static_cast<const T*>(p.edge_weight) + target * p.edge_weight_stride;
  }

  // columns[h, c] = query + value (+ edge): what `dynamic` takes the leaky ReLU of.
  PYG_DIST_INLINE void add_ends(int64_t target, int64_t source, int64_t place) const {
    const T *x = value(source), *q = query(target);
    const auto* w = static_cast<const A*>(p.edge_weight);
    for_vectors<A>(row, [&]<int K>(int64_t c) __attribute__((always_inline)) {
      Vec<A, K> sum = load<K>(x + c) + load<K>(q + c);
      if (num_edge_columns > 0) {
        const T* attr = edge_attr(place);
        for (int64_t d = 0; d < num_edge_columns; ++d) sum += load<K>(w + d * row + c) * load<1>(attr + d);
      }
      store<K>(columns + c, sum);
    });
  }

  // logit[h, b] of one edge; of `additive` before the leaky ReLU, which whole vectors of edges take.
  PYG_DIST_INLINE void set_logits(int64_t target, int64_t source, int64_t place, int64_t b) const {
    if constexpr (kForm == AttentionForm::additive) {
      const T* k = key(source);
      for (int64_t h = 0; h < num_heads; ++h) {
        A u = load<1>(k + h);
        if (p.query != nullptr) u += load<1>(query(target) + h);
        if (num_edge_columns > 0) {
          u += dot<A>(edge_weight(target) + h * num_edge_columns, edge_attr(place), num_edge_columns);
        }
        logit[h * B + b] = u;
      }
    } else if constexpr (kForm == AttentionForm::dot) {
      const T *k = key(source), *q = query(target);
      for (int64_t h = 0; h < num_heads; ++h) {
        A u = dot<A>(k + h * num_columns, q + h * num_columns, num_columns);
        if (num_edge_columns > 0) {
          u += dot<A>(edge_weight(target) + h * num_edge_columns, edge_attr(place), num_edge_columns);
        }
        logit[h * B + b] = u * scale;
      }
    } else {
      add_ends(target, source, place);
      const auto* att = static_cast<const A*>(p.att);
      for (int64_t h = 0; h < num_heads; ++h) {
        const A *u = columns + h * num_columns, *a = att + h * num_columns;
        logit[h * B + b] = sum_columns<A>(num_columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
          return load<K>(a + c) * leaky<A, K>(load<K>(u + c), slope);
        });
      }
    }
  }

  // keep[h, b] of the edges [begin, begin + count).
  void set_dropout(int64_t begin, int64_t count) const {
    if (p.edge_key == nullptr) return;
    Batch words;
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t k = 0; k < words_of_edge; ++k) {
        words.key[b * words_of_edge + k] = static_cast<uint64_t>(p.edge_key[p.edge[begin + b]]);
        words.block[b * words_of_edge + k] = static_cast<uint64_t>(k);
      }
    }
    for (int64_t l = count * words_of_edge; l % Batch::L != 0; ++l) words.key[l] = words.block[l] = 0;
    words.template draw<Philox::kRounds>(count * words_of_edge, p.seed, Stream::dropout);
    const A factor = static_cast<A>(p.dropout_scale);
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t h = 0; h < num_heads; ++h) {
        keep[h * B + b] = words.words[4 * b * words_of_edge + h] >= p.threshold ? factor : A{0};
      }
    }
  }

  // Asks for rows of an edge some way ahead.
  template <class U>
  PYG_DIST_INLINE void prefetch_row(const U* rows, int64_t stride, int64_t width, int64_t e) const {
    const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
    prefetch(rows + p.col[ahead] * stride, width * static_cast<int64_t>(sizeof(U)));
  }
};

template <class T, class A>
PYG_DIST_INLINE void write_row(void* out, bool wide, int64_t row, const A* sums, int64_t width) {
  if (wide) {
    A* to = static_cast<A*>(out) + row * width;
    for_vectors<A>(width,
                   [&]<int K>(int64_t c) __attribute__((always_inline)) { store<K>(to + c, load<K>(sums + c)); });
  } else {
    T* to = static_cast<T*>(out) + row * width;
    for_vectors<A>(width,
                   [&]<int K>(int64_t c) __attribute__((always_inline)) { store<K>(to + c, load<K>(sums + c)); });
  }
}

template <class A>
PYG_DIST_INLINE void clear(A* numbers, int64_t count) {
  for (int64_t k = 0; k < count; ++k) numbers[k] = 0;
}

// ---- Forward
// -------------------------------------------------------------------------------------------------------------

template <class T, AttentionForm kForm>
void rows_of_form(const AttentionForward& f, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  constexpr int64_t B = E::B, L = E::L;
  const Attention& p = f.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns;
  const int64_t edge_columns = kForm == AttentionForm::dot ? edges.num_edge_columns : 0;
  A *const y = edges.sums, *const z = y + edges.row, *const largest = z + heads * edge_columns;
  A* const sum = largest + heads;
  const int64_t batch = edges.batch();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t target = p.first_row + row, end = p.rowptr[row + 1];
    clear(y, edges.row + heads * edge_columns);
    for (int64_t h = 0; h < heads; ++h) {
      largest[h] = -__builtin_inf();
      sum[h] = 0;
    }
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      const int64_t padded = (count + L - 1) / L * L;
      for (int64_t b = 0; b < count; ++b) {
        const int64_t e = begin + b;
        edges.prefetch_row(edges.value(0), p.value_stride, edges.row, e);
        if constexpr (kForm == AttentionForm::dot) edges.prefetch_row(edges.key(0), p.key_stride, edges.row, e);
        if constexpr (kForm == AttentionForm::additive) edges.prefetch_row(edges.key(0), p.key_stride, heads, e);
        edges.set_logits(target, p.col[e], p.edge[e], b);
      }
      edges.set_dropout(begin, count);
      for (int64_t h = 0; h < heads; ++h) {
        A* const s = edges.logit + h * B;
        if constexpr (kForm == AttentionForm::additive) {
          for (int64_t b = 0; b < padded; b += L) store<L>(s + b, leaky<A, L>(load<L>(s + b), edges.slope));
        }
        for (int64_t b = count; b < padded; ++b) s[b] = -__builtin_inf();
        Vec<A, L> of_lanes = Vec<A, L>{} - static_cast<A>(__builtin_inf());
        for (int64_t b = 0; b < padded; b += L) of_lanes = Most{}(of_lanes, load<L>(s + b));
        const A most = Most{}(largest[h], reduce<L, A>(of_lanes, Most{}));
        if (!(most == largest[h])) {
          const A factor = sum[h] > 0 ? exp_of<A, 1>(largest[h] - most) : A{0};
          largest[h] = most;
          sum[h] *= factor;
          for (int64_t c = 0; c < columns; ++c) y[h * columns + c] *= factor;
          for (int64_t d = 0; d < edge_columns; ++d) z[h * edge_columns + d] *= factor;
        }
        const A base = most == -__builtin_inf() ? A{0} : most;  // of -infinities alone: powers are zero, not NaN
        for (int64_t b = 0; b < padded; b += L) store<L>(s + b, exp_of<A, L>(load<L>(s + b) - base));
        sum[h] = total_of(sum[h], s, count);
        for (int64_t b = 0; b < padded; b += L) store<L>(s + b, load<L>(s + b) * load<L>(edges.keep + h * B + b));
        const auto value = [&](int64_t b) { return edges.value(p.col[begin + b]) + h * columns; };
        add_rows<A>(y + h * columns, s, count, columns, value);
        const auto attr = [&](int64_t b) { return edges.edge_attr(p.edge[begin + b]); };
        if (edge_columns > 0) add_rows<A>(z + h * edge_columns, s, count, edge_columns, attr);
      }
    }
    const bool may_be_zero = p.rowptr[row] == end || is_part(f, row);
    for (int64_t h = 0; h < heads; ++h) {
      const A factor = may_be_zero && sum[h] == 0 ? A{1} : A{1} / sum[h];
      for (int64_t c = 0; c < columns; ++c) y[h * columns + c] *= factor;
      for (int64_t d = 0; d < edge_columns; ++d) z[h * edge_columns + d] *= factor;
      static_cast<A*>(f.lse)[row * heads + h] = sum[h] == 0 ? largest[h] : largest[h] + log_of(sum[h]);
    }
    write_row<T, A>(f.y, f.wide, row, y, edges.row);
    if (edge_columns > 0) write_row<T, A>(f.z, f.wide, row, z, heads * edge_columns);
  }
}

// ---- Gradients
// -----------------------------------------------------------------------------------------------------------

// logit[h, b] and weight[h, b] of a batch: ds and k p. `other` is the end that col names.
template <class T, AttentionForm kForm, bool kBySource>
PYG_DIST_INLINE void set_gradients(const AttentionGrad& g, const Edges<T, kForm>& edges, int64_t own, int64_t begin,
                                   int64_t count) {
  using A = accumulator_t<T>;
  constexpr int64_t B = kAttentionBatch;
  constexpr int L = kLanes<A>;
  const Attention& p = g.attention;
  const int64_t heads = edges.num_heads, columns = edges.num_columns;
  const auto* grad_y = static_cast<const T*>(g.grad_y);
  const auto* grad_z = static_cast<const T*>(g.grad_z);
  const auto* lse = static_cast<const A*>(g.lse);
  const auto* delta = static_cast<const A*>(g.delta);
  edges.set_dropout(begin, count);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t e = begin + b, other = p.col[e], place = p.edge[e];
    const int64_t target = kBySource ? other : own, source = kBySource ? own : other;
    if constexpr (kBySource) {
      edges.prefetch_row(grad_y, edges.row, edges.row, e);
      edges.prefetch_row(lse, heads, heads, e);
      edges.prefetch_row(delta, heads, heads, e);
      if (p.query != nullptr) edges.prefetch_row(edges.query(0), p.query_stride, logit_columns(p), e);
    } else {
      edges.prefetch_row(edges.value(0), p.value_stride, edges.row, e);
      if constexpr (kForm == AttentionForm::dot) edges.prefetch_row(edges.key(0), p.key_stride, edges.row, e);
      if constexpr (kForm == AttentionForm::additive) edges.prefetch_row(edges.key(0), p.key_stride, heads, e);
    }
    edges.set_logits(target, source, place, b);
    const T *row = grad_y + target * edges.row, *x = edges.value(source);
    for (int64_t h = 0; h < heads; ++h) {
      if constexpr (kForm == AttentionForm::additive) {
        edges.slope_of[h * B + b] = lse[target * heads + h];  // until there is a whole vector
      } else {
        edges.logit[h * B + b] -= lse[target * heads + h];
      }
      edges.mean[h * B + b] = delta[target * heads + h];
      edges.weight[h * B + b] = dot<A>(row + h * columns, x + h * columns, columns);
      if (grad_z != nullptr) {
        const T* of_edge = grad_z + (target * heads + h) * edges.num_edge_columns;
        edges.weight[h * B + b] += dot<A>(of_edge, edges.edge_attr(place), edges.num_edge_columns);
      }
    }
  }
  const int64_t padded = (count + L - 1) / L * L;
  for (int64_t h = 0; h < heads; ++h) {
    A *const s = edges.logit + h * B, *const w = edges.weight + h * B;
    for (int64_t b = 0; b < padded; b += L) {
      Vec<A, L> logit = load<L>(s + b), slope = {};
      if constexpr (kForm == AttentionForm::additive) {
        slope = leaky_slope<A, L>(logit, edges.slope);
        logit = logit * slope - load<L>(edges.slope_of + h * B + b);
      }
      const Vec<A, L> k = load<L>(edges.keep + h * B + b), probability = exp_of<A, L>(logit);
      Vec<A, L> ds = probability * (k * load<L>(w + b) - load<L>(edges.mean + h * B + b));
      if constexpr (kForm == AttentionForm::additive) ds *= slope;
      if constexpr (kForm == AttentionForm::dot) ds *= edges.scale;
      store<L>(s + b, ds);
      store<L>(w + b, k * probability);
    }
  }
}

template <class T, AttentionForm kForm>
void target_rows_of_form(const AttentionGrad& g, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  constexpr int64_t B = E::B;
  const Attention& p = g.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns, edge_columns = edges.num_edge_columns;
  const int64_t query_columns = logit_columns(p);
  const bool weighs_edges = kForm != AttentionForm::dynamic && edge_columns > 0;
  A *const by_query = edges.sums, *const by_edge_weight = by_query + query_columns;
  auto* const by_attr = static_cast<T*>(g.by_edge_attr);
  auto* const by_parameters = static_cast<A*>(g.by_parameters);
  const auto* att = static_cast<const A*>(p.att);
  const int64_t batch = edges.batch();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t target = p.first_row + row, end = p.rowptr[row + 1];
    clear(by_query, query_columns);
    if (weighs_edges) clear(by_edge_weight, heads * edge_columns);
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      set_gradients<T, kForm, false>(g, edges, target, begin, count);
      for (int64_t h = 0; h < heads; ++h) {
        const A* const ds = edges.logit + h * B;
        if constexpr (kForm == AttentionForm::additive) by_query[h] = total_of(by_query[h], ds, count);
        if constexpr (kForm == AttentionForm::dot) {
          const auto key = [&](int64_t b) { return edges.key(p.col[begin + b]) + h * columns; };
          add_rows<A>(by_query + h * columns, ds, count, columns, key);
        }
        if (!weighs_edges) continue;
        const auto attr = [&](int64_t b) { return edges.edge_attr(p.edge[begin + b]); };
        add_rows<A>(by_edge_weight + h * edge_columns, ds, count, edge_columns, attr);
      }
      if (kForm != AttentionForm::dynamic && by_attr == nullptr) continue;
      for (int64_t b = 0; b < count; ++b) {
        const int64_t place = p.edge[begin + b];
        if constexpr (kForm == AttentionForm::dynamic) {
          edges.add_ends(target, p.col[begin + b], place);
          for (int64_t h = 0; h < heads; ++h) {
            const A ds = edges.logit[h * B + b];
            const int64_t at = h * columns;
            A* const u = edges.columns + at;
            for_vectors<A>(columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
              const Vec<A, K> before = load<K>(u + c);
              if (by_parameters != nullptr) {
                A* const to = by_parameters + at + c;
                store<K>(to, load<K>(to) + leaky<A, K>(before, edges.slope) * ds);
              }
              const Vec<A, K> by_u = load<K>(att + at + c) * leaky_slope<A, K>(before, edges.slope) * ds;
              store<K>(by_query + at + c, load<K>(by_query + at + c) + by_u);
              store<K>(u + c, by_u);
            });
          }
          if (edge_columns > 0 && by_parameters != nullptr) {
            for (int64_t d = 0; d < edge_columns; ++d) {
              add<A>(by_parameters + (1 + d) * edges.row, edges.columns, load<1>(edges.edge_attr(place) + d),
                     edges.row);
            }
          }
        }
        if (by_attr == nullptr) continue;
        for (int64_t d = 0; d < edge_columns; ++d) {
          A sum = 0;
          if constexpr (kForm == AttentionForm::dynamic) {
            sum = dot<A>(static_cast<const A*>(p.edge_weight) + d * edges.row, edges.columns, edges.row);
          } else {
            for (int64_t h = 0; h < heads; ++h) {
              sum += edges.logit[h * B + b] * load<1>(edges.edge_weight(target) + h * edge_columns + d);
              if (g.grad_z != nullptr) {
                const T* of_edge = static_cast<const T*>(g.grad_z) + (target * heads + h) * edge_columns;
                sum += edges.weight[h * B + b] * load<1>(of_edge + d);
              }
            }
          }
          store<1>(by_attr + place * edge_columns + d, sum);
        }
      }
    }
    if (g.by_query != nullptr) write_row<T, A>(g.by_query, g.wide, row, by_query, query_columns);
    if (g.by_edge_weight != nullptr) {
      write_row<T, A>(g.by_edge_weight, g.wide, row, by_edge_weight, heads * edge_columns);
    }
  }
}

template <class T, AttentionForm kForm>
void source_rows_of_form(const AttentionGrad& g, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  constexpr int64_t B = E::B;
  const Attention& p = g.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns, num_key_columns = key_columns(p);
  A *const by_value = edges.sums, *const by_key = by_value + edges.row;
  const auto* grad_y = static_cast<const T*>(g.grad_y);
  const auto* att = static_cast<const A*>(p.att);
  const int64_t batch = edges.batch();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t source = p.first_row + row, end = p.rowptr[row + 1];
    clear(by_value, edges.row + num_key_columns);
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      set_gradients<T, kForm, true>(g, edges, source, begin, count);
      if constexpr (kForm == AttentionForm::dynamic) {
        for (int64_t b = 0; b < count; ++b) {
          const int64_t target = p.col[begin + b];
          const T* grad = grad_y + target * edges.row;
          edges.add_ends(target, source, p.edge[begin + b]);
          for (int64_t h = 0; h < heads; ++h) {
            const A ds = edges.logit[h * B + b], weight = edges.weight[h * B + b];
            const int64_t at = h * columns;
            for_vectors<A>(columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
              const Vec<A, K> slope = leaky_slope<A, K>(load<K>(edges.columns + at + c), edges.slope);
              store<K>(by_value + at + c, load<K>(by_value + at + c) + load<K>(grad + at + c) * weight +
                                              load<K>(att + at + c) * slope * ds);
            });
          }
        }
        continue;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = h * columns;
        const A* const ds = edges.logit + h * B;
        const auto grad = [&](int64_t b) { return grad_y + p.col[begin + b] * edges.row + at; };
        add_rows<A>(by_value + at, edges.weight + h * B, count, columns, grad);
        if constexpr (kForm == AttentionForm::additive) by_key[h] = total_of(by_key[h], ds, count);
        if constexpr (kForm == AttentionForm::dot) {
          const auto query = [&](int64_t b) { return edges.query(p.col[begin + b]) + at; };
          add_rows<A>(by_key + at, ds, count, columns, query);
        }
      }
    }
    write_row<T, A>(g.by_value, g.wide, row, by_value, edges.row);
    if (num_key_columns > 0) write_row<T, A>(g.by_key, g.wide, row, by_key, num_key_columns);
  }
}

// Calls f.operator()<T, form>().
template <class F>
PYG_DIST_INLINE void for_form(const Attention& p, const F& f) {
  const auto of_type = [&]<class T>() {
    switch (p.form) {
      case AttentionForm::additive:
        return f.template operator()<T, AttentionForm::additive>();
      case AttentionForm::dynamic:
        return f.template operator()<T, AttentionForm::dynamic>();
      case AttentionForm::dot:
        return f.template operator()<T, AttentionForm::dot>();
    }
  };
  return for_element(p.element, of_type);
}

}  // namespace

void attention_rows(const AttentionForward& problem, int64_t begin, int64_t end) {
  for_form(problem.attention, [&]<class T, AttentionForm kForm>() { rows_of_form<T, kForm>(problem, begin, end); });
}

void attention_target_rows(const AttentionGrad& problem, int64_t begin, int64_t end) {
  for_form(problem.attention,
           [&]<class T, AttentionForm kForm>() { target_rows_of_form<T, kForm>(problem, begin, end); });
}

void attention_source_rows(const AttentionGrad& problem, int64_t begin, int64_t end) {
  for_form(problem.attention,
           [&]<class T, AttentionForm kForm>() { source_rows_of_form<T, kForm>(problem, begin, end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
