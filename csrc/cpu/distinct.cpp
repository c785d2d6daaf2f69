#include "cpu/distinct.h"

#include <algorithm>
#include <bit>

#include "cpu/radix_sort.h"

namespace pyg_dist {
namespace {

// The numbers of distinct values, in the order in which they are added.
class HashTable {
 public:
  // `number` distinct values are expected at least.
  explicit HashTable(int64_t number) {
    values_.reserve(static_cast<size_t>(number));
    resize(std::max(size_t{64}, std::bit_ceil(static_cast<size_t>(4 * number))));
  }

  // Have the memory that add(value[k]) will read on its way: the slot of a later value, and what a nearer one's names.
  template <class T>
  void prefetch(const T* value, int64_t k, int64_t size) const {
    constexpr int64_t kAhead = 12;
    if (k + 2 * kAhead < size) __builtin_prefetch(slots_.data() + slot_of(value[k + 2 * kAhead]));
    if (k + kAhead >= size) return;
    const int32_t number = slots_[slot_of(value[k + kAhead])];
    if (number >= 0) __builtin_prefetch(values_.data() + number);
  }

  // The number of a value: `next`, which is how many there are, if it is new.
  int32_t add(int64_t value, int32_t next) {
    size_t slot = slot_of(value);
    for (; slots_[slot] >= 0; slot = (slot + 1) & mask_) {
      if (values_[static_cast<size_t>(slots_[slot])] == value) return slots_[slot];
    }
    slots_[slot] = next;
    values_.push_back(value);
    if (2 * values_.size() > slots_.size()) resize(2 * slots_.size());
    return next;
  }

 private:
  size_t slot_of(int64_t value) const {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    return static_cast<size_t>((static_cast<uint64_t>(value) * kGolden) >> shift_);
  }

  void resize(size_t size) {
    slots_.assign(size, -1);
    mask_ = size - 1;
    shift_ = 64 - std::countr_zero(size);
    for (size_t number = 0; number < values_.size(); ++number) {
      size_t slot = slot_of(values_[number]);
      while (slots_[slot] >= 0) slot = (slot + 1) & mask_;
      slots_[slot] = static_cast<int32_t>(number);
    }
  }

  std::vector<int64_t> values_;
  std::vector<int32_t> slots_;
  size_t mask_ = 0;
  int shift_ = 0;
};

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
