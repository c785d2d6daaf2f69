// Where kernels are launched, one after another.
#pragma once

#include <cstdint>
#include <functional>

struct CUstream_st;  // what cudaStream_t points to

namespace pyg_dist::gpu {

using Stream = CUstream_st*;

struct Queue {
  Stream stream;
  std::function<void*(int64_t num_bytes)> scratch;  // memory until the queue has come so far; aligned to 64 bytes
};

template <class T>
T* scratch(const Queue& queue, int64_t count) {
  return static_cast<T*>(queue.scratch(count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace pyg_dist::gpu
