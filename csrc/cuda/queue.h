// Where kernels are launched, one after another.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

struct CUstream_st;  // what cudaStream_t points to

namespace pyg_dist::gpu {

using Stream = CUstream_st*;

struct Queue {
  Stream stream;
  std::function<void*(int64_t num_bytes)> scratch;  // memory until the queue has come so far; aligned to 64 bytes
};

// What a grid may have: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
inline void check_grid(int64_t num_blocks, int64_t num_slices) {
  if (num_blocks >= int64_t{1} << 31 || num_slices >= int64_t{1} << 16) {
    throw std::runtime_error("cuda: expected a grid of fewer than 2^31 blocks and 65,536 slices, got " +
                             std::to_string(num_blocks) + " and " + std::to_string(num_slices) +
                             "; take fewer rows or columns at once");
  }
}

template <class T>
T* scratch(const Queue& queue, int64_t count) {
  return static_cast<T*>(queue.scratch(count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace pyg_dist::gpu
