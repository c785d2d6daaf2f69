#include "cpu/sample_rows.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "formats/permutation.h"

namespace pyg_dist {
namespace {

class Words {
 public:
  explicit Words(uint64_t state) : state_(state) {}

  int64_t below(int64_t n) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    state_ += kGolden;
    __extension__ using Wide = unsigned __int128;
    return static_cast<int64_t>((static_cast<Wide>(mix(state_)) * static_cast<uint64_t>(n)) >> 64);
  }

 private:
  uint64_t state_;
};

// Which numbers are taken: a few are looked through, many are hashed.
class Taken {
 public:
  void begin(int64_t count) {
    is_hashed_ = count > kFew;
    if (is_hashed_) slots_.assign(std::bit_ceil(static_cast<size_t>(2 * count)), -1);
  }

  // Whether x is new; `taken` are those before it.
  bool add(int64_t x, const int64_t* taken, int64_t num_taken) {
    if (!is_hashed_) return std::find(taken, taken + num_taken, x) == taken + num_taken;
    const size_t mask = slots_.size() - 1;
    for (size_t slot = mix(static_cast<uint64_t>(x)) & mask;; slot = (slot + 1) & mask) {
      if (slots_[slot] == x) return false;
      if (slots_[slot] < 0) {
        slots_[slot] = x;
        return true;
      }
    }
  }

 private:
  static constexpr int64_t kFew = 32;
  bool is_hashed_ = false;
  std::vector<int64_t> slots_;
};

}  // namespace

BadIndex count_sampled(const SampleRows& p) {
  p.out_rowptr[0] = 0;
  for (int64_t i = 0; i < p.num_rows; ++i) {
    const int64_t row = p.row[i];
    if (row < 0 || row >= p.num_all_rows || p.rowptr[row] < 0 || p.rowptr[row + 1] < p.rowptr[row]) return {i, row};
    const int64_t degree = p.rowptr[row + 1] - p.rowptr[row];
    const bool takes_all = p.count < 0 || (!p.replace && degree <= p.count) || degree == 0;
    p.out_rowptr[i + 1] = p.out_rowptr[i] + (takes_all ? degree : p.count);
  }
  return {};
}

void sample_rows(const SampleRows& p, int64_t* entry, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 16;
  const uint64_t seed = combine(0, p.seed);
  Taken taken;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(p.rowptr + p.row[i + kAhead]);
    const int64_t first = p.rowptr[p.row[i]], degree = p.rowptr[p.row[i] + 1] - first;
    int64_t* const out = entry + p.out_rowptr[i];
    const int64_t count = p.out_rowptr[i + 1] - p.out_rowptr[i];
    if (p.count < 0 || (!p.replace && count == degree)) {
      for (int64_t k = 0; k < count; ++k) out[k] = first + k;
      continue;
    }
    Words words(combine(seed, static_cast<uint64_t>(p.key[i])));
    if (p.replace) {
      for (int64_t k = 0; k < count; ++k) out[k] = words.below(degree);
    } else {
      taken.begin(count);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t last = degree - count + k, x = words.below(last + 1);
        out[k] = taken.add(x, out, k) ? x : last;
        if (out[k] == last && x != last) taken.add(last, out, k);
      }
    }
    std::sort(out, out + count);
    for (int64_t k = 0; k < count; ++k) out[k] += first;
  }
}

}  // namespace pyg_dist
