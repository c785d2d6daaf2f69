// Which value of several is the extreme, and who shares its gradient: torch's rules for scatter_reduce, for scalars and
// for vectors of them.
//
//   A NaN wins. An extreme's gradient is divided by the number of values that equal it, its ties, plus one where the
//   extreme is zero: torch counts the zeros that it starts from among the ties, though they get no gradient. A NaN ties
//   with nothing.
#pragma once

#include "formats/portable.h"

namespace pyg_dist {

// The extreme of `best` and the next value. No value compares with a NaN, which so stays once it is there.
template <bool kLargest, class V>
PYG_DIST_PORTABLE V extreme_of(V best, V value) {
  const V better = (kLargest ? value > best : value < best) ? value : best;
  return value == value ? better : value;
}

// One where the two are equal, else zero; `one` has ones in all lanes.
template <class V>
PYG_DIST_PORTABLE V tie(V a, V b, V one) {
  return a == b ? one : V{};
}

}  // namespace pyg_dist
