// Keys in ascending order, equal ones in the order in which they stood.
#pragma once

#include "cuda/queue.h"

namespace pyg_dist::gpu {

struct Sorted {
  const uint32_t* key;   // ascending
  const int32_t* place;  // where each stood
};

// key: [count], below 2^num_bits; overwritten. Fewer than 2^31 of them.
Sorted sort_keys(uint32_t* key, int64_t count, int num_bits, const Queue& queue);

}  // namespace pyg_dist::gpu
