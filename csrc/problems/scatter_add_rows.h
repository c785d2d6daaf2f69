// out[index[r]] += rows[r] for r = order[k], one k after the other: where `order` ascends among equal indices they
// always add up in the same order.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct ScatterAddRows {
  const int64_t* index;  // [num_rows]
  const int64_t* order;  // [num_rows], or null: order[k] = k
  const void* rows;      // [num_rows, num_features], rows_stride elements apart
  void* out;             // [num_out_rows, num_features], out_stride elements apart
  int64_t num_rows;
  int64_t num_out_rows;
  int64_t num_features;
  int64_t rows_stride;
  int64_t out_stride;
  Element element;  // bf16 rounds after each addition
};

}  // namespace pyg_dist
