// Lanes of a warp that work on one thing.
#pragma once

#include "cuda/device.h"

namespace pyg_dist::gpu {

// The lanes of this thread's group, of 2^log_lanes lanes side by side.
PYG_DIST_DEVICE Lanes group_of(int log_lanes) {
  const int lanes = 1 << log_lanes;
  const Lanes all = lanes == kWarp ? kAllLanes : (Lanes{1} << lanes) - 1;
  return all << (lane_id() & ~(lanes - 1));
}

// The values of a group's lanes put together, the same bits in each of them. `lanes` come here together: the group's,
// or all of the warp, each group for itself, of which the compiler then has nothing to find out (MATCH.ANY).
template <class T, class Join>
PYG_DIST_DEVICE T join_lanes(T value, int log_lanes, Lanes lanes, const Join& join) {
  for (int bits = 1 << log_lanes >> 1; bits > 0; bits >>= 1) value = join(value, shuffle_xor(lanes, value, bits));
  return value;
}

template <class T>
PYG_DIST_DEVICE T sum_lanes(T value, int log_lanes, Lanes lanes) {
  return join_lanes(value, log_lanes, lanes, [](T a, T b) { return a + b; });
}

// The least group whose lanes have `count` items, `each` a lane.
inline int log_lanes_for(int64_t count, int64_t each) {
  int log_lanes = 0;
  while (log_lanes < 5 && each << log_lanes < count) ++log_lanes;
  return log_lanes;
}

inline int64_t blocks_for(int64_t threads, int64_t threads_of_block) {
  return (threads + threads_of_block - 1) / threads_of_block;
}

}  // namespace pyg_dist::gpu
