#include <limits>
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/sum_edges.cuh"
#include "cuda/warp.cuh"
#include "formats/packed_rows.h"
#include "formats/philox.h"

namespace pyg_dist::gpu {
namespace {

// Whether a row is a row of x, perhaps times a number: it is packed as it is read.
PYG_DIST_DEVICE bool has_one_edge(const SpmmCsr& sums, int64_t row) {
  return sums.rowptr[row + 1] - sums.rowptr[row] == 1;
}

// The other rows are summed into scratch memory, unless there are as many edges as rows: messages of rows have one
// each.
template <class X, int kVec, int kCount>
struct SumsToQuantize : SumEdges<X, accumulator_t<X>, kVec, kCount, false> {
  using Base = SumEdges<X, accumulator_t<X>, kVec, kCount, false>;
  using typename Base::A;
  using Columns = LaneColumns<kVec, kCount>;
  static constexpr int kThreadsAtOnce = 512;  // with 64 registers, one spills

  PYG_DIST_DEVICE void add(int64_t row, int64_t begin, int64_t end, const Columns& columns,
                           A (&sum)[kCount][kVec]) const {
    if (!has_one_edge(this->p, row)) Base::add(row, begin, end, columns, sum);
  }
  PYG_DIST_DEVICE void finish(int64_t row, const Columns& columns, A (&sum)[kCount][kVec]) const {
    if (!has_one_edge(this->p, row)) Base::finish(row, columns, sum);
  }
};

struct AllFinite {
  static constexpr int kThreads = 32;
  using Shared = NoShared;

  int64_t* bad_row;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    if (thread_id() == 0) *bad_row = kAllFinite;
  }
};

constexpr uint32_t kNaN = 0x7fc0;  // as a bfloat16
constexpr float kInfinity = std::numeric_limits<float>::infinity();

PYG_DIST_DEVICE float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
PYG_DIST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Z, S and 65536 / S of a row: the steps of formats/packed_rows.h.
struct Parameters {
  float zero, scale, inverse;
  bool is_finite;

  // `bad` is NaN if the row has a value that is not finite, else zero.
  PYG_DIST_DEVICE Parameters(float low, float high, float bad, double levels) {
    constexpr float kTiny = 0x1p-100f;  // below it, 65536 / S would overflow
    zero = as_float((low < 0 ? bits_of(low) + 0xffffu : bits_of(low)) & 0xffff0000u);
    if (low < kTiny && low > -kTiny) zero = low < 0 ? -kTiny : 0.0f;
    const double range = static_cast<double>(high) - static_cast<double>(zero);
    scale = rounded_up(static_cast<float>(range * (1.0 / levels)));
    if (static_cast<double>(scale) * levels < range) scale = rounded_up(scale * 1.001f);
    if (scale < kTiny) scale = range > 0 ? kTiny : 0.0f;
    inverse = range > 0 ? 65536.0f / scale : 0.0f;
    // None of these is finite unless all that it is made of are.
    is_finite = bad + zero * 0.0f + (high - zero) * 0.0f + scale * static_cast<float>(levels) * 0.0f == 0.0f;
    // Nobody waits to hear of it, so the row must not pass for numbers: all that is unpacked is NaN.
    if (!is_finite) {
      zero = as_float(kNaN << 16);
      scale = inverse = 0.0f;
    }
  }

 private:
  static PYG_DIST_DEVICE float rounded_up(float value) { return as_float((bits_of(value) + 0xffffu) & 0xffff0000u); }
};

// What an edge's row is multiplied by.
template <class X>
PYG_DIST_DEVICE accumulator_t<X> factor_of(const SpmmCsr& p, int64_t e) {
  using A = accumulator_t<X>;
  const A factor = p.weight == nullptr ? A{1} : static_cast<const A*>(p.weight)[e];
  return p.col_scale == nullptr ? factor : factor * static_cast<const A*>(p.col_scale)[p.col[e]];
}

// Rows are functions of the column. One that memory has: of x, times a factor, or of the sums, where `sum` is not null.
template <class X>
struct StoredRow {
  using A = accumulator_t<X>;
  static constexpr int kAtOnce = 16;  // values that are on their way together

