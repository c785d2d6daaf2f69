// An index out of range, as a kernel finds it: in memory that the host reads without waiting for the device.
#pragma once

#include <cstdint>

namespace pyg_dist::gpu {

struct BadIndexCell {
  uint32_t taken;                 // by the first one that is found; the others are dropped
  uint32_t ready;                 // the rest is there
  int64_t position, value, size;  // name[position] = value, where [0, size) was expected
  const char *op, *name;
};

// What kernels are told of an argument that holds indices.
struct IndexCheck {
  const char *op, *name;
  BadIndexCell* cell;
};

BadIndexCell* new_cell();

}  // namespace pyg_dist::gpu
