// The words of whole rows, batch by batch, for kernels that draw while they do something else; only for .simd.cpp
// files.
#pragma once

#include "cpu/vec.h"
#include "formats/keyed.h"
#include "problems/keyed.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kBatch = 512;  // counters; their words, 8 KiB, stay in the first-level cache

struct Batch {
  static constexpr int L = kLanes<uint64_t>;
  alignas(64) uint64_t key[kBatch + L];
  alignas(64) uint64_t block[kBatch + L];
  alignas(64) uint32_t words[4 * (kBatch + L)];

  // Counters [at, at + count): consecutive blocks of a row. Those behind them are overwritten, too.
  PYG_DIST_INLINE void set(int64_t at, int64_t count, int64_t row_key, int64_t first_block) {
    using Lanes = Vec<uint64_t, L>;
    const Lanes keys = Lanes{} + static_cast<uint64_t>(row_key);
    Lanes blocks = Lanes{} + static_cast<uint64_t>(first_block);
    for (int lane = 0; lane < L; ++lane) blocks[lane] += static_cast<uint64_t>(lane);
    for (int64_t b = 0; b < count; b += L) {
      store<L>(key + at + b, keys);
      store<L>(block + at + b, blocks);
      blocks += static_cast<uint64_t>(L);
    }
  }

  // words[4 l + w] = word w of counter l, for the first n counters (rounded up to whole vectors). A 64-bit lane has one
  // number of a counter in its lower half, and anything in its upper one.
  template <int kRounds>
  void draw(int64_t n, uint64_t seed, Stream stream) {
    using Lanes = Vec<uint64_t, L>;
    for (int64_t l = 0; l < n; l += L) {
      Lanes c0 = load<L>(key + l), c1 = c0 >> 32;
      Lanes c2 = load<L>(block + l), c3 = Lanes{} + static_cast<uint32_t>(stream);
      auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
      for (int round = 0; round < kRounds; ++round) {
        const Lanes p0 = multiply_lower<L>(c0, Philox::kMultiplier0), p1 = multiply_lower<L>(c2, Philox::kMultiplier1);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0;
        k0 += Philox::kWeyl0;
        k1 += Philox::kWeyl1;
      }
      uint64_t pairs[2 * L];
      constexpr uint64_t kLower = 0xffffffffu;
      store_interleaved<L>(pairs, (c0 & kLower) | (c1 << 32), (c2 & kLower) | (c3 << 32));  // little-endian
      __builtin_memcpy(words + 4 * l, pairs, sizeof(pairs));
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
        batch.set(r * blocks, blocks, keyed.key[row + r], first_block + block);
      }
      batch.draw<Philox::kRounds>(rows * blocks, keyed.seed, stream);
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
