#include "cpu/keyed_words.h"
#include "cpu/table.h"
#include "formats/packed_rows.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int L = kLanes<float>;

// Rows of x whose numbers are made together: from the second-level cache, where they have been asked for, they come
// into the first one, and stay there until their range is known. Their parameters do not wait for each other.
constexpr int64_t kBytesAtOnce = 1 << 13;
constexpr int64_t kRowsAtOnce = 32;

constexpr float kTiny = 0x1p-100f;  // below it, 65536 / S would overflow

template <int M, class T>
PYG_DIST_INLINE Vec<float, M> load_float(const T* p) {
  if constexpr (sizeof(T) == 8) {
    // Lane by lane: a vector of M doubles is wider than the registers.
    float lanes[M];
    for (int lane = 0; lane < M; ++lane) lanes[lane] = static_cast<float>(p[lane]);
    Vec<float, M> row;
    __builtin_memcpy(&row, lanes, sizeof(row));
    return row;
  } else {
    return load<M>(p);
  }
}

template <class T>
PYG_DIST_INLINE Vec<float, L> load_float_first(const T* p, int64_t count) {
  if constexpr (sizeof(T) == 8) {
    float lanes[L] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = static_cast<float>(p[lane]);
    return load<L>(lanes);
  } else {
    return load_first<L>(p, count);
  }
}

// Of the rows that are made together.
struct Ranges {
  float low[kRowsAtOnce], high[kRowsAtOnce];  // NaN counts for neither
  float bad[kRowsAtOnce];                     // NaN if the row has a value that is not finite, else zero
};
struct Parameters {
  float zero[kRowsAtOnce], scale[kRowsAtOnce], inverse[kRowsAtOnce];  // Z, S, 65536 / S
  int32_t is_finite[kRowsAtOnce];
};

template <class T>
PYG_DIST_INLINE void range_of_row(const T* x, int64_t n, Ranges& ranges, int64_t r) {
  float low = load_float<1>(x), high = low, bad = 0;
  int64_t c = 0;
  if (n >= L) {
    const Vec<float, L> first = load_float<L>(x);
    Vec<float, L> lows[2] = {first, first}, highs[2] = {first, first}, bads[2] = {};
    const auto widen_range = [&](int k, int64_t column) {
      const Vec<float, L> v = load_float<L>(x + column);
      lows[k] = lesser<L, float>(v, lows[k]);
      highs[k] = greater<L, float>(v, highs[k]);
      bads[k] += v * 0.0f;
    };
    for (; c + 2 * L <= n; c += 2 * L) {
      widen_range(0, c);
      widen_range(1, c + L);
    }
    if (c + L <= n) widen_range(0, c), c += L;
    low = reduce<L, float>(lesser<L, float>(lows[1], lows[0]), [](auto a, auto b) { return a < b ? a : b; });
    high = reduce<L, float>(greater<L, float>(highs[1], highs[0]), [](auto a, auto b) { return a > b ? a : b; });
    bad = reduce<L, float>(bads[0] + bads[1], [](auto a, auto b) { return a + b; });
  }
  for (; c < n; ++c) {
    const float v = load_float<1>(x + c);
    low = v < low ? v : low;
    high = v > high ? v : high;
    bad += v * 0.0f;
  }
  ranges.low[r] = low;
  ranges.high[r] = high;
  ranges.bad[r] = bad;
}

constexpr int D = kLanes<double>;

PYG_DIST_INLINE Vec<float, D> round_down(Vec<float, D> value) {
  const auto bits = bit_cast<Vec<uint32_t, D>>(value);
  const Vec<float, D> zeros = {}, down = bit_cast<Vec<float, D>>((value < 0 ? bits + 0xffffu : bits) & 0xffff0000u);
  return ((value < kTiny) & (value > -kTiny)) ? (value < 0 ? zeros - kTiny : zeros) : down;
}

