// Searches in ascending numbers.
#pragma once

#include "cuda/device.h"

namespace pyg_dist::gpu {

// How many of `size` ascending numbers are less than `value`.
template <class T>
PYG_DIST_DEVICE int64_t count_less(const T* ascending, int64_t size, T value) {
  int64_t low = 0, high = size;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ascending[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace pyg_dist::gpu
