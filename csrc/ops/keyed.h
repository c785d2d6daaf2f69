// The checks that the ops with keyed random numbers share.
#pragma once

#include "ops/check.h"
#include "problems/keyed.h"

namespace pyg_dist {

inline Keyed keyed_of(const char* op, const Tensor& key, int64_t num_columns, int64_t seed, int64_t column_offset) {
  constexpr int64_t kMaxColumns = int64_t{1} << 33;  // two columns a block at least, and 2^32 blocks
  check_vector(op, "key", key, ScalarType::Long);
  PYG_DIST_CHECK(num_columns >= 0 && column_offset >= 0 && column_offset <= kMaxColumns - num_columns, op,
                 ": expected 'column_offset' and the columns to lie in [0, 2^33], got ", column_offset, " and ",
                 num_columns);
  return {
      .key = static_cast<const int64_t*>(key.const_data_ptr()),
      .num_rows = key.size(0),
      .num_columns = num_columns,
      .column_offset = column_offset,
      .seed = static_cast<uint64_t>(seed),
  };
}

}  // namespace pyg_dist
