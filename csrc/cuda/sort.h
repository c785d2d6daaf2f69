// Keys in ascending order, and sums of what stands before: by CUB, which comes with CUDA.
#pragma once

#include "cuda/queue.h"

namespace pyg_dist::gpu {

struct Sorted {
  const uint32_t* key;   // ascending
  const int32_t* place;  // where each stood; equal keys as they stood
};

// key: [count], below 2^num_bits; overwritten. Fewer than 2^31 of them.
Sorted sort_keys(uint32_t* key, int64_t count, int num_bits, const Queue& queue);

// number: [count + 1]: each becomes the sum of all before it, whatever the last one was.
void sum_before(int64_t* number, int64_t count, const Queue& queue);

}  // namespace pyg_dist::gpu
