// Sparse patterns made from others: cut, transposed, put in order.
#pragma once

#include <cstdint>
#include <functional>

#include "problems/bad_index.h"

namespace pyg_dist {

// Some rows and columns of a pattern, numbered by their places in two lists, with the transpose (ScaleGNN, Alg. 2,
// phases 2 and 3). Entries of one row keep their order.
struct RestrictCsr {
  const int64_t* rowptr;  // [num_all_rows + 1]
  const int32_t* col;     // [num_all_entries], in [0, num_all_cols)
  const int64_t* row;     // [num_rows], in [0, num_all_rows)
  const int64_t* column;  // [num_cols], ascending, in [0, num_all_cols)
  int64_t num_all_rows;
  int64_t num_all_entries;
  int64_t num_all_cols;
  int64_t num_rows;
  int64_t num_cols;
  int64_t* out_rowptr;     // [num_rows + 1]
  int64_t* turned_rowptr;  // [num_cols + 1], of the transpose
};

// The outputs whose length nobody knows before the rows have been looked at.
struct RestrictedEntries {
  int32_t* col;
  int64_t* entry;  // where each stood in `col`
  int32_t* turned_col;
  int64_t* turned_entry;  // where each stands in the restricted pattern, ascending in each column
};

using MakeEntries = std::function<RestrictedEntries(int64_t num_entries)>;  // called once, unless something is bad

struct BadRestriction {
  BadIndex row, column;
};

// A pattern's transpose; in each column the entries keep their order.
struct TransposeCsr {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_entries], in [0, num_cols)
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;
  int64_t* out_rowptr;  // [num_cols + 1]
  int32_t* out_col;
  int64_t* out_entry;  // where each stood in `col`
};

// place[k] = i where sorted[i] = value[k], or -1.
struct FindSorted {
  const int64_t* sorted;  // [size], ascending
  const int64_t* value;   // [num_values]; where they ascend, too, each search begins where the last one ended
  int64_t* place;
  int64_t size;
  int64_t num_values;
};

}  // namespace pyg_dist
