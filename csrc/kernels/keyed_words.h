// The words of whole rows, batch by batch, for kernels that draw while they do something else; only for .simd.cpp
// files.
#pragma once

#include "kernels/keyed.h"
#include "kernels/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

// Counters in one batch: their words, 16 KiB, stay in the first-level cache.
constexpr int64_t kBatch = 1024;

constexpr int kPhiloxLanes = kVectorBytes / 4;
using Words = Vec<uint32_t, kPhiloxLanes>;

struct Batch {
  alignas(64) uint32_t key_low[kBatch];
  alignas(64) uint32_t key_high[kBatch];
  alignas(64) uint32_t block[kBatch];
  alignas(64) uint32_t words[4 * kBatch];

  // words[4 l + w] = word w of counter l, for the first n counters (rounded up to whole vectors).
  void draw(int64_t n, uint64_t seed, Stream stream) {
    for (int64_t l = 0; l < n; l += kPhiloxLanes) {
      Words c0 = load<kPhiloxLanes>(key_low + l), c1 = load<kPhiloxLanes>(key_high + l);
      Words c2 = load<kPhiloxLanes>(block + l), c3 = Words{} + static_cast<uint32_t>(stream);
      auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
      for (int round = 0; round < Philox::kRounds; ++round) {
        Words high0, low0, high1, low1;
        multiply_wide<kPhiloxLanes>(c0, Philox::kMultiplier0, high0, low0);
        multiply_wide<kPhiloxLanes>(c2, Philox::kMultiplier1, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += Philox::kWeyl0;
        k1 += Philox::kWeyl1;
      }
      store_interleaved<kPhiloxLanes>(words + 4 * l, c0, c1, c2, c3);
    }
  }
};

// Calls use(row, column, count, words): the words of `count` columns of a row from `column` on, `words_each` per
// column.
template <class Use>
PYG_DIST_INLINE void for_each_run(const Keyed& keyed, Stream stream, int words_each, int64_t row_begin, int64_t row_end,
                                  const Use& use) {
  const int64_t per_block = 4 / words_each;
  const int64_t first_block = keyed.column_offset / per_block;
  const int64_t last_block = (keyed.column_offset + keyed.num_columns - 1) / per_block;
  const int64_t num_blocks = last_block - first_block + 1;
  const int64_t blocks_at_once = num_blocks < kBatch ? num_blocks : kBatch;
  const int64_t rows_at_once = kBatch / blocks_at_once;
  Batch batch;
  for (int64_t row = row_begin; row < row_end; row += rows_at_once) {
    const int64_t rows = rows_at_once < row_end - row ? rows_at_once : row_end - row;
    for (int64_t block = 0; block < num_blocks; block += blocks_at_once) {
      const int64_t blocks = blocks_at_once < num_blocks - block ? blocks_at_once : num_blocks - block;
      for (int64_t r = 0; r < rows; ++r) {
        const auto key = static_cast<uint64_t>(keyed.key[row + r]);
        for (int64_t b = 0; b < blocks; ++b) {
          batch.key_low[r * blocks + b] = static_cast<uint32_t>(key);
          batch.key_high[r * blocks + b] = static_cast<uint32_t>(key >> 32);
          batch.block[r * blocks + b] = static_cast<uint32_t>(first_block + block + b);
        }
      }
      batch.draw(rows * blocks, keyed.seed, stream);
      // The first block may start before the first column, the last one end after the last.
      const int64_t begin = (first_block + block) * per_block - keyed.column_offset;
      const int64_t end = begin + blocks * per_block;
      const int64_t column = begin > 0 ? begin : 0;
      const int64_t count = (end < keyed.num_columns ? end : keyed.num_columns) - column;
      for (int64_t r = 0; r < rows; ++r) {
        use(row + r, column, count, batch.words + 4 * r * blocks + (column - begin) * words_each);
      }
    }
  }
}

}  // namespace
}  // namespace pyg_dist::PYG_DIST_LEVEL
