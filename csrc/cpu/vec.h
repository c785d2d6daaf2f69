// Short vectors of any power-of-two length, by the vector extension of GCC and Clang; only for .simd.cpp files.
//
// Vec<A, L> is L lanes of A (L = 1: A itself); `+`, `*` and `vector * scalar` are the compiler's own. load<L>(p) widens
// 16 bits to float, store(p, v) rounds to nearest even. No alignment is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "formats/element.h"

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

// Of conversions that take a mask: those without one start from an undefined register, of which GCC 12 warns.
#if defined(__AVX512F__)
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// T's 16 bits to float and back: formats/narrow.h.
template <class T, int L>
PYG_DIST_INLINE Vec<float, L> widen(Vec<uint16_t, L> narrow_bits) {
  if constexpr (std::is_same_v<T, Float16>) {
#if defined(__F16C__)
    if constexpr (L == 8) return bit_cast<Vec<float, L>>(_mm256_cvtph_ps(bit_cast<__m128i>(narrow_bits)));
#endif
#if defined(__AVX512F__)
    if constexpr (L == 16)
      return bit_cast<Vec<float, L>>(_mm512_maskz_cvtph_ps(kAllLanes, bit_cast<__m256i>(narrow_bits)));
#endif
    const Vec<uint32_t, L> bits = convert<uint32_t, L, uint16_t>(narrow_bits), rest = bits & 0x7fffu;
    const auto small = bit_cast<Vec<uint32_t, L>>(convert<float, L, uint32_t>(rest) * 0x1p-24f);
    const Vec<uint32_t, L> quiet = rest > 0x7c00u ? Vec<uint32_t, L>{} + 0x400000u : Vec<uint32_t, L>{};
    const Vec<uint32_t, L> special = 0x7f800000u | rest << 13 | quiet, whole = (rest << 13) + (112u << 23);
    const Vec<uint32_t, L> magnitude = rest >= 0x7c00u ? special : rest < 0x400u ? small : whole;
    return bit_cast<Vec<float, L>>((bits & 0x8000u) << 16 | magnitude);
  } else {
    return bit_cast<Vec<float, L>>(convert<uint32_t, L, uint16_t>(narrow_bits) << 16);
  }
}

template <int L>
PYG_DIST_INLINE Vec<uint16_t, L> narrow_to_float16(Vec<float, L> v) {
#if defined(__F16C__)
  if constexpr (L == 8)
    return bit_cast<Vec<uint16_t, L>>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__AVX512F__)
  if constexpr (L == 16) {
    return bit_cast<Vec<uint16_t, L>>(_mm512_maskz_cvtps_ph(kAllLanes, bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  const auto bits = bit_cast<Vec<uint32_t, L>>(v);
  const Vec<uint32_t, L> rest = bits & 0x7fffffffu;
  const auto small = bit_cast<Vec<uint32_t, L>>(bit_cast<Vec<float, L>>(rest) + 0.5f) - 0x3f000000u;
  const Vec<uint32_t, L> whole = ((rest + 0xfffu + (rest >> 13 & 1u)) >> 13) - (112u << 10);
  const Vec<uint32_t, L> infinity = Vec<uint32_t, L>{} + 0x7c00u, nan = 0x7e00u | (rest >> 13 & 0x3ffu);
  const Vec<uint32_t, L> finite = rest < 0x38800000u ? small : rest >= 0x477ff000u ? infinity : whole;
  return convert<uint16_t, L, uint32_t>((bits >> 16 & 0x8000u) | (rest > 0x7f800000u ? nan : finite));
}

template <class T, int L>
PYG_DIST_INLINE Vec<uint16_t, L> narrow(Vec<float, L> v) {
  if constexpr (std::is_same_v<T, Float16>) return narrow_to_float16<L>(v);
  const auto bits = bit_cast<Vec<uint32_t, L>>(v);
  // Ties go to even: 0x7fff, plus one if the lowest kept bit is odd. That carry must not turn a NaN into infinity.
  const Vec<uint32_t, L> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t, L> quiet = (bits >> 16) | 0x40u;
  return convert<uint16_t, L, uint32_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

template <int L, class T>
PYG_DIST_INLINE Vec<accumulator_t<T>, L> load(const T* p) {
  if constexpr (kIsNarrow<T>) {
    Vec<uint16_t, L> bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return widen<T, L>(bits);
  } else {
    Vec<T, L> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
}

template <int L, class T>
PYG_DIST_INLINE void store(T* p, Vec<accumulator_t<T>, L> v) {
  if constexpr (kIsNarrow<T>) {
    const Vec<uint16_t, L> bits = narrow<T, L>(v);
    __builtin_memcpy(p, &bits, sizeof(bits));
  } else {
    __builtin_memcpy(p, &v, sizeof(v));
  }
}

// The lanes below `count`, as integers of the size of A.
template <int L, class A = float>
PYG_DIST_INLINE auto first_lanes(int64_t count) {
  using Lane = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  Vec<Lane, L> lane = {};
  for (int i = 0; i < L; ++i) lane[i] = i;
  return lane < static_cast<Lane>(count);
}

// The first `count` values from p on, in [0, L], and nothing behind them is read; the other lanes are zero.
template <int L, class T>
PYG_DIST_INLINE Vec<accumulator_t<T>, L> load_first(const T* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4 && L == 16) {
    return bit_cast<Vec<accumulator_t<T>, L>>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p));
  }
#endif
  T values[L] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = p[i];
  return load<L>(values);
}

// Writes the first `count` lanes.
template <int L, class T>
PYG_DIST_INLINE void store_first(T* p, Vec<accumulator_t<T>, L> v, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4 && L == 16) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), bit_cast<__m512>(v));
    return;
  }
