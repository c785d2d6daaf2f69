#include "cpu/add_places.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cpu/radix_sort.h"

namespace pyg_dist {
namespace {

constexpr int64_t kAhead = 16;

struct Bounds {
  int64_t least, most;
};

template <class T>
void widen(Bounds& bounds, const T* value, int64_t num_values) {
  for (int64_t k = 0; k < num_values; ++k) {
    bounds.least = std::min<int64_t>(bounds.least, value[k]);
    bounds.most = std::max<int64_t>(bounds.most, value[k]);
  }
}

// As bits of a map of all numbers from the least one on, which sort them.
template <class T>
void add_to_map(const AddPlaces& p, const T* value, Bounds bounds, std::vector<int32_t>& added) {
  const auto low = static_cast<uint64_t>(bounds.least);
  std::vector<uint64_t> words((static_cast<uint64_t>(bounds.most) - low) / 64 + 1);
  // Whether a value is new cannot be predicted, so it is no branch.
  for (int64_t k = 0; k < p.num_values; ++k) {
    if (k + kAhead < p.num_values) __builtin_prefetch(p.place_of + value[k + kAhead]);
    const uint64_t bit = static_cast<uint64_t>(value[k]) - low;
    words[bit / 64] |= static_cast<uint64_t>(p.place_of[value[k]] < 0) << (bit % 64);
  }
  for (int64_t k = 0; k < p.num_again; ++k) {
    const uint64_t bit = static_cast<uint64_t>(p.again[k]) - low;
    words[bit / 64] |= uint64_t{1} << (bit % 64);
  }
  size_t num_added = 0;
  for (const uint64_t bits : words) num_added += static_cast<size_t>(std::popcount(bits));
  added.resize(num_added);
  int32_t* out = added.data();
  auto next = static_cast<int32_t>(p.next);
  int64_t first = bounds.least;
  for (uint64_t bits : words) {
    for (; bits != 0; bits &= bits - 1) {
      const int64_t number = first + std::countr_zero(bits);
      *out++ = static_cast<int32_t>(number);
      p.place_of[number] = next++;
    }
    first += 64;
  }
}

// Where there are few among so many numbers.
template <class T>
void add_to_list(const AddPlaces& p, const T* value, Bounds bounds, std::vector<int32_t>& added) {
  added.assign(p.again, p.again + p.num_again);
  for (int64_t k = 0; k < p.num_values; ++k) {
    if (k + kAhead < p.num_values) __builtin_prefetch(p.place_of + value[k + kAhead]);
    int32_t& place = p.place_of[value[k]];
    if (place < 0) added.push_back(static_cast<int32_t>(value[k]));
    place = std::max(place, 0);
  }
  radix_sort(added, static_cast<uint64_t>(bounds.most - bounds.least),
             [low = bounds.least](int32_t number) { return static_cast<uint64_t>(number - low); });
  auto next = static_cast<int32_t>(p.next);
  for (const int32_t number : added) p.place_of[number] = next++;
}

template <class T>
BadIndex add(const AddPlaces& p, const T* value, std::vector<int32_t>& added) {
  added.clear();
  if (p.num_values + p.num_again == 0) return {};
  Bounds bounds{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  widen(bounds, value, p.num_values);
  widen(bounds, p.again, p.num_again);
  if (bounds.least < 0 || bounds.most >= p.span) {
    for (int64_t k = 0; k < p.num_values; ++k) {
      if (value[k] < 0 || value[k] >= p.span) return {k, value[k]};
    }
    return {p.num_values, bounds.least < 0 ? bounds.least : bounds.most};
  }
  if ((bounds.most - bounds.least) / 64 <= p.num_values + p.num_again) {
    add_to_map(p, value, bounds, added);
  } else {
    add_to_list(p, value, bounds, added);
  }
  return {};
}

}  // namespace

BadIndex add_places(const AddPlaces& p, std::vector<int32_t>& added) {
  return p.value.is_wide ? add(p, static_cast<const int64_t*>(p.value.data), added)
                         : add(p, static_cast<const int32_t*>(p.value.data), added);
}

}  // namespace pyg_dist
