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

// Lists with up to so many numbers a value are merged; others are searched for each value.
constexpr int64_t kMerged = 8;

// A step for each number and each value; which of the two cannot be predicted, so it is no branch.
void add_merged(const CountLess& p, const int64_t* number, int64_t size) {
  const int64_t num_values = p.num_values;
  const int64_t* const value = p.value;
  int64_t* const out = p.out;
  int64_t k = 0, i = 0;
  while (k < size && i < num_values) {
    const bool is_less = number[k] < value[i];
    out[i] += is_less ? 0 : k;
    k += is_less;
    i += !is_less;
  }
  for (; i < num_values; ++i) out[i] += size;
}

}  // namespace

void count_less(const CountLess& p) {
  std::fill(p.out, p.out + p.num_values, 0);
  const int64_t* begin = p.number;
  for (int64_t list = 0; list < p.num_lists; begin += p.size[list++]) {
    if (p.size[list] <= kMerged * p.num_values) {
      add_merged(p, begin, p.size[list]);
      continue;
    }
    const int64_t* at = begin;
    for (int64_t i = 0; i < p.num_values; ++i) {
      at = lower_bound_from(at, begin + p.size[list], p.value[i]);
      p.out[i] += at - begin;
    }
  }
}

}  // namespace pyg_dist