#endif
  T values[L];
  store<L>(values, v);
  for (int64_t i = 0; i < count; ++i) p[i] = values[i];
}

// Bytes from p on in 32-bit lanes. For a conversion by four times the width GCC 12 writes a dozen shuffles.
template <int L>
PYG_DIST_INLINE Vec<int32_t, L> load_bytes(const uint8_t* p) {
  Vec<uint8_t, L> bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;
  return bit_cast<Vec<int32_t, L>>(_mm512_maskz_cvtepu8_epi32(kAll, bit_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  return bit_cast<Vec<int32_t, L>>(_mm256_cvtepu8_epi32(_mm_loadu_si64(&bytes)));
#else
  return convert<int32_t, L, uint8_t>(bytes);
#endif
}

// The lowest bytes of 32-bit lanes.
template <int L>
PYG_DIST_INLINE void store_bytes(uint8_t* p, Vec<uint32_t, L> lanes) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(kAll, bit_cast<__m512i>(lanes));
#else
  const Vec<uint8_t, L> bytes = convert<uint8_t, L, uint32_t>(lanes);
#endif
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}

// The products of the lower halves of 64-bit lanes with m, which x86 makes in one instruction; the compilers do not
// find that out from the plain product.
template <int L>
PYG_DIST_INLINE Vec<uint64_t, L> multiply_lower(Vec<uint64_t, L> lanes, uint32_t m) {
#if defined(__AVX512F__)
  constexpr __mmask8 kAll = 0xff;  // the form without a mask trips -Wmaybe-uninitialized inside GCC 12's own header
  const __m512i factors = _mm512_set1_epi32(static_cast<int>(m));
  return bit_cast<Vec<uint64_t, L>>(_mm512_maskz_mul_epu32(kAll, bit_cast<__m512i>(lanes), factors));
#elif defined(__AVX2__)
  return bit_cast<Vec<uint64_t, L>>(_mm256_mul_epu32(bit_cast<__m256i>(lanes), _mm256_set1_epi32(static_cast<int>(m))));
#elif defined(__x86_64__)
  return bit_cast<Vec<uint64_t, L>>(_mm_mul_epu32(bit_cast<__m128i>(lanes), _mm_set1_epi32(static_cast<int>(m))));
#else
  return (lanes & 0xffffffffu) * m;
#endif
}

// Stores a[0] b[0] a[1] b[1] ...
template <int L, class A>
PYG_DIST_INLINE void store_interleaved(A* p, Vec<A, L> a, Vec<A, L> b) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
    store<L>(p, __builtin_shufflevector(a, b, (I / 2 + I % 2 * L)...));
    store<L>(p + L, __builtin_shufflevector(a, b, (L / 2 + I / 2 + I % 2 * L)...));
#else
    ((p[2 * I] = a[I], p[2 * I + 1] = b[I]), ...);
#endif
  }(std::make_integer_sequence<int, L>{});
}

