// A radix sort, eight bits at a time from the lowest ones, each step stable: Satish, Harris and Garland, "Designing
// efficient sorting algorithms for manycore GPUs" (IPDPS 2009).

#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/scan.cuh"
#include "cuda/sort.h"
#include "cuda/warp.cuh"

namespace pyg_dist::gpu {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRounds = 8;  // of 32 keys of a warp
constexpr int64_t kTile = kThreads * kRounds;
static_assert(kThreads == kDigits);

struct Step {
  const uint32_t* key;
  const int32_t* place;  // null: as they stand
  uint32_t* out_key;
  int32_t* out_place;
  int32_t* start;  // [kDigits, num_tiles]: how many keys of a tile have a digit, then where the first one goes
  int64_t count, num_tiles;
  int shift;

  // A warp takes keys side by side, 32 in each round.
  PYG_DIST_DEVICE int64_t at(int round) const {
    return block_id() * kTile + (thread_id() / kWarp * kRounds + round) * kWarp + lane_id();
  }
  PYG_DIST_DEVICE uint32_t digit(int64_t k) const { return key[k] >> shift & (kDigits - 1); }
};

struct CountDigits {
  static constexpr int kThreads = gpu::kThreads;
  struct Shared {
    int32_t count[kDigits];
  };

  Step step;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    shared.count[thread_id()] = 0;
    block_sync();
    for (int round = 0; round < kRounds; ++round) {
      const int64_t k = step.at(round);
      if (k < step.count) atomic_add(&shared.count[step.digit(k)], 1);
    }
    block_sync();
    step.start[thread_id() * step.num_tiles + block_id()] = shared.count[thread_id()];
  }
};

struct MoveKeys {
  static constexpr int kThreads = gpu::kThreads;
  struct Shared {
    int32_t next[kWarps][kDigits];  // where a warp's next key of a digit goes
  };

  Step step;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    const int warp = thread_id() / kWarp;
    for (int w = 0; w < kWarps; ++w) shared.next[w][thread_id()] = 0;
    block_sync();
    for (int round = 0; round < kRounds; ++round) {
      const int64_t k = step.at(round);
      if (k < step.count) atomic_add(&shared.next[warp][step.digit(k)], 1);
    }
    block_sync();
    int32_t start = step.start[thread_id() * step.num_tiles + block_id()];
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = shared.next[w][thread_id()];
      shared.next[w][thread_id()] = start;
      start += count;
    }
    block_sync();
    for (int round = 0; round < kRounds; ++round) {
      const int64_t k = step.at(round);
      const Lanes here = ballot(kAllLanes, k < step.count);
      const uint32_t digit = k < step.count ? step.digit(k) : 0;
      Lanes alike = here;  // the lanes with this digit
      for (int bit = 0; bit < kDigitBits; ++bit) {
        const bool is_set = digit >> bit & 1;
        const Lanes set = ballot(kAllLanes, is_set);
        alike &= is_set ? set : ~set;
      }
      const int before = count_bits(alike & ((Lanes{1} << lane_id()) - 1));
      const int32_t to = shared.next[warp][digit] + before;
      warp_sync(kAllLanes);
      if (k < step.count) {
        if (before == 0) shared.next[warp][digit] = to + count_bits(alike);
        step.out_key[to] = step.key[k];
        step.out_place[to] = step.place == nullptr ? static_cast<int32_t>(k) : step.place[k];
      }
      warp_sync(kAllLanes);  // the ballots of the next round meet, too, but do not order memory
    }
  }
};

}  // namespace

Sorted sort_keys(uint32_t* key, int64_t count, int num_bits, const Queue& queue) {
  if (count > INT32_MAX) {
    throw std::runtime_error("cuda: expected fewer than 2^31 numbers to sort, got " + std::to_string(count));
  }
  const int64_t num_tiles = blocks_for(count, kTile);
  uint32_t* other_key = scratch<uint32_t>(queue, count);
  int32_t *place = scratch<int32_t>(queue, count), *other_place = scratch<int32_t>(queue, count);
  auto* const start = scratch<int32_t>(queue, kDigits * num_tiles);
  // At least one step, which writes down the places.
  int shift = 0;
  do {
    const Step step{key, shift == 0 ? nullptr : place, other_key, other_place, start, count, num_tiles, shift};
    launch(CountDigits{step}, num_tiles, queue.stream);
    launch(SumBefore<int32_t>{start, kDigits * num_tiles, false}, count > 0, queue.stream);
    launch(MoveKeys{step}, num_tiles, queue.stream);
    std::swap(key, other_key);
    std::swap(place, other_place);
    shift += kDigitBits;
  } while (shift < num_bits);
  return {key, place};
}

}  // namespace pyg_dist::gpu
