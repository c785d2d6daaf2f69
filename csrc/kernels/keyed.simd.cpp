#include "kernels/keyed.h"

#include <type_traits>

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

template <class T>
void dropout_of_type(const KeyedDropout& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  using Mask = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  constexpr int L = kLanes<A>;
  const A scale = static_cast<A>(p.scale);
  const auto use = [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    const auto* x = static_cast<const T*>(p.x) + row * p.keyed.num_columns + column;
    auto* y = static_cast<T*>(p.y) + row * p.keyed.num_columns + column;
    int64_t c = 0;
    for (; c + L <= count; c += L) {
      const auto keep = convert<Mask, L, int32_t>(load<L>(words + c) >= p.threshold);
      store<L>(y + c, keep ? load<L>(x + c) * scale : Vec<A, L>{});
    }
    for (; c < count; ++c) store<1>(y + c, words[c] >= p.threshold ? load<1>(x + c) * scale : A{0});
  };
  for_each_run(p.keyed, Stream::dropout, 1, row_begin, row_end, use);
}

// The uppermost bits of a word, as many as T holds exactly.
template <class T, int L>
PYG_DIST_INLINE Vec<accumulator_t<T>, L> fraction(const uint32_t* words) {
  if constexpr (sizeof(T) == 8) {
    const auto pairs = load<L>(reinterpret_cast<const uint64_t*>(words));
    return convert<double, L, int64_t>(bit_cast<Vec<int64_t, L>>(pairs >> 11)) * 0x1p-53;
  } else {
    constexpr int kDropped = sizeof(T) == 4 ? 8 : 24;
    const auto upper = bit_cast<Vec<int32_t, L>>(load<L>(words) >> kDropped);
    return convert<float, L, int32_t>(upper) * (sizeof(T) == 4 ? 0x1p-24f : 0x1p-8f);
  }
}

template <class T>
void uniform_of_type(const KeyedUniform& p, int64_t row_begin, int64_t row_end) {
  constexpr int kWords = sizeof(T) == 8 ? 2 : 1;
  constexpr int L = kLanes<accumulator_t<T>>;
  const auto use = [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    auto* y = static_cast<T*>(p.y) + row * p.keyed.num_columns + column;
    int64_t c = 0;
    for (; c + L <= count; c += L) store<L>(y + c, fraction<T, L>(words + c * kWords));
    for (; c < count; ++c) store<1>(y + c, fraction<T, 1>(words + c * kWords));
  };
  for_each_run(p.keyed, Stream::uniform, kWords, row_begin, row_end, use);
}

}  // namespace

void dropout_rows(const KeyedDropout& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.element) {
    case Element::f32:
      return dropout_of_type<float>(problem, row_begin, row_end);
    case Element::f64:
      return dropout_of_type<double>(problem, row_begin, row_end);
    case Element::bf16:
      return dropout_of_type<BFloat16>(problem, row_begin, row_end);
  }
}

void uniform_rows(const KeyedUniform& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.element) {
    case Element::f32:
      return uniform_of_type<float>(problem, row_begin, row_end);
    case Element::f64:
      return uniform_of_type<double>(problem, row_begin, row_end);
    case Element::bf16:
      return uniform_of_type<BFloat16>(problem, row_begin, row_end);
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
