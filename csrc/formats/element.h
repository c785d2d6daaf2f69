// The element types of rows.
#pragma once

#include <cstdint>

#include "formats/portable.h"

namespace pyg_dist {

enum class Element : uint8_t { f32, f64, bf16, f16 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Those of 16 bits, which sums are not kept in: widen and narrow take them there and back.
template <class T>
constexpr bool kIsNarrow = sizeof(T) == 2;

// What sums of T are kept in.
template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<BFloat16> {
  using type = float;
};
template <>
struct Accumulator<Float16> {
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

// f.operator()<T>() for the type of an element.
template <class F>
inline __attribute__((always_inline)) auto for_element(Element element, const F& f) {
  switch (element) {
    case Element::f64:
      return f.template operator()<double>();
    case Element::bf16:
      return f.template operator()<BFloat16>();
    case Element::f16:
      return f.template operator()<Float16>();
    default:
      return f.template operator()<float>();
  }
}

}  // namespace pyg_dist
