// The element types of rows.
#pragma once

#include <cstdint>

#include "formats/portable.h"

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

PYG_DIST_PORTABLE constexpr Element accumulator_of(Element element) {
  return element == Element::f64 ? Element::f64 : Element::f32;
}

PYG_DIST_PORTABLE constexpr int64_t bytes_of(Element element) {
  return element == Element::f64 ? 8 : element == Element::f32 ? 4 : 2;
}

}  // namespace pyg_dist