PYG_DIST_INLINE Vec<float, D> round_up(Vec<float, D> value) {
  return bit_cast<Vec<float, D>>((bit_cast<Vec<uint32_t, D>>(value) + 0xffffu) & 0xffff0000u);
}

PYG_DIST_INLINE void parameters_of(const Ranges& ranges, int64_t num_rows, double levels, Parameters& p) {
  using Lanes = Vec<float, D>;
  const Lanes zeros = {};
  for (int64_t r = 0; r < num_rows; r += D) {
    const Lanes high = load<D>(ranges.high + r), zero = round_down(load<D>(ranges.low + r));
    const Vec<double, D> range = convert<double, D, float>(high) - convert<double, D, float>(zero);
    Lanes scale = round_up(convert<float, D, double>(range * (1.0 / levels)));
    const auto is_short = convert<int32_t, D, int64_t>(convert<double, D, float>(scale) * levels < range);
    scale = is_short ? round_up(scale * 1.001f) : scale;
    const auto is_wide = convert<int32_t, D, int64_t>(range > 0);
    scale = scale < kTiny ? (is_wide ? zeros + kTiny : zeros) : scale;
    store<D>(p.zero + r, zero);
    store<D>(p.scale + r, scale);
    store<D>(p.inverse + r, is_wide ? 65536.0f / scale : zeros);
    // None of these is finite unless all that it is made of are.
    const Lanes all =
        load<D>(ranges.bad + r) + zero * 0.0f + (high - zero) * 0.0f + scale * static_cast<float>(levels) * 0.0f;
    store<D>(p.is_finite + r, all == 0.0f);
  }
}

// The two of a word's bytes that quarter k of a block takes.
template <int k>
PYG_DIST_INLINE Vec<uint32_t, L> random_bits(Vec<uint32_t, L> words) {
  if constexpr (k == 0) return words >> 16;
  if constexpr (k == 1) return (words >> 8) & 0xffffu;
  if constexpr (k == 2) return words & 0xffffu;
  if constexpr (k == 3) return ((words << 8) | (words >> 24)) & 0xffffu;
}

struct Steps {
  float zero, inverse;
  uint32_t levels;
};

// q of L columns of quarter k; words: those of their lanes, or null: nearest.
template <int k>
PYG_DIST_INLINE Vec<uint32_t, L> numbers(Vec<float, L> x, const Steps& s, const uint32_t* words) {
  const Vec<float, L> steps = (x - s.zero) * s.inverse;
  const auto t = bit_cast<Vec<uint32_t, L>>(convert<int32_t, L, float>(steps));
  const Vec<uint32_t, L> random = words == nullptr ? Vec<uint32_t, L>{} + 32768u : random_bits<k>(load<L>(words));
  return lesser<L, uint32_t>((t + random) >> 16, Vec<uint32_t, L>{} + s.levels);
}

// A block, whose bytes have room for a whole one. columns(k, lane): those of quarter k from `lane` on, L of them;
// kept(k, lane, q): their numbers, zero where there is no column.
template <int kBits, class Columns, class Kept>
PYG_DIST_INLINE void quantize_quarters(const Steps& s, const uint32_t* words, uint8_t* bytes, const Columns& columns,
                                       const Kept& kept) {
#pragma GCC unroll 4
  for (int lane = 0; lane < kQuarter; lane += L) {
    const uint32_t* lane_words = words == nullptr ? nullptr : words + lane;
    const auto q0 = kept(0, lane, numbers<0>(columns(0, lane), s, lane_words));
    const auto q1 = kept(1, lane, numbers<1>(columns(1, lane), s, lane_words));
    const auto q2 = kept(2, lane, numbers<2>(columns(2, lane), s, lane_words));
    const auto q3 = kept(3, lane, numbers<3>(columns(3, lane), s, lane_words));
    if constexpr (kBits == 2) {
      store_bytes<L>(bytes + lane, (q0 | q1 << 2) | (q2 << 4 | q3 << 6));
    } else if constexpr (kBits == 4) {
      store_bytes<L>(bytes + lane, q0 | q2 << 4);
      store_bytes<L>(bytes + lane + kQuarter, q1 | q3 << 4);
    } else {
      store_bytes<L>(bytes + lane, q0);
      store_bytes<L>(bytes + lane + kQuarter, q1);
      store_bytes<L>(bytes + lane + 2 * kQuarter, q2);
      store_bytes<L>(bytes + lane + 3 * kQuarter, q3);
    }
  }
}

