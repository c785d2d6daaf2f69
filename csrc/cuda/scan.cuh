// Sums of what stands before each number.
#pragma once

#include "cuda/device.h"
#include "cuda/queue.h"

namespace pyg_dist::gpu {

// number[k] = the sum of all before it, and number[count] that of all where there is a place for it: by one block, a
// tile of numbers after the other.
template <class T>
struct SumBefore {
  static constexpr int kThreads = 1024;
  struct Shared {
    T of_warp[kThreads / kWarp];
  };

  T* number;
  int64_t count;
  bool has_total;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    T before = 0;
    for (int64_t first = 0; first < count; first += kThreads) {
      const int64_t k = first + thread_id();
      const T own = k < count ? number[k] : 0;
      const T sum = sum_up_to(own);
      if (lane_id() == kWarp - 1) shared.of_warp[thread_id() / kWarp] = sum;
      block_sync();
      if (thread_id() < kWarp) shared.of_warp[lane_id()] = sum_up_to(shared.of_warp[lane_id()]);
      block_sync();
      const int warp = thread_id() / kWarp;
      if (k < count) number[k] = before + sum - own + (warp == 0 ? T{0} : shared.of_warp[warp - 1]);
      before += shared.of_warp[kThreads / kWarp - 1];
      block_sync();
    }
    if (has_total && thread_id() == 0) number[count] = before;
  }

 private:
  static_assert(kThreads == kWarp * kWarp);

  // Of the lanes up to this one.
  static PYG_DIST_DEVICE T sum_up_to(T value) {
    for (int step = 1; step < kWarp; step *= 2) {
      const T other = shuffle(kAllLanes, value, (lane_id() - step) & (kWarp - 1));
      if (lane_id() >= step) value += other;
    }
    return value;
  }
};

}  // namespace pyg_dist::gpu
