// The work of csrc/problems/patterns.h on a CPU, by one thread but for the rows that are filtered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats/portable.h"
#include "problems/patterns.h"

namespace pyg_dist {

// A set of columns as bits, and the number of columns in the words before each.
struct ColumnBits {
  const uint64_t* words;
  const int32_t* before;

  PYG_DIST_PORTABLE bool has(int32_t column) const { return (words[word(column)] >> (column & 63)) & 1; }

  PYG_DIST_PORTABLE int32_t place(int32_t column) const {
    const uint64_t below = words[word(column)] & ((uint64_t{1} << (column & 63)) - 1);
    return before[word(column)] + __builtin_popcountll(below);
  }

 private:
  PYG_DIST_PORTABLE static std::size_t word(int32_t column) { return static_cast<uint32_t>(column) >> 6; }
};

// Its memory: N / 8 bytes, and N / 16 for the places. Both lie in a cache that a list of N numbers would not fit in.
class ColumnSet {
 public:
  explicit ColumnSet(int64_t num_columns)
      : words_(static_cast<size_t>(num_columns / 64 + 1)), before_(static_cast<size_t>(num_columns / 64 + 1)) {}

  // The first place where `column` does not ascend within [0, num_columns), or -1.
  int64_t assign(const int64_t* column, int64_t size, int64_t num_columns);

  ColumnBits bits() const { return {words_.data(), before_.data()}; }

 private:
  std::vector<uint64_t> words_;
  std::vector<int32_t> before_;
};

// The entries of some rows whose column is in the set, and their columns: what is looked up later lies close together.
// Writes how many row i keeps to out_rowptr[i + 1].
struct FilterRows {
  RestrictCsr of;
  ColumnBits columns;
  int64_t* entry;  // room for all entries of the rows, as in col
  int32_t* col;
};

// The place in the set of columns that are there.
struct RemapEntries {
  const int32_t* col;
  ColumnBits columns;
  int32_t* out;
};

// The first entry whose column or row is out of range, or -1; where there is one, nothing is in its place.
int64_t transpose_csr(const TransposeCsr& p);

// Whether a square pattern's transpose has the same rowptr and col. Ends at the first entry that shows it has not.
bool equals_transpose(const int64_t* rowptr, const int32_t* col, int64_t num_rows);

void find_sorted(const FindSorted& p, int64_t begin, int64_t end);

}  // namespace pyg_dist
