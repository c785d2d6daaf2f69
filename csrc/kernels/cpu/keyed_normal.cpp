#include "kernels/keyed_normal.h"

#include <array>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "formats/bfloat16.h"

namespace pyg_dist {
namespace {

using Words = std::array<uint32_t, 4>;

Words philox(uint64_t seed, uint64_t row_key, uint32_t block, Stream stream) {
  Words c = {static_cast<uint32_t>(row_key), static_cast<uint32_t>(row_key >> 32), block,
             static_cast<uint32_t>(stream)};
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < Philox::kRounds; ++round) {
    const uint64_t p0 = uint64_t{Philox::kMultiplier0} * c[0], p1 = uint64_t{Philox::kMultiplier1} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += Philox::kWeyl0;
    k1 += Philox::kWeyl1;
  }
  return c;
}

struct Pair {
  double even, odd;
};

Pair box_muller(double u, double v) {
  const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * std::numbers::pi * v;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

template <class T>
Pair pair_of(const Words& w, int64_t pair) {
  if constexpr (std::is_same_v<T, double>) {
    const auto upper = [&](size_t i) { return static_cast<double>((uint64_t{w[i + 1]} << 32 | w[i]) >> 11); };
    return box_muller((upper(0) + 1) * 0x1p-53, upper(2) * 0x1p-53);
  } else {
    const auto word = [&](int64_t i) { return static_cast<double>(w[static_cast<size_t>(i)]); };
    return box_muller((word(2 * pair) + 1) * 0x1p-32, word(2 * pair + 1) * 0x1p-32);
  }
}

template <class T>
T round_to(double value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return narrow(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
void rows_of_type(const KeyedNormal& p, int64_t row_begin, int64_t row_end) {
  constexpr int64_t kPairsPerBlock = std::is_same_v<T, double> ? 1 : 2;
  const int64_t begin = p.keyed.column_offset, end = begin + p.keyed.num_columns;
  for (int64_t row = row_begin; row < row_end; ++row) {
    T* y = static_cast<T*>(p.y) + row * p.keyed.num_columns;
    const auto key = static_cast<uint64_t>(p.keyed.key[row]);
    Words words{};
    for (int64_t pair = begin / 2; 2 * pair < end; ++pair) {
      if (pair == begin / 2 || pair % kPairsPerBlock == 0) {
        words = philox(p.keyed.seed, key, static_cast<uint32_t>(pair / kPairsPerBlock), Stream::normal);
      }
      const auto [even, odd] = pair_of<T>(words, pair % kPairsPerBlock);
      if (2 * pair >= begin) y[2 * pair - begin] = round_to<T>(even);
      if (2 * pair + 1 < end) y[2 * pair + 1 - begin] = round_to<T>(odd);
    }
  }
}

}  // namespace

void normal_rows(const KeyedNormal& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.element) {
    case Element::f32:
      return rows_of_type<float>(problem, row_begin, row_end);
    case Element::f64:
      return rows_of_type<double>(problem, row_begin, row_end);
    case Element::bf16:
      return rows_of_type<BFloat16>(problem, row_begin, row_end);
  }
}

}  // namespace pyg_dist