template <int kBits, class T>
PYG_DIST_INLINE void quantize_block(const T* x, const Steps& s, const uint32_t* words, uint8_t* packed) {
  quantize_quarters<kBits>(
      s, words, packed, [x](int k, int lane) { return load_float<L>(x + k * kQuarter + lane); },
      [](int, int, Vec<uint32_t, L> q) { return q; });
}

// The last n < 64 columns of a row, stretch by stretch as they lie in the bytes.
template <int kBits, class T>
PYG_DIST_INLINE void quantize_tail(const T* x, int64_t n, const Steps& s, const uint32_t* words, uint8_t* packed) {
  constexpr int kInStretch = kBits / 2;  // quarters
  const int64_t num_bytes = (n * kBits + 7) / 8;
  const auto begin = [&](int k, int lane) { return k / kInStretch * num_bytes + k % kInStretch * kQuarter + lane; };
  const auto count = [&](int k, int lane) {
    const int64_t end = (k / kInStretch + 1) * num_bytes, rest = (end < n ? end : n) - begin(k, lane);
    return rest < 0 ? 0 : rest < L ? rest : L;
  };
  uint8_t bytes[kBlock];
  quantize_quarters<kBits>(
      s, words, bytes, [&](int k, int lane) { return load_float_first(x + begin(k, lane), count(k, lane)); },
      [&](int k, int lane, Vec<uint32_t, L> q) {
        return q & bit_cast<Vec<uint32_t, L>>(first_lanes<L>(count(k, lane)));
      });
  __builtin_memcpy(packed, bytes, static_cast<std::size_t>(num_bytes));
}

template <class T>
PYG_DIST_INLINE const T* row_of(const QuantizeRows& p, int64_t row) {
  return static_cast<const T*>(p.x) + (p.index == nullptr ? row : p.index[row]) * p.x_stride;
}

template <class T>
PYG_DIST_INLINE void ask_for_row(const QuantizeRows& p, int64_t row) {
  prefetch(row_of<T>(p, row), p.num_columns * static_cast<int64_t>(sizeof(T)));
}