  const X* x;
  const A* sum;
  A factor, zero;

  // sums: null where the row is one of x.
  PYG_DIST_DEVICE StoredRow(const SpmmCsr& p, const A* sums, int64_t row) {
    const bool is_of_x = sums == nullptr;
    const int64_t e = p.rowptr[row];
    x = is_of_x ? static_cast<const X*>(p.x) + p.col[e] * p.x_stride : nullptr;
    sum = is_of_x ? nullptr : sums + row * p.num_features;
    factor = is_of_x ? factor_of<X>(p, e) : A{1};
    zero = is_of_x && (p.weight != nullptr || p.col_scale != nullptr) ? A{0} : -A{0};  // as sums begin; else -0 stays
    if constexpr (std::is_same_v<X, A>) x = is_of_x ? x : sum;
  }
  PYG_DIST_DEVICE float operator()(int64_t c) const {
    if constexpr (!std::is_same_v<X, A>) {
      if (sum != nullptr) return static_cast<float>(sum[c]);
    }
    return static_cast<float>(to_sum(x[c]) * factor + zero);
  }
  // Columns c to c + 3, whose address is aligned to them, or to 16 bytes.
  PYG_DIST_DEVICE void four(int64_t c, float (&values)[4]) const {
    A row[4];
    if constexpr (std::is_same_v<X, A>) {
      load_values<X, 4>(x + c, row);
    } else if (sum == nullptr) {
      load_values<X, 4>(x + c, row);
    } else {
      load_values<A, 4>(sum + c, row);
    }
    PYG_DIST_UNROLL
    for (int w = 0; w < 4; ++w) values[w] = static_cast<float>(row[w] * factor + zero);
  }
};

// One that is summed anew for each value: where there are as many edges as rows, and yet not one each.
template <class X>
struct SummedRow {
  using A = accumulator_t<X>;
  static constexpr int kAtOnce = 1;  // 16 such loops were three quarters of the kernel's instructions

  const SpmmCsr& p;
  int64_t row;

  PYG_DIST_DEVICE float operator()(int64_t c) const {
    A total = 0;
    PYG_DIST_UNROLL_BY(1)
    for (int64_t e = p.rowptr[row]; e < p.rowptr[row + 1]; ++e) {
      total += to_sum(static_cast<const X*>(p.x)[p.col[e] * p.x_stride + c]) * factor_of<X>(p, e);
    }
    return static_cast<float>(total);
  }
};

// Of a row of kHeld > 0, a lane holds the columns of kHeld counters of random words, 16 each, as four vectors of four;
// so a warp has several rows, each of which is read once. kHeld = 0: a warp for each row, which it reads twice, the
// second time from near by.
template <class X, int kBits, int kHeld>
struct PackRows {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<X>;

  QuantizeCsr p;
  const A*
      sums;  // [num_rows, num_features]: those of more or fewer edges than one; null: they are summed as they are read
  int64_t row_bytes;
  int log_lanes;  // of a row

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t row = (block_id() * kThreads + thread_id()) >> log_lanes;
    if constexpr (kHeld == 0) {
      if (row < p.sums.num_rows) pack(row);
    } else {
      const bool is_there = row < p.sums.num_rows, is_of_x = is_there && has_one_edge(p.sums, row);
      const bool is_stored = is_of_x || (is_there && sums != nullptr);
      const auto x = StoredRow<X>(p.sums, is_of_x ? nullptr : sums, is_stored ? row : 0);
      quantize_held(row, x, is_stored);
      for (int first = 0; first < kWarp; first += 1 << log_lanes) {
        const int is_left = shuffle(kAllLanes, is_there && !is_stored ? 1 : 0, first);
        if (is_left != 0) pack(shuffle(kAllLanes, row, first));
      }
    }
  }

 private:
  PYG_DIST_DEVICE void pack(int64_t row) const {
    const bool is_of_x = has_one_edge(p.sums, row);
    if (kHeld == 0 && (is_of_x || sums != nullptr)) {
      pack(row, StoredRow<X>(p.sums, is_of_x ? nullptr : sums, row));
    } else {
      pack(row, SummedRow<X>{p.sums, row});
    }
  }

