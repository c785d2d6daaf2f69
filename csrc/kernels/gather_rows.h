// out[r] = x[index[r]], by bytes. The C library's memcpy chooses its own instruction set, so there is one version.
#pragma once

#include <cstdint>

namespace pyg_dist {

struct GatherRows {
  const char* x;         // num_source_rows rows, x_stride bytes apart
  const int64_t* index;  // [num_rows]
  char* out;             // rows, out_stride bytes apart
  int64_t num_source_rows;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t x_stride;
  int64_t out_stride;
};

// Copies the rows [row_begin, row_end) of `out`; false, and that row left as it was, if an index is out of range.
bool gather_rows(const GatherRows& problem, int64_t row_begin, int64_t row_end);

}  // namespace pyg_dist
