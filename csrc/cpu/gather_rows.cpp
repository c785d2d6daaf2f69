#include <algorithm>
#include <cstring>

#include "cpu/table.h"

namespace pyg_dist {
namespace {

constexpr int64_t kPrefetchRows = 8;

// Where row `index` would lie. Unsigned, since the index may be out of range.
uintptr_t address_of(const GatherRows& p, int64_t index) {
  return reinterpret_cast<uintptr_t>(p.x) + static_cast<uintptr_t>(index) * static_cast<uintptr_t>(p.x_stride);
}

// kBytes > 0: known at compile time, so that a row of one element is a load and a store instead of a call.
template <int64_t kBytes>
bool gather(const GatherRows& p, int64_t row_begin, int64_t row_end) {
  const int64_t bytes = kBytes > 0 ? kBytes : p.row_bytes;
  bool in_range = true;
  for (int64_t r = row_begin; r < row_end; ++r) {
    const uintptr_t ahead = address_of(p, p.index[std::min(r + kPrefetchRows, row_end - 1)]);
    for (uintptr_t byte = 0; byte < static_cast<uintptr_t>(bytes); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(ahead + byte));  // never faults
    }
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
