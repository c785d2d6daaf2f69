// The work of csrc/kernels/patterns.h on a CPU, by one thread but for the rows that are filtered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/patterns.h"

namespace pyg_dist {

// A set of columns in N / 8 bytes and their places among themselves in N / 16: both lie in a cache that a list of N
// numbers would not fit in.
class ColumnSet {
 public:
  explicit ColumnSet(int64_t num_columns)
      : words_(static_cast<size_t>(num_columns / 64 + 1)), before_(static_cast<size_t>(num_columns / 64 + 1)) {}

  // The first place where `column` does not ascend within [0, num_columns), or -1.
  int64_t assign(const int64_t* column, int64_t size, int64_t num_columns);

  bool has(int32_t column) const { return (words_[word(column)] >> (column & 63)) & 1; }

  int32_t place(int32_t column) const {
    const uint64_t below = words_[word(column)] & ((uint64_t{1} << (column & 63)) - 1);
    return before_[word(column)] + __builtin_popcountll(below);
  }

 private:
  static std::size_t word(int32_t column) { return static_cast<uint32_t>(column) >> 6; }

  std::vector<uint64_t> words_;
  std::vector<int32_t> before_;  // columns in earlier words
};

// The entries of rows [begin, end) whose column is in the set; `entry` has room for all of these rows' entries. Writes
// how many each row keeps to out_rowptr[row + 1], and returns their sum.
int64_t filter_rows(const RestrictCsr& p, const ColumnSet& columns, int64_t begin, int64_t end, int64_t* entry);

// col[k] of the entries.
void remap_entries(const RestrictCsr& p, const ColumnSet& columns, const int64_t* entry, int64_t size, int32_t* col);

// The first entry whose column or row is out of range, or -1; where there is one, nothing is in its place.
int64_t transpose_csr(const TransposeCsr& p);

void find_sorted(const FindSorted& p, int64_t begin, int64_t end);

}  // namespace pyg_dist
