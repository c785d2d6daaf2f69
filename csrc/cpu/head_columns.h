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

}  // namespace
}  // namespace pyg_dist::PYG_DIST_LEVEL
