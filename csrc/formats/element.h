// The element types of the kernels.
#pragma once

#include <cstdint>

namespace pyg_dist {

enum class Element : uint8_t { f32, f64, bf16 };

struct BFloat16 {
  uint16_t bits;
};

// What sums of T are kept in.
template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<BFloat16> {
  using type = float;
};
template <class T>
using accumulator_t = typename Accumulator<T>::type;

}  // namespace pyg_dist
