// An index out of range, as a kernel finds it: in memory that the host reads without waiting for the device.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/queue.h"

namespace pyg_dist::gpu {

struct BadIndexCell {
  uint32_t ready;                 // the rest is there
  int64_t position, value, size;  // name[position] = value, where [0, size) was expected
  const char *op, *name;
};

// What a device has found.
struct BadIndexes {
  BadIndexCell* cell;  // in memory of the host's
  uint32_t* taken;     // in the device's own, where swaps are atomic: the cell has one; others are dropped
};

// What kernels are told of an argument that holds indices.
struct IndexCheck {
  const char *op, *name;
  BadIndexes found;
};

// Of the current device, for good.
BadIndexes new_bad_indexes();

// What has been found, if that is known now; what comes later on the stream may then find another one. Nothing while
// the stream is captured: it would be part of the CUDA graph.
std::optional<BadIndexCell> take_bad_index(const BadIndexes& found, Stream stream);

}  // namespace pyg_dist::gpu
