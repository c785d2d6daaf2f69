// Distinct values and their numbers, by open addressing with linear probing (Knuth, TAOCP 3, 6.4): slots by the top
// bits of value * 2^64 / golden ratio, the number of a value in each; the table doubles once it is half full.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyg_dist {

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

  // The number of a value, or -1.
  int32_t find(int64_t value) const {
    size_t slot = slot_of(value);
    while (slots_[slot] >= 0 && values_[static_cast<size_t>(slots_[slot])] != value) slot = (slot + 1) & mask_;
    return slots_[slot];
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

}  // namespace pyg_dist
