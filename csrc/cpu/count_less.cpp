#include "cpu/count_less.h"

#include <algorithm>

namespace pyg_dist {
namespace {

// The first of [first, last) that is not less than the value.
const int64_t* lower_bound_from(const int64_t* first, const int64_t* last, int64_t value) {
  int64_t step = 1;
  while (step <= last - first && first[step - 1] < value) {
    first += step;
    step *= 2;
  }
  return std::lower_bound(first, first + std::min(step - 1, last - first), value);
}

}  // namespace

void count_less(const CountLess& p) {
  std::fill(p.out, p.out + p.num_values, 0);
  const int64_t* begin = p.number;
  for (int64_t list = 0; list < p.num_lists; begin += p.size[list++]) {
    const int64_t* at = begin;
    for (int64_t i = 0; i < p.num_values; ++i) {
      at = lower_bound_from(at, begin + p.size[list], p.value[i]);
      p.out[i] += at - begin;
    }
  }
}

}  // namespace pyg_dist
