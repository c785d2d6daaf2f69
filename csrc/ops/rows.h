// The error that gather_rows and scatter_add_rows share.
#pragma once

#include <algorithm>

#include "ops/check.h"

namespace pyg_dist {

[[noreturn]] inline void fail_out_of_range(const char* op, const Tensor& index, int64_t num_rows) {
  const auto* data = static_cast<const int64_t*>(index.const_data_ptr());
  const int64_t* end = data + index.size(0);
  const int64_t* bad = std::find_if(data, end, [&](int64_t i) { return i < 0 || i >= num_rows; });
  fail(op, ": expected 'index' to lie in [0, ", num_rows, "), got ", *bad, " at position ", bad - data);
}

}  // namespace pyg_dist
