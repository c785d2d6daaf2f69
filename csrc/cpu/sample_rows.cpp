#include "cpu/sample_rows.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "formats/permutation.h"

namespace pyg_dist {
namespace {

// Rows whose memory is asked for ahead: first their bounds, then their entries.
constexpr int64_t kRowsAhead = 12;

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

// Of fewer than 64 kWords numbers, as bits: what is taken needs no search, and comes out ascending.
template <int kWords>
void draw_few(Words words, int64_t degree, int64_t count, int64_t* out) {
  uint64_t taken[kWords] = {};
  for (int64_t j = degree - count; j < degree; ++j) {
    const int64_t x = words.below(j + 1);
    const bool is_taken = (taken[x / 64] >> (x % 64)) & 1;
    const int64_t number = is_taken ? j : x;
    taken[number / 64] |= uint64_t{1} << (number % 64);
  }
  for (int w = 0; w < kWords; ++w) {
    for (uint64_t bits = taken[w]; bits != 0; bits &= bits - 1) *out++ = 64 * w + std::countr_zero(bits);
  }
}

// Of any degree. A few taken numbers are looked through, many are hashed.
class Drawing {
 public:
  void draw(Words words, int64_t degree, int64_t count, int64_t* out) {
    is_hashed_ = count > kFew;
    if (is_hashed_) slots_.assign(std::bit_ceil(static_cast<size_t>(2 * count)), -1);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t last = degree - count + k, x = words.below(last + 1);
      out[k] = add(x, out, k) ? x : last;
      if (out[k] == last && x != last) add(last, out, k);
    }
    std::sort(out, out + count);
  }

 private:
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

  static constexpr int64_t kFew = 32;
  bool is_hashed_ = false;
  std::vector<int64_t> slots_;
};

// Calls use(i, first entry, degree) for each row of the problem, whose memory is there by then.
template <class Use>
void for_each_row(const SampleRows& p, int64_t begin, int64_t end, const Use& use) {
  constexpr int64_t kPerLine = 64 / sizeof(int32_t), kLines = 4;
  const int64_t width = p.place.is_wide ? sizeof(int64_t) : sizeof(int32_t);
  for (int64_t i = begin; i < end; ++i) {
    if (i + 2 * kRowsAhead < end) __builtin_prefetch(p.rowptr + p.row[i + 2 * kRowsAhead]);
    if (i + kRowsAhead < end) {
      const int64_t row = p.row[i + kRowsAhead];
      const int64_t last = std::min(p.rowptr[row + 1], p.rowptr[row] + kLines * kPerLine);
      for (int64_t entry = p.rowptr[row]; entry < last; entry += kPerLine) {
        __builtin_prefetch(p.col + entry);
        if (p.place.data != nullptr) __builtin_prefetch(static_cast<const char*>(p.place.data) + entry * width);
      }
    }
    const int64_t first = p.rowptr[p.row[i]];
    use(i, first, p.rowptr[p.row[i] + 1] - first);
  }
}

}  // namespace

BadIndex count_sampled(const SampleRows& p) {
  p.out_rowptr[0] = 0;
  for (int64_t i = 0; i < p.num_rows; ++i) {
    if (i + kRowsAhead < p.num_rows && p.row[i + kRowsAhead] >= 0) {
      __builtin_prefetch(p.rowptr + p.row[i + kRowsAhead]);
    }
    const int64_t row = p.row[i];
    if (row < 0 || row >= p.num_all_rows) return {i, row};
    const int64_t first = p.rowptr[row], last = p.rowptr[row + 1], degree = last - first;
    if (first < 0 || degree < 0 || last > p.num_entries) return {i, row};
    const bool takes_all = p.count < 0 || (!p.replace && degree <= p.count) || degree == 0;
    p.out_rowptr[i + 1] = p.out_rowptr[i] + (takes_all ? degree : p.count);
  }
  return {};
}

void sample_rows(const SampleRows& p, int32_t* out_col, int64_t* out_place, int64_t begin, int64_t end) {
  const uint64_t seed = combine(0, p.seed);
  Drawing drawing;
  for_each_row(p, begin, end, [&](int64_t i, int64_t first, int64_t degree) {
    int32_t* const col = out_col + p.out_rowptr[i];
    int64_t* const place = out_place + p.out_rowptr[i];
    const int64_t count = p.out_rowptr[i + 1] - p.out_rowptr[i];
    Words words(combine(seed, static_cast<uint64_t>(p.key[i])));
    if (p.count < 0 || (!p.replace && count == degree)) {
      for (int64_t k = 0; k < count; ++k) place[k] = k;
    } else if (p.replace) {
      for (int64_t k = 0; k < count; ++k) place[k] = words.below(degree);
      std::sort(place, place + count);
    } else if (degree <= 64) {
      draw_few<1>(words, degree, count, place);
    } else if (degree <= 256) {
      draw_few<4>(words, degree, count, place);
    } else {
      drawing.draw(words, degree, count, place);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t entry = first + place[k];
      col[k] = p.col[entry];
      place[k] = p.place.data == nullptr ? entry : p.place[entry];
    }
  });
}

}  // namespace pyg_dist