// a < b ? a : b and a > b ? a : b, lane by lane: b where one is NaN. The compilers make two instructions of these.
template <int L, class A>
PYG_DIST_INLINE Vec<A, L> lesser(Vec<A, L> a, Vec<A, L> b) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;
  if constexpr (sizeof(a) == 64 && std::is_same_v<A, float>) {
    return bit_cast<Vec<A, L>>(_mm512_maskz_min_ps(kAll, bit_cast<__m512>(a), bit_cast<__m512>(b)));
  } else if constexpr (sizeof(a) == 64 && std::is_same_v<A, uint32_t>) {
    return bit_cast<Vec<A, L>>(_mm512_maskz_min_epu32(kAll, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(a) == 32 && std::is_same_v<A, float>) {
    return bit_cast<Vec<A, L>>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  } else if constexpr (sizeof(a) == 32 && std::is_same_v<A, uint32_t>) {
    return bit_cast<Vec<A, L>>(_mm256_min_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
  }
#endif
  return a < b ? a : b;
}

template <int L, class A>
PYG_DIST_INLINE Vec<A, L> greater(Vec<A, L> a, Vec<A, L> b) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xffff;
  if constexpr (sizeof(a) == 64 && std::is_same_v<A, float>) {
    return bit_cast<Vec<A, L>>(_mm512_maskz_max_ps(kAll, bit_cast<__m512>(a), bit_cast<__m512>(b)));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(a) == 32 && std::is_same_v<A, float>) {
    return bit_cast<Vec<A, L>>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  }
#endif
  return a > b ? a : b;
}

// All lanes joined to one, half with half; `join` takes two vectors, in the end two lanes.
template <int L, class A, class Join>
PYG_DIST_INLINE A reduce(Vec<A, L> v, const Join& join) {
  if constexpr (L == 1) {
    return v;
  } else {
    Vec<A, L / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    return reduce<L / 2, A>(join(halves[0], halves[1]), join);
  }
}

#if __has_builtin(__builtin_shufflevector)
template <class V, int... I>
PYG_DIST_INLINE auto shuffle(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, I...);
}
#else
template <class V, int... I>
PYG_DIST_INLINE auto shuffle(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int kSize = static_cast<int>(sizeof(V) / sizeof(a[0]));
  return Vec<std::remove_cvref_t<decltype(a[0])>, sizeof...(I)>{(I < kSize ? a[I % kSize] : b[I % kSize])...};
}
#endif

// a and b have the lanes of G sums each, in G runs of equal length: all 2 G sums in one vector, their halves added as
// by reduce().
template <int L, class A, int G>
PYG_DIST_INLINE Vec<A, L> join(Vec<A, L> a, Vec<A, L> b) {
  constexpr int kHalf = L / (2 * G);
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return shuffle(a, b, std::integer_sequence<int, (I / kHalf * 2 * kHalf + I % kHalf)...>{}) +
           shuffle(a, b, std::integer_sequence<int, (I / kHalf * 2 * kHalf + I % kHalf + kHalf)...>{});
  }(std::make_integer_sequence<int, L>{});
}

// A vector of the lanes of 2 G sums, down to a lane each.
template <int L, class A, int G>
PYG_DIST_INLINE Vec<A, 2 * G> fold(Vec<A, L> v) {
  if constexpr (L == 2 * G) {
    return v;
  } else {
    constexpr int kHalf = L / (4 * G);
    return [&]<int... I>(std::integer_sequence<int, I...>) {
      return fold<L / 2, A, G>(
          shuffle(v, v, std::integer_sequence<int, (I / kHalf * 2 * kHalf + I % kHalf)...>{}) +
          shuffle(v, v, std::integer_sequence<int, (I / kHalf * 2 * kHalf + I % kHalf + kHalf)...>{}));
    }(std::make_integer_sequence<int, L / 2>{});
  }
}

template <int L, class A>
PYG_DIST_INLINE A horizontal_sum(Vec<A, L> v) {
  return reduce<L, A>(v, [](auto a, auto b) { return a + b; });
}

// The one processor with vectors of 512 bits on Arm, A64FX, has lines of 256 bytes.
constexpr int64_t kCacheLine = PYG_DIST_HAS_SVE && kVectorBytes == 64 ? 256 : 64;

// Asks for the cache lines of `num_bytes` from p; never faults. Into the second-level cache: the first level has too
// few buffers for lines under way (on Zen 4 a sparse product of width 100 takes 1.4 times as long with prefetches into
// it). The empty asm keeps a loop of unknown length, which GCC 12 takes for one that does nothing.
PYG_DIST_INLINE void prefetch(const void* p, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(p) + byte, 0, 2);
    if (!__builtin_constant_p(num_bytes)) asm volatile("");
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
