// out[r] = x[index[r]], by bytes.
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

}  // namespace pyg_dist
