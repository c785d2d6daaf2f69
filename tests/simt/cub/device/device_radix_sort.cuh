// CUB's stable sort, on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "cuda/queue.h"

namespace cub {

// What is sorted comes into the other memory, as it may with CUB.
template <class T>
struct DoubleBuffer {
  T *current, *alternate;

  DoubleBuffer(T* current_, T* alternate_) : current(current_), alternate(alternate_) {}
  T* Current() const { return current; }
};

struct DeviceRadixSort {
  template <class Key, class Value>
  static int SortPairs(void* memory, std::size_t& num_bytes, DoubleBuffer<Key>& keys, DoubleBuffer<Value>& values,
                       int count, int first_bit, int end_bit, pyg_dist::gpu::Stream) {
    num_bytes = 1;
    if (memory == nullptr) return 0;
    std::vector<int> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    const auto digits = [&](int k) {
      return keys.current[k] >> first_bit & ((Key{2} << (end_bit - first_bit - 1)) - 1);
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return digits(a) < digits(b); });
    for (int k = 0; k < count; ++k) {
      const int from = order[static_cast<std::size_t>(k)];
      keys.alternate[k] = keys.current[from];
      values.alternate[k] = values.current[from];
    }
    std::swap(keys.current, keys.alternate);
    std::swap(values.current, values.alternate);
    return 0;
  }
};

}  // namespace cub
