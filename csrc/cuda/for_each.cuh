// One thread for each item.
#pragma once

#include "cuda/device.h"
#include "cuda/queue.h"
#include "cuda/warp.cuh"

namespace pyg_dist::gpu {

// A thread for each of `count` items: f(k).
template <class F>
struct ForEach {
  static constexpr int kThreads = 256;
  using Shared = NoShared;

  F f;
  int64_t count;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = block_id() * kThreads + thread_id();
    if (k < count) f(k);
  }
};

template <class F>
void for_each(const F& f, int64_t count, const Queue& queue) {
  launch(ForEach<F>{f, count}, blocks_for(count, ForEach<F>::kThreads), queue.stream);
}

}  // namespace pyg_dist::gpu