  // The columns of vector `part` of a counter: four, from which their bytes follow; the end of the row if it has none.
  struct HeldColumns {
    int64_t column;
    int block, byte;
  };
  PYG_DIST_DEVICE HeldColumns held_columns(int64_t counter, int part) const {
    constexpr int kInByte = 8 / kBits, kCounters = kQuarter / 4;
    const int block = static_cast<int>(counter / kCounters), first = static_cast<int>(counter % kCounters) * 4;
    const int n = static_cast<int>(p.sums.num_features), rest = n - block * static_cast<int>(kBlock);
    const int num_bytes = (rest < kBlock ? rest : static_cast<int>(kBlock)) * kBits / 8;
    const int byte = 16 * (part / kInByte) + first;
    const bool has = rest > 0 && byte < num_bytes;
    return {has ? block * kBlock + byte + part % kInByte * num_bytes : n, block, byte};
  }

  PYG_DIST_DEVICE void quantize_held(int64_t row, const StoredRow<X>& x, bool writes) const {
    constexpr uint32_t kLevels = (1u << kBits) - 1;
    constexpr int kInByte = 8 / kBits, kGroups = kBits / 2;
    const int lanes = 1 << log_lanes, lane = lane_id() & (lanes - 1);
    const int64_t n = p.sums.num_features;
    float values[kHeld][4][4], low = kInfinity, high = -kInfinity, bad = 0.0f;
    PYG_DIST_UNROLL
    for (int u = 0; u < kHeld; ++u) {
      PYG_DIST_UNROLL
      for (int part = 0; part < 4; ++part) {
        const int64_t column = held_columns(lane + u * lanes, part).column;
        if (!writes || column >= n) continue;
        x.four(column, values[u][part]);
        PYG_DIST_UNROLL
        for (int w = 0; w < 4; ++w) {
          const float value = values[u][part][w];
          low = value < low ? value : low;
          high = value > high ? value : high;
          bad += value * 0.0f;
        }
      }
    }
    low = join_lanes(low, log_lanes, kAllLanes, [](float a, float b) { return a < b ? a : b; });
    high = join_lanes(high, log_lanes, kAllLanes, [](float a, float b) { return a > b ? a : b; });
    const Parameters parameters(low, high, sum_lanes(bad, log_lanes, kAllLanes), kLevels);
    if (!writes) return;
    uint8_t* const packed = p.packed + row * row_bytes;
    if (lane == 0) {
      put_word(packed, bits_of(parameters.zero) >> 16 | (bits_of(parameters.scale) & 0xffff0000u));
      if (!parameters.is_finite) note(row);
    }
    PYG_DIST_UNROLL
    for (int u = 0; u < kHeld; ++u) {
      const int counter = lane + u * lanes;
      const Words words = words_of(row, static_cast<uint32_t>(counter));
      PYG_DIST_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        const HeldColumns columns = held_columns(counter, group * kInByte);
        if (columns.column >= n) continue;
        uint32_t made = 0;
        PYG_DIST_UNROLL
        for (int w = 0; w < 4; ++w) {
          PYG_DIST_UNROLL
          for (int k = 0; k < kInByte; ++k) {
            const uint32_t random = p.key == nullptr ? 32768u : two_bytes(words.word[w], group + k * kGroups);
            made |= level_of(values[u][group * kInByte + k][w], parameters, random) << (8 * w + k * kBits);
          }
        }
        put_word(packed + kParameterBytes + columns.block * (kBlock * kBits / 8) + columns.byte, made);
      }
    }
  }

  PYG_DIST_DEVICE Words words_of(int64_t row, uint32_t counter) const {
    if (p.key == nullptr) return {};
    return philox<Philox::kRoundingRounds>(p.seed, static_cast<uint64_t>(p.key[row]), counter,
                                           pyg_dist::Stream::rounding);
  }

  static PYG_DIST_DEVICE uint32_t level_of(float value, const Parameters& parameters, uint32_t random) {
    constexpr uint32_t kLevels = (1u << kBits) - 1;
    const float above = value - parameters.zero;
    const float steps = parameters.is_finite ? above * parameters.inverse : 0.0f;
    const uint32_t q = (static_cast<uint32_t>(static_cast<int32_t>(steps)) + random) >> 16;
    return q < kLevels ? q : kLevels;
  }

  template <class Row>
  PYG_DIST_DEVICE void pack(int64_t row, const Row& x) const {
    uint8_t* const packed = p.packed + row * row_bytes;
    if constexpr (kBits == 16) {
      round_row(row, x, packed);
    } else {
      quantize_row(row, x, packed);
    }
  }

  PYG_DIST_DEVICE void note(int64_t row) const {
    atomic_min(reinterpret_cast<uint64_t*>(p.bad_row), static_cast<uint64_t>(row));  // kAllFinite is the largest
  }

  template <class Row>
  PYG_DIST_DEVICE void round_row(int64_t row, const Row& x, uint8_t* packed) const {
    constexpr uint32_t kRoundsToInfinity = 0x7f7f8000;  // from this magnitude on, or NaN
    bool is_bad = false;
    PYG_DIST_UNROLL_BY(Row::kAtOnce < 4 ? 1 : 4)
    for (int64_t c = lane_id(); c < p.sums.num_features; c += kWarp) {
      const float value = x(c);
      const bool is_infinite = (bits_of(value) & 0x7fffffffu) >= kRoundsToInfinity;
      is_bad |= is_infinite;
      put(packed + 2 * c, is_infinite ? static_cast<uint16_t>(kNaN) : narrow<BFloat16>(value).bits);
    }
    if (ballot(kAllLanes, is_bad) != 0 && lane_id() == 0) note(row);
  }

  template <class Row>
  PYG_DIST_DEVICE void quantize_row(int64_t row, const Row& x, uint8_t* packed) const {
    constexpr uint32_t kLevels = (1u << kBits) - 1;
    const int64_t n = p.sums.num_features;
    float low = x(0), high = low, bad = 0.0f;
    PYG_DIST_UNROLL_BY(Row::kAtOnce < 4 ? 1 : 4)
    for (int64_t c = lane_id(); c < n; c += kWarp) {
      const float value = x(c);
      low = value < low ? value : low;
      high = value > high ? value : high;
      bad += value * 0.0f;
    }
    low = join_lanes(low, 5, kAllLanes, [](float a, float b) { return a < b ? a : b; });
    high = join_lanes(high, 5, kAllLanes, [](float a, float b) { return a > b ? a : b; });
    const Parameters parameters(low, high, sum_lanes(bad, 5, kAllLanes), kLevels);
    if (lane_id() == 0) {
      put(packed, static_cast<uint16_t>(bits_of(parameters.zero) >> 16));
      put(packed + 2, static_cast<uint16_t>(bits_of(parameters.scale) >> 16));
      if (!parameters.is_finite) note(row);
    }
    // A lane takes what four words of a counter are for: the bytes i of a block with i mod 16 div 4 = counter mod 4.
    constexpr int64_t kCounters = kQuarter / 4;  // of a block
    for (int64_t counter = lane_id(); counter * 16 < (n + kBlock - 1) / kBlock * kBlock; counter += kWarp) {
      const int64_t block = counter / kCounters, first = counter % kCounters * 4;
      quantize_bytes(row, x, block * kBlock, first, static_cast<uint32_t>(counter), parameters,
                     packed + kParameterBytes + block * (kBlock * kBits / 8));
    }
  }

  // Some bytes of the block of columns that begins with `low`.
  template <class Row>
  PYG_DIST_DEVICE void quantize_bytes(int64_t row, const Row& x, int64_t low, int64_t first, uint32_t counter,
                                      const Parameters& parameters, uint8_t* bytes) const {
    constexpr int kGroups = kBits / 2, kInByte = 8 / kBits;
    const int64_t rest = p.sums.num_features - low, n = rest < kBlock ? rest : kBlock, num_bytes = (n * kBits + 7) / 8;
    const Words words = words_of(row, counter);
    PYG_DIST_UNROLL_BY(Row::kAtOnce)
    for (int group = 0; group < kGroups; ++group) {
      PYG_DIST_UNROLL
      for (int w = 0; w < 4; ++w) {
        const int64_t byte = 16 * group + first + w;
        if (byte >= num_bytes) continue;
        uint32_t made = 0;
        PYG_DIST_UNROLL_BY(Row::kAtOnce)
        for (int k = 0; k < kInByte; ++k) {
          const int64_t column = byte + k * num_bytes;
          if (column >= n) continue;
          const uint32_t random = p.key == nullptr ? 32768u : two_bytes(words.word[w], group + k * kGroups);
          made |= level_of(x(low + column), parameters, random) << (k * kBits);
        }
        bytes[byte] = static_cast<uint8_t>(made);
      }
    }
  }

  // Bytes 3 - k and 2 - k of a word, modulo four.
  static PYG_DIST_DEVICE uint32_t two_bytes(uint32_t word, int k) {
    return k == 3 ? ((word << 8) | (word >> 24)) & 0xffffu : (word >> (16 - 8 * k)) & 0xffffu;
  }

  static PYG_DIST_DEVICE void put(uint8_t* to, uint16_t value) {
    to[0] = static_cast<uint8_t>(value);
    to[1] = static_cast<uint8_t>(value >> 8);
  }
  static PYG_DIST_DEVICE void put_word(uint8_t* to, uint32_t value) {
    store<1>(reinterpret_cast<uint32_t*>(to), Pack<uint32_t, 1>{{value}});
  }
};

}  // namespace

