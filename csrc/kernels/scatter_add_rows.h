// out[index[r]] += rows[r], one r after the other, so that repeated indices always add up in the same order.
//
// Each row of `out` has one of num_owners owners, by a hash of its number; a call does the rows of the owners
// [owner_begin, owner_end) and passes over the others. The result does not depend on num_owners.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "kernels/cpu/level.h"

namespace pyg_dist {

struct ScatterAddRows {
  const int64_t* index;  // [num_rows], within out
  const void* rows;      // [num_rows, num_features], rows_stride elements apart
  void* out;             // rows of num_features, out_stride elements apart
  int64_t num_rows;
  int64_t num_features;
  int64_t rows_stride;
  int64_t out_stride;
  int64_t num_owners;
  Element element;  // bf16 rounds after each addition
};

PYG_DIST_AT_EVERY_LEVEL(void scatter_add_owned(const ScatterAddRows& problem, int64_t owner_begin, int64_t owner_end))

}  // namespace pyg_dist
