// What kernels do with an index that is out of range.
#pragma once

#include "cuda/bad_index.h"
#include "cuda/device.h"

namespace pyg_dist::gpu {

// Whether `value` lies in [0, size); if not, says so in the cell.
PYG_DIST_DEVICE bool is_in_range(int64_t value, int64_t size, int64_t position, const IndexCheck& check) {
  if (value >= 0 && value < size) return true;
  if (atomic_swap(check.found.taken, 1) == 0) {
    BadIndexCell* const cell = check.found.cell;
    cell->position = position;
    cell->value = value;
    cell->size = size;
    cell->op = check.op;
    cell->name = check.name;
    system_fence();
    *static_cast<volatile uint32_t*>(&cell->ready) = 1;
  }
  return false;
}

}  // namespace pyg_dist::gpu
