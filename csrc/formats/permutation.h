// A permutation of [0, size) that is a function of a seed; what stands at one of its places is found without the
// others. tests/reference_ops.py mirrors it.
//
// A Feistel network on the smallest 2^bits >= size (two bits at least), whose parts have ceil(bits / 2) and
// floor(bits / 2) bits, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): a number
// outside of [0, size) is encrypted again until one inside comes, fewer than two times on average. A round adds to one
// part, modulo two, the upper bits of mix(other part ^ round key); mix is SplitMix64's finaliser (Steele, Lea and
// Flood, 2014), and round key k is combine(combine(0, seed), k).
#pragma once

#include <cstdint>

#include "formats/portable.h"

namespace pyg_dist {

PYG_DIST_PORTABLE uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// A seed made of a seed and one more number.
PYG_DIST_PORTABLE uint64_t combine(uint64_t seed, uint64_t number) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  return mix((seed ^ mix(number + kGolden)) + kGolden);
}

class Permutation {
 public:
  PYG_DIST_PORTABLE Permutation(uint64_t size, uint64_t seed)
      : size_(size),
        low_bits_(num_bits(size) / 2),
        high_bits_(num_bits(size) - low_bits_),
        num_rounds_(num_bits(size) <= kFewBits ? kMaxRounds : kRounds) {
    const uint64_t key = combine(0, seed);
    for (int k = 0; k < num_rounds_; ++k) key_[k] = combine(key, static_cast<uint64_t>(k));
  }

  PYG_DIST_PORTABLE uint64_t at(uint64_t place) const {
    do {
      encrypt<1>(&place);
    } while (place >= size_);
    return place;
  }

  // The network alone, of several numbers below 2^bits at once.
  template <int kCount>
  PYG_DIST_PORTABLE void encrypt(uint64_t* number) const {
    uint64_t low[kCount], high[kCount];
    for (int i = 0; i < kCount; ++i) {
      low[i] = number[i] & ((uint64_t{1} << low_bits_) - 1);
      high[i] = number[i] >> low_bits_;
    }
    for (int k = 0; k < num_rounds_; k += 2) {
      for (int i = 0; i < kCount; ++i) high[i] ^= mix(low[i] ^ key_[k]) >> (64 - high_bits_);
      for (int i = 0; i < kCount; ++i) low[i] ^= mix(high[i] ^ key_[k + 1]) >> (64 - low_bits_);
    }
    for (int i = 0; i < kCount; ++i) number[i] = (high[i] << low_bits_) | low[i];
  }

 private:
  // A round mixes the less the fewer bits there are: these make pairs uniform as far as 10^5 samples can tell.
  static constexpr int kRounds = 8, kFewBits = 8, kMaxRounds = 24;

  static PYG_DIST_PORTABLE int num_bits(uint64_t size) {
    int bits = 2;
    while (bits < 64 && (size - 1) >> bits > 0) ++bits;
    return bits;
  }

  uint64_t size_;
  int low_bits_, high_bits_, num_rounds_;
  uint64_t key_[kMaxRounds];
};

}  // namespace pyg_dist
