#include <algorithm>
#include <cstring>

#include "kernels/cpu/table.h"

namespace pyg_dist {
namespace {

constexpr int64_t kPrefetchRows = 8;

// kBytes > 0: known at compile time, so that a row of one element is a load and a store instead of a call.
template <int64_t kBytes>
bool gather(const GatherRows& p, int64_t row_begin, int64_t row_end) {
  const int64_t bytes = kBytes > 0 ? kBytes : p.row_bytes;
  bool in_range = true;
  for (int64_t r = row_begin; r < row_end; ++r) {
    const char* ahead = p.x + p.index[std::min(r + kPrefetchRows, row_end - 1)] * p.x_stride;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + byte);  // never faults
    const int64_t from = p.index[r];
    if (from < 0 || from >= p.num_source_rows) {
      in_range = false;
      continue;
    }
    std::memcpy(p.out + r * p.out_stride, p.x + from * p.x_stride, static_cast<size_t>(bytes));
  }
  return in_range;
}

}  // namespace

bool gather_rows(const GatherRows& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.row_bytes) {
    case 1:
      return gather<1>(problem, row_begin, row_end);
    case 2:
      return gather<2>(problem, row_begin, row_end);
    case 4:
      return gather<4>(problem, row_begin, row_end);
    case 8:
      return gather<8>(problem, row_begin, row_end);
    default:
      return gather<0>(problem, row_begin, row_end);
  }
}

}  // namespace pyg_dist
