#include "cpu/distinct.h"

#include <algorithm>

#include "cpu/hash_table.h"
#include "cpu/radix_sort.h"

namespace pyg_dist {
namespace {

struct Numbered {
  uint64_t value;  // over the smallest
  int32_t number;
};

// Ascending value[first[0 ..]]; numbers are places in `first`.
template <class T>
std::vector<Numbered> ascending(const T* value, const std::vector<int64_t>& first) {
  std::vector<Numbered> sorted(first.size());
  if (first.empty()) return sorted;
  int64_t least = value[first[0]], most = least;
  for (const int64_t k : first) {
    least = std::min<int64_t>(least, value[k]);
    most = std::max<int64_t>(most, value[k]);
  }
  const auto low = static_cast<uint64_t>(least);
  for (size_t i = 0; i < first.size(); ++i) {
    sorted[i] = {static_cast<uint64_t>(static_cast<int64_t>(value[first[i]])) - low, static_cast<int32_t>(i)};
  }
  radix_sort(sorted, static_cast<uint64_t>(most) - low, [](const Numbered& x) { return x.value; });
  return sorted;
}

template <class T>
void add_values(const Distinct& p, const T* value, HashTable& table, std::vector<int64_t>& first) {
  std::vector<int64_t> added;
  for (int64_t k = 0; k < p.num_values; ++k) {
    table.prefetch(value, k, p.num_values);
    const auto next = static_cast<int32_t>(p.num_known + static_cast<int64_t>(added.size()));
    p.place[k] = table.add(value[k], next);
    if (p.place[k] == next) added.push_back(k);
  }
  std::vector<int32_t> rank(added.size());
  first.reserve(added.size());
  for (const Numbered& x : ascending(value, added)) {
    const auto number = static_cast<size_t>(x.number);
    rank[number] = static_cast<int32_t>(first.size());
    first.push_back(added[number]);
  }
  for (int64_t k = 0; k < p.num_values; ++k) {
    if (p.place[k] >= p.num_known) {
      p.place[k] = p.num_known + rank[static_cast<size_t>(p.place[k] - p.num_known)];
    }
  }
}

template <class T>
BadIndex find_distinct(const Distinct& p, const T* value, std::vector<int64_t>& first) {
  HashTable table(p.num_known);
  for (int64_t i = 0; i < p.num_known; ++i) {
    table.prefetch(p.known, i, p.num_known);
    if (table.add(p.known[i], static_cast<int32_t>(i)) != i) return {i, p.known[i]};
  }
  add_values(p, value, table, first);
  return {};
}

}  // namespace

BadIndex distinct(const Distinct& p, std::vector<int64_t>& first) {
  return p.value.is_wide ? find_distinct(p, static_cast<const int64_t*>(p.value.data), first)
                         : find_distinct(p, static_cast<const int32_t*>(p.value.data), first);
}

}  // namespace pyg_dist
