#include "formats/permutation.h"

#include <algorithm>

#include "cpu/table.h"

namespace pyg_dist {
namespace {

// A number's rounds wait for each other, so several numbers take them together.
constexpr int64_t kTogether = 8;

}  // namespace

bool permute_places(const KeyedPermutation& p, int64_t begin, int64_t end) {
  const auto size = static_cast<uint64_t>(p.size);
  const Permutation permutation(size, p.seed);
  uint64_t number[kTogether];
  for (int64_t first = begin; first < end; first += kTogether) {
    const int64_t count = std::min(kTogether, end - first);
    for (int64_t k = 0; k < kTogether; ++k) {
      const int64_t place = p.place[first + std::min(k, count - 1)];
      if (place < 0 || place >= p.size) return false;
      number[k] = static_cast<uint64_t>(place);
    }
    permutation.encrypt<kTogether>(number);
    for (int64_t k = 0; k < count; ++k) p.y[first + k] = static_cast<int64_t>(number[k]);
  }
  // Those outside of [0, size) walk on, again together: fewer than half each time.
  int64_t where[kTogether], waiting = 0;
  const auto walk = [&] {
    for (int64_t k = waiting; k < kTogether; ++k) number[k] = 0;
    permutation.encrypt<kTogether>(number);
    int64_t left = 0;
    for (int64_t k = 0; k < waiting; ++k) {
      if (number[k] < size) {
        p.y[where[k]] = static_cast<int64_t>(number[k]);
      } else {
        number[left] = number[k];
        where[left++] = where[k];
      }
    }
    waiting = left;
  };
  for (int64_t i = begin; i < end; ++i) {
    if (static_cast<uint64_t>(p.y[i]) < size) continue;
    number[waiting] = static_cast<uint64_t>(p.y[i]);
    where[waiting++] = i;
    while (waiting == kTogether) walk();
  }
  while (waiting > 0) walk();
  return true;
}

}  // namespace pyg_dist
