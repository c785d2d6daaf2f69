// Elements in registers, in the type that sums are kept in, and vectors of them in memory.
#pragma once

#include <type_traits>

#include "cuda/device.h"
#include "formats/narrow.h"

namespace pyg_dist::gpu {

template <class T>
PYG_DIST_DEVICE accumulator_t<T> to_sum(T value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return half_to_float(value.bits);
  } else if constexpr (kIsNarrow<T>) {
    return widen(value);
  } else {
    return value;
  }
}

template <class T>
PYG_DIST_DEVICE T from_sum(accumulator_t<T> value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return {float_to_half(value)};
  } else if constexpr (kIsNarrow<T>) {
    return narrow<T>(value);
  } else {
    return value;
  }
}

// N values from an address that is aligned to all of them, or to 16 bytes.
template <class T, int N>
PYG_DIST_DEVICE void load_values(const T* from, accumulator_t<T> (&values)[N]) {
  constexpr int kEach = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
  PYG_DIST_UNROLL
  for (int first = 0; first < N; first += kEach) {
    const Pack<T, kEach> pack = load<kEach>(from + first);
    PYG_DIST_UNROLL
    for (int v = 0; v < kEach; ++v) values[first + v] = to_sum(pack.value[v]);
  }
}

template <class T, int N>
PYG_DIST_DEVICE void store_values(T* to, const accumulator_t<T> (&values)[N]) {
  constexpr int kEach = N * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T)) : N;
  PYG_DIST_UNROLL
  for (int first = 0; first < N; first += kEach) {
    Pack<T, kEach> pack;
    PYG_DIST_UNROLL
    for (int v = 0; v < kEach; ++v) pack.value[v] = from_sum<T>(values[first + v]);
    store<kEach>(to + first, pack);
  }
}

// How many bytes of T vectors may have: what divides the addresses of all rows, and their length. Those of another type
// have vectors of as many values.
template <class T>
class Alignment {
 public:
  explicit Alignment(int64_t num_columns) { add(num_columns); }

  // Rows that are `stride` values of U apart; null: there are none.
  template <class U>
  Alignment& rows(const void* data, int64_t stride) {
    static_assert(sizeof(U) % sizeof(T) == 0);
    bits_ |= reinterpret_cast<uintptr_t>(data) / (sizeof(U) / sizeof(T));
    return add(stride);
  }
  bool allows(uint64_t bytes) const { return bits_ % bytes == 0; }

 private:
  Alignment& add(int64_t count) {
    bits_ |= static_cast<uint64_t>(count) * sizeof(T);
    return *this;
  }

  uint64_t bits_ = 0;
};

// Calls f.operator()<kVec, kCount>() for the widest vectors of T that memory allows; a lane has 16 bytes, or four
// values.
template <class T, class F>
void with_vectors(const Alignment<T>& alignment, const F& f) {
  constexpr int kSize = sizeof(T);
  if (alignment.allows(16)) return f.template operator()<16 / kSize, 1>();
  if constexpr (kSize < 8) {
    if (alignment.allows(8)) return f.template operator()<8 / kSize, 2>();
  }
  if constexpr (kSize < 4) {
    if (alignment.allows(4)) return f.template operator()<4 / kSize, 4>();
  }
  f.template operator()<1, kSize == 8 ? 2 : 4>();
}

}  // namespace pyg_dist::gpu
