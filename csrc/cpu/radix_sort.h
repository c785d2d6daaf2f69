// A radix sort from the lowest digit up.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace pyg_dist {

// Sorts items by key_of(item), a uint64_t up to `most`; those of one key keep their order.
template <class Item, class KeyOf>
void radix_sort(std::vector<Item>& items, uint64_t most, const KeyOf& key_of) {
  constexpr int kMostBits = 11;
  const int num_bits = std::bit_width(most), num_digits = (num_bits + kMostBits - 1) / kMostBits;
  if (num_digits == 0 || items.empty()) return;
  const int bits = (num_bits + num_digits - 1) / num_digits;
  std::vector<Item> next(items.size());
  std::vector<size_t> begin(size_t{1} << bits);
  for (int shift = 0; shift < num_bits; shift += bits) {
    const auto digit = [&](const Item& item) { return (key_of(item) >> shift) & (begin.size() - 1); };
    std::fill(begin.begin(), begin.end(), 0);
    for (const Item& item : items) ++begin[digit(item)];
    std::exclusive_scan(begin.begin(), begin.end(), begin.begin(), size_t{0});
    for (const Item& item : items) next[begin[digit(item)]++] = item;
    items.swap(next);
  }
}

}  // namespace pyg_dist
