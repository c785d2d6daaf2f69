#include "cpu/distinct.h"

#include <algorithm>
#include <bit>

namespace pyg_dist {
namespace {

class Table {
 public:
  // `number` distinct values are expected at least.
  explicit Table(int64_t number) {
    values_.reserve(static_cast<size_t>(number));
    resize(std::max(size_t{64}, std::bit_ceil(static_cast<size_t>(4 * number))));
  }

  // Have the memory that add(value[k]) will read on its way: the slot of a later value, and what a nearer one's names.
  void prefetch(const int64_t* value, int64_t k, int64_t size) const {
    constexpr int64_t kAhead = 12;
    if (k + 2 * kAhead < size) __builtin_prefetch(slots_.data() + slot_of(value[k + 2 * kAhead]));
    if (k + kAhead >= size) return;
    const int32_t number = slots_[slot_of(value[k + kAhead])];
    if (number >= 0) __builtin_prefetch(values_.data() + number);
  }

  // The number of a value, which is the next one if it is new.
  int32_t add(int64_t value) {
    size_t slot = slot_of(value);
    for (; slots_[slot] >= 0; slot = (slot + 1) & mask_) {
      if (values_[static_cast<size_t>(slots_[slot])] == value) return slots_[slot];
    }
    const auto number = static_cast<int32_t>(values_.size());
    slots_[slot] = number;
    values_.push_back(value);
    if (2 * values_.size() > slots_.size()) resize(2 * slots_.size());
    return number;
  }

  int64_t size() const { return static_cast<int64_t>(values_.size()); }

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

}  // namespace

BadIndex distinct(const Distinct& p, std::vector<int64_t>& first) {
  Table table(p.num_known);
  for (int64_t i = 0; i < p.num_known; ++i) {
    table.prefetch(p.known, i, p.num_known);
    if (table.add(p.known[i]) != i) return {i, p.known[i]};
  }
  for (int64_t k = 0; k < p.num_values; ++k) {
    table.prefetch(p.value, k, p.num_values);
    const int64_t before = table.size();
    p.place[k] = table.add(p.value[k]);
    if (table.size() > before) first.push_back(k);
  }
  return {};
}

}  // namespace pyg_dist
