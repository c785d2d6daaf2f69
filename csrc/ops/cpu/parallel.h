// Dynamic scheduling on torch's own threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pyg_dist {

// Calls body(k) once for every k in [0, num_chunks), each thread taking the next one when it is done with its last.
template <class Body>
void for_each_chunk(int64_t num_chunks, const Body& body) {
  if (num_chunks == 1) {  // saves the start of the pool for small inputs
    body(int64_t{0});
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t num_workers = std::min<int64_t>(num_chunks, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t, int64_t) {
    for (int64_t k = next.fetch_add(1, std::memory_order_relaxed); k < num_chunks;
         k = next.fetch_add(1, std::memory_order_relaxed)) {
      body(k);
    }
  });
}

// Calls body(begin, end) for chunks of about `grain` items of [0, size).
template <class Body>
void for_each_range(int64_t size, int64_t grain, const Body& body) {
  grain = std::max<int64_t>(grain, 1);
  for_each_chunk((size + grain - 1) / grain,
                 [&](int64_t k) { body(k * grain, std::min<int64_t>((k + 1) * grain, size)); });
}

}  // namespace pyg_dist