template <int kBits, class T>
int64_t quantize_of(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  constexpr uint32_t kLevels = (1u << kBits) - 1;
  constexpr int64_t kBlocksAtOnce = kBatch / 4;  // a block takes the words of four counters
  const int64_t n = p.num_columns, row_bytes = packed_row_bytes(n, kBits), num_blocks = (n + kBlock - 1) / kBlock;
  const int64_t fitting = kBytesAtOnce / (n * static_cast<int64_t>(sizeof(T))), drawn = kBlocksAtOnce / num_blocks;
  const int64_t most = fitting < drawn ? fitting : drawn;
  const int64_t rows_at_once = most < 1 ? 1 : most < kRowsAtOnce ? most : kRowsAtOnce;
  int64_t first_bad = kAllFinite;
  Ranges ranges = {};
  Parameters parameters;
  Batch batch;
  for (int64_t row = row_begin; row < row_end && row < row_begin + rows_at_once; ++row) ask_for_row<T>(p, row);
  for (int64_t begin = row_begin; begin < row_end; begin += rows_at_once) {
    const int64_t rows = row_end - begin < rows_at_once ? row_end - begin : rows_at_once;
    for (int64_t r = 0; r < rows; ++r) {
      range_of_row(row_of<T>(p, begin + r), n, ranges, r);
    }
    parameters_of(ranges, rows, kLevels, parameters);
    for (int64_t first = 0; first < num_blocks; first += kBlocksAtOnce) {
      const int64_t blocks = num_blocks - first < kBlocksAtOnce ? num_blocks - first : kBlocksAtOnce;
      if (p.key != nullptr) {
        for (int64_t r = 0; r < rows; ++r) batch.set(4 * r * blocks, 4 * blocks, p.key[begin + r], 4 * first);
        batch.draw<Philox::kRoundingRounds>(4 * rows * blocks, p.seed, Stream::rounding);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const T* x = row_of<T>(p, begin + r) + first * kBlock;
        uint8_t* packed = p.packed + (begin + r) * row_bytes;
        if (first == 0) {
          if (begin + r + rows_at_once < row_end) ask_for_row<T>(p, begin + r + rows_at_once);
          const auto zero = static_cast<uint16_t>(bit_cast<uint32_t>(parameters.zero[r]) >> 16);
          const auto scale = static_cast<uint16_t>(bit_cast<uint32_t>(parameters.scale[r]) >> 16);
          __builtin_memcpy(packed, &zero, 2);
          __builtin_memcpy(packed + 2, &scale, 2);
          if (!parameters.is_finite[r] && first_bad == kAllFinite) first_bad = begin + r;
        }
        packed += kParameterBytes + first * kBlock * kBits / 8;
        const Steps steps{parameters.zero[r], parameters.inverse[r], kLevels};
        const uint32_t* words = p.key != nullptr ? batch.words + kQuarter * r * blocks : nullptr;
        int64_t rest = n - first * kBlock;
        for (int64_t b = 0; b < blocks; ++b, rest -= kBlock) {
          if (rest >= kBlock) {
            quantize_block<kBits>(x, steps, words, packed);
          } else {
            quantize_tail<kBits>(x, rest, steps, words, packed);
          }
          x += kBlock;
          packed += kBlock * kBits / 8;
          if (words != nullptr) words += kQuarter;
        }
      }
    }
  }
  return first_bad;
}

constexpr int32_t kRoundsToInfinity =
    0x7f7f8000;  // from this magnitude on, or NaN: half a step over the largest bfloat16

template <class T>
int64_t round_to_bfloat16(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  const int64_t n = p.num_columns, ahead = 8;
  int64_t first_bad = kAllFinite;
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (row + ahead < row_end) ask_for_row<T>(p, row + ahead);
    const T* x = row_of<T>(p, row);
    auto* packed = reinterpret_cast<BFloat16*>(p.packed + row * packed_row_bytes(n, 16));
    int64_t c = 0;
    Vec<int32_t, L> largest = {};
    for (; c + L <= n; c += L) {
      const Vec<float, L> v = load_float<L>(x + c);
      store<L>(packed + c, v);
      const auto magnitude = bit_cast<Vec<int32_t, L>>(v) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    int32_t bad = reduce<L, int32_t>(largest, [](auto a, auto b) { return a > b ? a : b; });
    for (; c < n; ++c) {
      const float v = load_float<1>(x + c);
      store<1>(packed + c, v);
      const int32_t magnitude = bit_cast<int32_t>(v) & 0x7fffffff;
      bad = magnitude > bad ? magnitude : bad;
    }
    if (bad >= kRoundsToInfinity && first_bad == kAllFinite) first_bad = row;
  }
  return first_bad;
}

template <class T>
int64_t quantize_of_type(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  switch (p.bits) {
    case 2:
      return quantize_of<2, T>(p, row_begin, row_end);
    case 4:
      return quantize_of<4, T>(p, row_begin, row_end);
    case 8:
      return quantize_of<8, T>(p, row_begin, row_end);
    default:
      return round_to_bfloat16<T>(p, row_begin, row_end);
  }
}

}  // namespace

int64_t quantize_rows(const QuantizeRows& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return quantize_of_type<T>(problem, row_begin, row_end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
