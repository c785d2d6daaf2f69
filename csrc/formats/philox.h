// Philox-4x32, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011);
// keyed.h has which of its words belongs to which element. cpu/keyed_words.h has the vector form.
//
//   key      = (seed mod 2^32, seed div 2^32)                      seed as an unsigned 64-bit number
//   counter  = (row_key mod 2^32, row_key div 2^32, block, stream) row_key alike; for a node, its global id
#pragma once

#include <cstdint>

#include "formats/portable.h"

namespace pyg_dist {

// The last counter word: one stream per use, so that a mask and a noise drawn with one seed are independent.
enum class Stream : uint32_t { dropout = 0, uniform = 1, normal = 2, rounding = 3 };

struct Philox {
  static constexpr int kRounds = 10;
  static constexpr int kRoundingRounds = 7;  // packed_rows.h
  static constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  static constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
};

// Four words of one counter.
struct Words {
  uint32_t word[4];
};

template <int kRounds = Philox::kRounds>
PYG_DIST_PORTABLE Words philox(uint64_t seed, uint64_t row_key, uint32_t block, Stream stream) {
  Words c = {
      {static_cast<uint32_t>(row_key), static_cast<uint32_t>(row_key >> 32), block, static_cast<uint32_t>(stream)}};
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{Philox::kMultiplier0} * c.word[0], p1 = uint64_t{Philox::kMultiplier1} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += Philox::kWeyl0;
    k1 += Philox::kWeyl1;
  }
  return c;
}

}  // namespace pyg_dist
