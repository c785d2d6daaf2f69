// The columns of one head of attention: dot products, sums and powers; only for .simd.cpp files.
#pragma once

#include "cpu/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

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

// The G V sums of V vectors, which have the lanes of G sums each in runs of equal length.
template <int L, class A, int G, int V>
PYG_DIST_INLINE Vec<A, G * V> sums_of_runs(const Vec<A, L>* v) {
  if constexpr (V == 1) {
    return fold<L, A, G / 2>(v[0]);
  } else {
    Vec<A, L> joined[V / 2];
    for (int k = 0; k < V / 2; ++k) joined[k] = join<L, A, G>(v[2 * k], v[2 * k + 1]);
    return sums_of_runs<L, A, 2 * G, V / 2>(joined);
  }
}

// sum[h] = the sum over the n columns of head h of what f gives for each, as sum_columns makes it. Several heads go
// through their last additions together.
template <class A, class F>
PYG_DIST_INLINE void sum_heads(A* sum, int64_t heads, int64_t n, const F& f) {
  constexpr int L = kLanes<A>;
  int64_t h = 0;
  if (L >= 4 && n >= L) {
    for (; h + 4 <= heads; h += 4) {
      Vec<A, L> sums[4] = {};
      int64_t c = h * n;
      for (const int64_t end = c + n / L * L; c < end; c += L) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sums[k] += f.template operator()<L>(c + k * n);
      }
      if constexpr (L >= 4) store<4>(sum + h, sums_of_runs<L, A, 1, 4>(sums));
      if (n % L == 0) continue;
      for (int k = 0; k < 4; ++k) {
        A rest = 0;
        for_rest<L / 2>(0, n % L, [&]<int K>(int64_t r) __attribute__((always_inline)) {
          rest += reduce<K, A>(f.template operator()<K>(c + k * n + r), Plus{});
        });
        sum[h + k] += rest;
      }
    }
  }
  if (L >= 4 && 2 * n == L) {
    constexpr int V = L / 2 < 4 ? L / 2 : 4;
    for (; h + 2 * V <= heads; h += 2 * V) {
      Vec<A, L> products[V];
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) products[k] = f.template operator()<L>(h * n + k * L);
      if constexpr (L >= 4) store<2 * V>(sum + h, sums_of_runs<L, A, 2, V>(products));
    }
  }
  for (; h < heads; ++h) {
    sum[h] = sum_columns<A>(
        n, [&]<int K>(int64_t c) __attribute__((always_inline)) { return f.template operator()<K>(h * n + c); });
  }
}

// sum += factor[b] * row(b), one b after another, in V vectors of columns that stay in registers meanwhile. Factors of
// vector k begin at factor[k]: one for each of two heads (G = 2), or one for a part of a head (G = 1).
template <int V, int G, class A, class Row>
PYG_DIST_INLINE void add_tile(A* sum, const A* const* factor, int64_t lanes, int64_t count, const Row& row) {
  constexpr int L = kLanes<A>;
  const auto of_columns = [](const A* numbers) __attribute__((always_inline)) {
    if constexpr (G == 1) {
      return *numbers;
    } else {
      const Vec<A, L> of_heads = load<L>(numbers);
      return [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        return shuffle(of_heads, of_heads, std::integer_sequence<int, (I * G / L)...>{});
      }(std::make_integer_sequence<int, L>{});
    }
  };
  Vec<A, L> sums[V];
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) sums[k] = load<L>(sum + k * L);
  for (int64_t b = 0; b < count; ++b) {
    const auto* x = row(b);
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) sums[k] += load<L>(x + k * L) * of_columns(factor[k] + b * lanes);
  }
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) store<L>(sum + k * L, sums[k]);
}

// The same for all whole vectors of the row, of heads of n columns.
template <int G, class A, class Row>
PYG_DIST_INLINE void add_vectors(A* sum, const A* factor, int64_t lanes, int64_t count, int64_t num_vectors, int64_t n,
                                 const Row& row) {
  constexpr int L = kLanes<A>, V = 4;
  const A* factors[V];
  int64_t done = 0, in_head = 0;
  const auto tile = [&]<int K>() __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      factors[k] = factor;
      in_head += L;
      const bool ends = G > 1 || in_head == n;
      factor += ends ? G : 0;
      in_head = ends ? 0 : in_head;
    }
    const int64_t c = done * L;
    add_tile<K, G>(sum + c, factors, lanes, count, [&](int64_t b) { return row(b) + c; });
    done += K;
  };
  while (done + V <= num_vectors) tile.template operator()<V>();
  while (done < num_vectors) tile.template operator()<1>();
}

// sum[h] += factor[b, h] * row(b)[h] for each head of n columns; factors of two b lie `lanes` apart. Where kShared, all
// heads have the same n columns of row(b).
template <bool kShared = false, class A, class Row>
PYG_DIST_INLINE void add_rows(A* sum, const A* factor, int64_t lanes, int64_t count, int64_t heads, int64_t n,
                              const Row& row) {
  constexpr int L = kLanes<A>;
  int64_t h = 0;
  if constexpr (!kShared) {
    if (n % L == 0) return add_vectors<1>(sum, factor, lanes, count, heads * n / L, n, row);
    if (2 * n == L) {
      add_vectors<2>(sum, factor, lanes, count, heads / 2, n, row);
      h = heads / 2 * 2;
    }
  }
  for (; h < heads; ++h) {
    A* const of_head = sum + h * n;
    const int64_t at = kShared ? 0 : h * n;
    for_vectors<A>(n, [&]<int K>(int64_t c) __attribute__((always_inline)) {
      Vec<A, K> sums = load<K>(of_head + c);
      for (int64_t b = 0; b < count; ++b) sums += load<K>(row(b) + at + c) * factor[b * lanes + h];
      store<K>(of_head + c, sums);
    });
  }
}

// sum[h] and numbers[b, h], one b after another.
template <class A>
PYG_DIST_INLINE void add_numbers(A* sum, const A* numbers, int64_t lanes, int64_t count, int64_t heads) {
  for_vectors<A>(heads, [&]<int K>(int64_t h) __attribute__((always_inline)) {
    Vec<A, K> sums = load<K>(sum + h);
    for (int64_t b = 0; b < count; ++b) sums += load<K>(numbers + b * lanes + h);
    store<K>(sum + h, sums);
  });
}

// Lane l of the result joins the lanes l, l + lanes, l + 2 lanes ... of v, a power of two.
template <int L, class A, class Join, int S = L / 2>
PYG_DIST_INLINE Vec<A, L> join_edges(Vec<A, L> v, int64_t lanes, const Join& join) {
  if constexpr (S > 0) {
    if (S >= lanes) {
      const Vec<A, L> others = [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        return shuffle(v, v, std::integer_sequence<int, (I ^ S)...>{});
      }(std::make_integer_sequence<int, L>{});
      v = join(v, others);
    }
    return join_edges<L, A, Join, S / 2>(v, lanes, join);
  }
  return v;
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

}  // namespace
}  // namespace pyg_dist::PYG_DIST_LEVEL
