#include "cpu/add_places.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "cpu/radix_sort.h"

namespace pyg_dist {
namespace {

template <class T>
struct Bounds {
  T least, most;
};

// Of at least one value.
template <class T>
Bounds<T> bounds_of(const T* value, int64_t num_values) {
  Bounds<T> found{value[0], value[0]};
  for (int64_t k = 1; k < num_values; ++k) {
    found.least = std::min(found.least, value[k]);
    found.most = std::max(found.most, value[k]);
  }
  return found;
}

// Sorts distinct values: as bits of a map of all numbers between them, where they are not few of these.
void sort_distinct(std::vector<int32_t>& values) {
  if (values.empty()) return;
  const auto [least, most] = bounds_of(values.data(), static_cast<int64_t>(values.size()));
  const auto span = static_cast<uint64_t>(most - least);
  if (span / 64 > 2 * values.size()) {
    radix_sort(values, span, [low = least](int32_t value) { return static_cast<uint64_t>(value - low); });
    return;
  }
  std::vector<uint64_t> words(span / 64 + 1);
  for (const int32_t value : values) {
    const auto bit = static_cast<uint64_t>(value - least);
    words[bit / 64] |= uint64_t{1} << (bit % 64);
  }
  int32_t* out = values.data();
  int64_t first = least;
  for (uint64_t bits : words) {
    for (; bits != 0; bits &= bits - 1) *out++ = static_cast<int32_t>(first + std::countr_zero(bits));
    first += 64;
  }
}

template <class T>
BadIndex add(const AddPlaces& p, const T* value, std::vector<int32_t>& added) {
  constexpr int64_t kAhead = 16;
  int32_t* const place_of = p.place_of;
  const int64_t num_values = p.num_values;
  if (num_values == 0) return {};
  const auto is_bad = [span = p.span](T number) { return number < 0 || number >= span; };
  const Bounds<T> bounds = bounds_of(value, num_values);
  if (is_bad(bounds.least) || is_bad(bounds.most)) {
    const T* const bad = std::find_if(value, value + num_values, is_bad);
    return {bad - value, *bad};
  }
  // Whether a value is new cannot be predicted, so it is no branch: each is written, and counted if it is new.
  const auto found = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(num_values));
  int64_t num_found = 0;
  for (int64_t k = 0; k < num_values; ++k) {
    if (k + kAhead < num_values) __builtin_prefetch(place_of + value[k + kAhead]);
    const T number = value[k];
    const int32_t place = place_of[number];
    found[static_cast<size_t>(num_found)] = static_cast<int32_t>(number);
    num_found += place < 0;
    place_of[number] = std::max(place, 0);
  }
  added.assign(found.get(), found.get() + num_found);
  sort_distinct(added);
  auto next = static_cast<int32_t>(p.next);
  for (const int32_t number : added) place_of[number] = next++;
  return {};
}

}  // namespace

BadIndex add_places(const AddPlaces& p, std::vector<int32_t>& added) {
  return p.value.is_wide ? add(p, static_cast<const int64_t*>(p.value.data), added)
                         : add(p, static_cast<const int32_t*>(p.value.data), added);
}

}  // namespace pyg_dist
