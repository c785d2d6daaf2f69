#include "cpu/patterns.h"

#include <algorithm>
#include <array>
#include <vector>

namespace pyg_dist {
namespace {

// The first place of group g at [g + 1]: as its members are put down it becomes the first place of the next group.
// Returns the first index that is no group, or -1.
int64_t count(const int32_t* index, int64_t size, int64_t num_groups, int64_t* first) {
  std::fill_n(first, num_groups + 1, 0);
  for (int64_t k = 0; k < size; ++k) {
    if (index[k] < 0 || index[k] >= num_groups) return k;
    ++first[index[k] + 1];
  }
  int64_t before = 0;
  for (int64_t g = 1; g <= num_groups; ++g) {
    const int64_t members = first[g];
    first[g] = before;
    before += members;
  }
  return -1;
}

}  // namespace

int64_t ColumnSet::assign(const int64_t* column, int64_t size, int64_t num_columns) {
  int64_t last = -1;
  for (int64_t k = 0; k < size; ++k) {
    if (column[k] <= last || column[k] >= num_columns) return k;
    last = column[k];
    words_[static_cast<size_t>(last >> 6)] |= uint64_t{1} << (last & 63);
  }
  int32_t count = 0;
  for (size_t w = 0; w < words_.size(); ++w) {
    before_[w] = count;
    count += __builtin_popcountll(words_[w]);
  }
  return -1;
}

int64_t transpose_csr(const TransposeCsr& p) {
  const int64_t bad = count(p.col, p.num_entries, p.num_cols, p.out_rowptr);
  if (bad >= 0) return bad;
  for (int64_t i = 0; i < p.num_rows; ++i) {
    for (int64_t e = p.rowptr[i]; e < p.rowptr[i + 1]; ++e) {
      const int64_t slot = p.out_rowptr[p.col[e] + 1]++;
      p.out_col[slot] = static_cast<int32_t>(i);
      p.out_entry[slot] = e;
    }
  }
  return -1;
}

bool equals_transpose(const int64_t* rowptr, const int32_t* col, int64_t num_rows) {
  std::vector<int64_t> next(rowptr, rowptr + num_rows);  // of each column, where the transpose's next entry stands
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t e = rowptr[i]; e < rowptr[i + 1]; ++e) {
      const int64_t c = col[e];
      if (c < 0 || c >= num_rows) return false;
      const int64_t slot = next[static_cast<size_t>(c)]++;
      if (slot >= rowptr[c + 1] || col[slot] != i) return false;
    }
  }
  return true;
}

namespace {

constexpr int64_t kTogether = 8;

// Searches that do not wait for each other's reads.
void find_together(const FindSorted& p, int64_t begin) {
  std::array<const int64_t*, kTogether> at;
  at.fill(p.sorted);
  for (int64_t size = p.size; size > 0;) {
    const int64_t half = (size + 1) / 2;
    for (int64_t j = 0; j < kTogether; ++j) {
      const int64_t* const here = at[static_cast<size_t>(j)];
      at[static_cast<size_t>(j)] = here[half - 1] < p.value[begin + j] ? here + half : here;
    }
    size -= half;
  }
  const int64_t* const last = p.sorted + p.size;
  for (int64_t j = 0; j < kTogether; ++j) {
    const int64_t* const here = at[static_cast<size_t>(j)];
    p.place[begin + j] = here < last && *here == p.value[begin + j] ? here - p.sorted : -1;
  }
}

}  // namespace

void find_sorted(const FindSorted& p, int64_t begin, int64_t end) {
  int64_t at = 0;  // all before it are less than the last value
  for (int64_t k = begin; k < end; ++k) {
    const int64_t value = p.value[k];
    if (at > 0 && value <= p.sorted[at - 1]) {
      if (k + kTogether <= end && !std::is_sorted(p.value + k, p.value + k + kTogether)) {
        find_together(p, k);
        k += kTogether - 1;
        continue;
      }
      at = 0;
    }
    int64_t step = 1;
    while (at + step <= p.size && p.sorted[at + step - 1] < value) {
      at += step;
      step *= 2;
    }
    const int64_t* high = p.sorted + std::min(at + step, p.size);
    at = std::lower_bound(p.sorted + at, high, value) - p.sorted;
    p.place[k] = at < p.size && p.sorted[at] == value ? at : -1;
  }
}

}  // namespace pyg_dist