void quantize_csr(const QuantizeCsr& problem, const Queue& queue) {
  launch(AllFinite{problem.bad_row}, 1, queue.stream);
  const SpmmCsr& sums = problem.sums;
  const int64_t num_rows = sums.num_rows, n = sums.num_features;
  if (num_rows == 0 || n == 0) return;
  for_element(sums.x_element, [&]<class X>() {
    using A = accumulator_t<X>;
    A* summed = nullptr;
    if (sums.num_edges != num_rows) {
      summed = scratch<A>(queue, num_rows * n);
      SpmmCsr product = sums;
      product.out = summed;
      product.out_stride = n;
      Alignment<X> alignment(n);
      alignment.template rows<X>(sums.x, sums.x_stride).template rows<A>(summed, n);
      with_vectors<X>(alignment, [&]<int kVec, int kCount>() {
        reduce_rows(SumsToQuantize<X, kVec, kCount>{{product}}, n, queue);
      });
    }
    Alignment<X> alignment(n);
    alignment.template rows<X>(sums.x, sums.x_stride);
    const int64_t row_bytes = packed_row_bytes(n, problem.bits), counters = (n + kBlock - 1) / kBlock * 4;
    const bool has_words = n * problem.bits % 32 == 0 && reinterpret_cast<uintptr_t>(problem.packed) % 4 == 0;
    const bool is_held = has_words && alignment.allows(sizeof(X) > 4 ? 16 : 4 * sizeof(X)) && counters <= 2 * kWarp;
    const auto launch_rows = [&]<int kBits, int kHeld>() {
      using Kernel = PackRows<X, kBits, kHeld>;
      const int log_lanes = kHeld == 0 ? 5 : log_lanes_for(counters, 1);
      launch(Kernel{problem, summed, row_bytes, log_lanes}, blocks_for(num_rows << log_lanes, Kernel::kThreads),
             queue.stream);
    };
    const auto pack = [&]<int kBits>() {
      if constexpr (kBits < 16) {
        if (is_held && counters <= kWarp) return launch_rows.template operator()<kBits, 1>();
        if (is_held) return launch_rows.template operator()<kBits, 2>();
      }
      launch_rows.template operator()<kBits, 0>();
    };
    switch (problem.bits) {
      case 2:
        return pack.template operator()<2>();
      case 4:
        return pack.template operator()<4>();
      case 8:
        return pack.template operator()<8>();
      default:
        return pack.template operator()<16>();
    }
  });
}

}  // namespace pyg_dist::gpu
