// Short vectors of any power-of-two length, by the vector extension of GCC and Clang; only for .simd.cpp files.
//
// Vec<A, L> is L lanes of A (L = 1: A itself); `+`, `*` and `vector * scalar` are the compiler's own. load<L>(p) widens
// bfloat16 to float, store(p, v) rounds to nearest even. No alignment is asked for.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/element.h"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

#define PYG_DIST_INLINE inline __attribute__((always_inline))

namespace pyg_dist::PYG_DIST_LEVEL {

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS > 0
#  define PYG_DIST_HAS_SVE 1
#else
#  define PYG_DIST_HAS_SVE 0
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMaxVectors = 16;  // accumulators held at once, of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMaxVectors = 8;  // of 16
#elif PYG_DIST_HAS_SVE
constexpr int kVectorBytes = __ARM_FEATURE_SVE_BITS / 8;
constexpr int kMaxVectors = 16;  // of 32
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kMaxVectors = 16;  // of 32
#else
constexpr int kVectorBytes = 16;
constexpr int kMaxVectors = 8;  // of 16
#endif

template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <class A, int L>
struct VecOf {
  typedef A type __attribute__((vector_size(L * sizeof(A))));
};
template <class A>
struct VecOf<A, 1> {
  using type = A;
};
template <class A, int L>
using Vec = typename VecOf<A, L>::type;

template <class To, class From>
PYG_DIST_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Lane by lane, as static_cast does.
template <class To, int L, class From>
PYG_DIST_INLINE Vec<To, L> convert(Vec<From, L> v) {
  if constexpr (L == 1) {
    return static_cast<To>(v);
  } else {
    return __builtin_convertvector(v, Vec<To, L>);
  }
}

template <int L>
PYG_DIST_INLINE Vec<float, L> widen(Vec<uint16_t, L> bf16) {
  return bit_cast<Vec<float, L>>(convert<uint32_t, L, uint16_t>(bf16) << 16);
}

template <int L>
PYG_DIST_INLINE Vec<uint16_t, L> narrow(Vec<float, L> v) {
  const auto bits = bit_cast<Vec<uint32_t, L>>(v);
  // Ties go to even: 0x7fff, plus one if the lowest kept bit is odd. That carry must not turn a NaN into infinity.
  const Vec<uint32_t, L> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t, L> quiet = (bits >> 16) | 0x40u;
  return convert<uint16_t, L, uint32_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

template <int L, class T>
PYG_DIST_INLINE Vec<accumulator_t<T>, L> load(const T* p) {
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    Vec<uint16_t, L> bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return widen<L>(bits);
  } else {
    Vec<T, L> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
}

template <int L, class T>
PYG_DIST_INLINE void store(T* p, Vec<accumulator_t<T>, L> v) {
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    const Vec<uint16_t, L> bits = narrow<L>(v);
    __builtin_memcpy(p, &bits, sizeof(bits));
  } else {
    __builtin_memcpy(p, &v, sizeof(v));
  }
}

template <int L, class A>
PYG_DIST_INLINE A horizontal_sum(Vec<A, L> v) {
  if constexpr (L == 1) {
    return v;
  } else {
    A sum = v[0];
    for (int lane = 1; lane < L; ++lane) sum += v[lane];
    return sum;
  }
}

// The upper and the lower halves of v * m, lane by lane. Even and odd lanes are multiplied apart, since x86 multiplies
// 32 x 32 -> 64 bits in every other lane, which the compilers do not find out from the plain product.
template <int L>
PYG_DIST_INLINE void multiply_wide(Vec<uint32_t, L> v, uint32_t m, Vec<uint32_t, L>& high, Vec<uint32_t, L>& low) {
  using Wide = Vec<uint64_t, L / 2>;
  const auto multiply_even = [m](Wide lanes) {
#if defined(__AVX512F__)
    constexpr __mmask8 kAll = 0xff;  // the form without a mask trips -Wmaybe-uninitialized inside GCC 12's own header
    const __m512i factors = _mm512_set1_epi32(static_cast<int>(m));
    return bit_cast<Wide>(_mm512_maskz_mul_epu32(kAll, bit_cast<__m512i>(lanes), factors));
#elif defined(__AVX2__)
    return bit_cast<Wide>(_mm256_mul_epu32(bit_cast<__m256i>(lanes), _mm256_set1_epi32(static_cast<int>(m))));
#elif defined(__x86_64__)
    return bit_cast<Wide>(_mm_mul_epu32(bit_cast<__m128i>(lanes), _mm_set1_epi32(static_cast<int>(m))));
#else
    return (lanes & 0xffffffffu) * m;
#endif
  };
  const auto lanes = bit_cast<Wide>(v);
  const Wide even = multiply_even(lanes), odd = multiply_even(lanes >> 32);
  constexpr uint64_t kHigh = 0xffffffff00000000u;
  high = bit_cast<Vec<uint32_t, L>>((even >> 32) | (odd & kHigh));
  low = bit_cast<Vec<uint32_t, L>>((even & ~kHigh) | (odd << 32));
}

// Stores a[0] b[0] c[0] d[0] a[1] b[1] ...
template <int L, class A>
PYG_DIST_INLINE void store_interleaved(A* p, Vec<A, L> a, Vec<A, L> b, Vec<A, L> c, Vec<A, L> d) {
  const Vec<A, L> columns[4] = {a, b, c, d};
#pragma GCC unroll 64
  for (int i = 0; i < 4 * L; ++i) p[i] = columns[i % 4][i / 4];
}

// Asks for the cache lines of `num_bytes` from p; never faults. Into the second-level cache: the first level has too
// few buffers for lines under way (on Zen 4 a sparse product of width 100 takes 1.4 times as long with prefetches into
// it).
PYG_DIST_INLINE void prefetch(const void* p, int64_t num_bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t byte = 0; byte < num_bytes; byte += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(p) + byte, 0, 2);
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
