// CUB's sums of what stands before, on the host.
#pragma once

#include <cstddef>
#include <numeric>

#include "cuda/queue.h"

namespace cub {

struct DeviceScan {
  template <class T>
  static int ExclusiveSum(void* memory, std::size_t& num_bytes, const T* from, T* to, int64_t count,
                          pyg_dist::gpu::Stream) {
    num_bytes = 1;
    if (memory != nullptr) std::exclusive_scan(from, from + count, to, T{0});
    return 0;
  }
};

}  // namespace cub
