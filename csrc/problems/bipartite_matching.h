// A maximum matching of a bipartite graph: the most entries of a pattern of which no two share a row or a column.
#pragma once

#include <cstdint>

namespace pyg_dist {

struct BipartiteMatching {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_entries], in [0, num_cols); a row may hold a column several times
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;
  int32_t* col_of;  // [num_rows]: the column matched to each row, or -1
  // Whether a path along entries and matched entries in turn leads there from a row, or a column, without a partner.
  bool* row_reached;  // [num_rows]
  bool* col_reached;  // [num_cols]
};

}  // namespace pyg_dist
