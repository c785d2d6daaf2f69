#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <stdexcept>
#include <string>

#include "cuda/for_each.cuh"
#include "cuda/sort.h"

namespace pyg_dist::gpu {
namespace {

struct Count {
  int32_t* number;

  PYG_DIST_DEVICE void operator()(int64_t k) const { number[k] = static_cast<int32_t>(k); }
};

// Calls call(memory, num_bytes) twice, the first time to learn how much memory it takes.
template <class Call>
void with_scratch(const Queue& queue, const Call& call) {
  size_t num_bytes = 0;
  check(call(nullptr, num_bytes));
  check(call(scratch<char>(queue, static_cast<int64_t>(num_bytes)), num_bytes));
}

}  // namespace

Sorted sort_keys(uint32_t* key, int64_t count, int num_bits, const Queue& queue) {
  if (count > INT32_MAX) {
    throw std::runtime_error("cuda: expected fewer than 2^31 numbers to sort, got " + std::to_string(count));
  }
  int32_t* const place = scratch<int32_t>(queue, count);
  for_each(Count{place}, count, queue);
  cub::DoubleBuffer<uint32_t> keys(key, scratch<uint32_t>(queue, count));
  cub::DoubleBuffer<int32_t> places(place, scratch<int32_t>(queue, count));
  if (count > 0) {
    with_scratch(queue, [&](void* memory, size_t& num_bytes) {
      return cub::DeviceRadixSort::SortPairs(memory, num_bytes, keys, places, static_cast<int32_t>(count), 0,
                                             std::max(num_bits, 1), queue.stream);
    });
  }
  return {keys.Current(), places.Current()};
}

void sum_before(int64_t* number, int64_t count, const Queue& queue) {
  with_scratch(queue, [&](void* memory, size_t& num_bytes) {
    return cub::DeviceScan::ExclusiveSum(memory, num_bytes, number, number, count + 1, queue.stream);
  });
}

}  // namespace pyg_dist::gpu
