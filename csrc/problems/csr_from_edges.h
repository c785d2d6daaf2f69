// Entries (row, col) of a sparse matrix, grouped by row in their order: the CSR pattern, and where each entry came
// from.
#pragma once

#include <cstdint>

namespace pyg_dist {

// int32 or int64 numbers.
struct Integers {
  const void* data;
  bool is_wide;

  int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};
struct IntegersOut {
  void* data;
  bool is_wide;

  void set(int64_t i, int64_t value) const {
    if (is_wide) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

struct CsrFromEdges {
  Integers row, col;    // [num_entries]
  Integers edge;        // [num_entries], or null: edge[k] = k
  int64_t* rowptr;      // [num_rows + 1]
  int32_t* sorted_col;  // [num_entries]
  IntegersOut sorted_edge;
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;
};

// What a look at all entries finds.
struct EntriesScan {
  int64_t bad = -1;  // the first entry outside of the matrix, or -1
  bool is_sorted;    // by row
};

}  // namespace pyg_dist
