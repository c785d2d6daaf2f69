#include <algorithm>
#include <atomic>
#include <functional>

#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {

RowptrScan scan_rowptr(const int64_t* rowptr, int64_t num_rows) {
  constexpr int64_t kRowsPerChunk = 1 << 15;
  RowptrScan scan{.first = rowptr[0], .last = rowptr[num_rows]};
  std::atomic<bool> decreases{false};
  for_each_range(num_rows, kRowsPerChunk, [&](int64_t begin, int64_t end) {
    bool falls = false;
    for (int64_t row = begin; row < end; ++row) falls |= rowptr[row + 1] < rowptr[row];
    if (falls) decreases.store(true, std::memory_order_relaxed);
  });
  if (decreases) {
    const int64_t* fall = std::adjacent_find(rowptr, rowptr + num_rows + 1, std::greater<>());
    scan.falls_at = fall + 1 - rowptr;
    scan.before = fall[0];
    scan.after = fall[1];
  }
  return scan;
}

}  // namespace pyg_dist::cpu
