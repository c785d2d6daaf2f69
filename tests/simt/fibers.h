// The threads of a GPU's blocks as fibers of one thread: tests/simt/cuda/device.h has the words that kernels use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyg_dist::simt {

constexpr int kWarp = 32;

// Where threads wait for each other: the word, and its place in the source.
struct Site {
  const char* word;
  const char* file;
  uint32_t line, column;
};

// Of the thread that runs.
int thread();
int64_t block();
int64_t slice();

void block_sync(Site site);
void warp_sync(Site site, uint32_t lanes);
// The value that lane `from` of the same warp brings.
uint64_t exchange(Site site, uint32_t lanes, uint64_t value, int from);
uint32_t ballot(Site site, uint32_t lanes, bool is_true);
void check_aligned(const void* address, size_t bytes);

struct Launch {
  void (*body)(const void* kernel, void* shared);
  const void* kernel;
  size_t shared_bytes;
  int num_threads;
  int64_t num_blocks, num_slices;
};
void run(const Launch& launch);

// Another order of blocks and threads: PYG_DIST_SIMT_SEED, 0 at first.
void set_seed(uint64_t seed);

}  // namespace pyg_dist::simt
