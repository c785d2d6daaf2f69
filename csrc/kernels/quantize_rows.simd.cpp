#include "kernels/quantize_rows.h"

#include "kernels/keyed_words.h"
#include "kernels/packed_rows.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int L = kLanes<float>;

// Rows that are asked for while the random words of the rows before them are drawn: what one batch of words serves.
constexpr int64_t kBytesAhead = 1 << 15;

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

struct Parameters {
  float zero, scale, inverse;  // Z, S, 65536 / S
  bool finite;
};

PYG_DIST_INLINE bool is_finite(float value) { return value * 0.0f == 0.0f; }

PYG_DIST_INLINE float round_down(float value) {
  if (value < kTiny && value > -kTiny) return value < 0 ? -kTiny : 0.0f;
  auto bits = bit_cast<uint32_t>(value);
  if (value < 0) bits += 0xffffu;
  return bit_cast<float>(bits & 0xffff0000u);
}

PYG_DIST_INLINE float round_up(float value) {
  return bit_cast<float>((bit_cast<uint32_t>(value) + 0xffffu) & 0xffff0000u);
}

PYG_DIST_INLINE Parameters parameters_of(float low, float high, bool finite, int levels) {
  Parameters p;
  p.zero = round_down(low);
  const double range = static_cast<double>(high) - static_cast<double>(p.zero);
  p.scale = round_up(static_cast<float>(range * (1.0 / levels)));
  if (p.scale * static_cast<double>(levels) < range) p.scale = round_up(p.scale * 1.001f);
  if (p.scale < kTiny) p.scale = range > 0 ? kTiny : 0.0f;
  p.inverse = range > 0 ? 65536.0f / p.scale : 0.0f;
  p.finite = finite && is_finite(p.zero) && is_finite(high - p.zero) && is_finite(p.scale * static_cast<float>(levels));
  return p;
}

template <class T>
PYG_DIST_INLINE Parameters parameters_of_row(const T* x, int64_t n, int levels) {
  float low = load_float<1>(x), high = low, bad = 0;
  int64_t c = 0;
  const auto scalar = [&] {
    const float v = load_float<1>(x + c++);
    low = v < low ? v : low;
    high = v > high ? v : high;
    bad += v * 0.0f;  // NaN if v is not finite; comparisons pass over NaN
  };
  if (n >= L) {
    const Vec<float, L> first = load_float<L>(x);
    Vec<float, L> lows[2] = {first, first}, highs[2] = {first, first}, bads[2] = {};
    const auto widen_range = [&](int k, int64_t column) {
      const Vec<float, L> v = load_float<L>(x + column);
      lows[k] = v < lows[k] ? v : lows[k];
      highs[k] = v > highs[k] ? v : highs[k];
      bads[k] += v * 0.0f;
    };
    for (; c + 2 * L <= n; c += 2 * L) {
      widen_range(0, c);
      widen_range(1, c + L);
    }
    if (c + L <= n) widen_range(0, c), c += L;
    lows[0] = lows[1] < lows[0] ? lows[1] : lows[0];
    highs[0] = highs[1] > highs[0] ? highs[1] : highs[0];
    for (int lane = 0; lane < L; ++lane) {
      low = lows[0][lane] < low ? lows[0][lane] : low;
      high = lows[0][lane] > high ? lows[0][lane] : high;
      high = highs[0][lane] > high ? highs[0][lane] : high;
    }
    bad = horizontal_sum<L, float>(bads[0] + bads[1]);
  }
  while (c < n) scalar();
  return parameters_of(low, high, bad == 0.0f, levels);
}

// The random bits of a row.
struct Bits {
  const uint8_t* upper;  // of the first column at hand, or null: nearest
  uint32_t lower;

  PYG_DIST_INLINE Bits from(int64_t column) const { return {upper == nullptr ? nullptr : upper + column, lower}; }
};

constexpr int64_t kBytesBefore = 4;  // the columns', that is

// q of M columns as bytes.
template <int M, class T>
PYG_DIST_INLINE Vec<uint8_t, M> numbers(const T* x, const Parameters& p, Bits random, uint32_t levels) {
  const Vec<float, M> steps = (load_float<M>(x) - p.zero) * p.inverse;
  auto q = bit_cast<Vec<uint32_t, M>>(convert<int32_t, M, float>(steps)) + random.lower;
  if (random.upper != nullptr) {
    Vec<uint8_t, M> upper;
    __builtin_memcpy(&upper, random.upper, sizeof(upper));
    q += convert<uint32_t, M, uint8_t>(upper) << 8;
  }
  q >>= 16;
  const Vec<uint32_t, M> most = Vec<uint32_t, M>{} + levels;
  return convert<uint8_t, M, uint32_t>(q < most ? q : most);
}

// 8 / kBits bytes each holding a number, joined to one.
template <int kBits, int M>
PYG_DIST_INLINE void pack(const uint8_t* numbers, uint8_t* packed) {
  if constexpr (kBits == 2) {
    Vec<uint32_t, M> w;
    __builtin_memcpy(&w, numbers, sizeof(w));
    const Vec<uint8_t, M> bytes = convert<uint8_t, M, uint32_t>((w | w >> 6 | w >> 12 | w >> 18) & 0xffu);
    __builtin_memcpy(packed, &bytes, sizeof(bytes));
  } else {
    Vec<uint16_t, M> w;
    __builtin_memcpy(&w, numbers, sizeof(w));
    const auto joined = static_cast<Vec<uint16_t, M>>((w | w >> 4) & static_cast<uint16_t>(0xff));
    const Vec<uint8_t, M> bytes = convert<uint8_t, M, uint16_t>(joined);
    __builtin_memcpy(packed, &bytes, sizeof(bytes));
  }
}

// `count` columns of a row; `packed` is where the first of them lies, at the start of a byte.
template <int kBits, class T>
PYG_DIST_INLINE void quantize_run(const T* x, int64_t count, const Parameters& p, Bits random, uint8_t* packed) {
  constexpr uint32_t kLevels = (1u << kBits) - 1;
  constexpr int64_t kPerByte = 8 / kBits;
  constexpr int64_t kBlock = 256;  // columns; their numbers stay in the first-level cache
  alignas(64) uint8_t own[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = count - begin < kBlock ? count - begin : kBlock;
    uint8_t* bytes = kBits == 8 ? packed + begin : own;
    const auto quantize = [&]<int M>(int64_t c) {
      const auto q = numbers<M>(x + begin + c, p, random.from(begin + c), kLevels);
      __builtin_memcpy(bytes + c, &q, sizeof(q));
    };
    int64_t c = 0;
    for (; c + L <= n; c += L) quantize.template operator()<L>(c);
    for (; c < n; ++c) quantize.template operator()<1>(c);
    if constexpr (kBits < 8) {
      for (; c % kPerByte != 0; ++c) own[c] = 0;
      uint8_t* to = packed + begin / kPerByte;
      int64_t byte = 0;
      for (; (byte + L) * kPerByte <= c; byte += L) pack<kBits, L>(own + byte * kPerByte, to + byte);
      for (; byte * kPerByte < c; ++byte) pack<kBits, 1>(own + byte * kPerByte, to + byte);
    }
  }
}

template <class T>
PYG_DIST_INLINE const T* row_of(const QuantizeRows& p, int64_t row) {
  return static_cast<const T*>(p.x) + (p.index == nullptr ? row : p.index[row]) * p.x_stride;
}

template <class T>
PYG_DIST_INLINE void ask_for_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    prefetch(row_of<T>(p, row), p.num_columns * static_cast<int64_t>(sizeof(T)));
  }
}

template <int kBits, class T>
int64_t quantize_of(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  const int64_t n = p.num_columns, row_bytes = packed_row_bytes(n, kBits);
  int64_t first_bad = kAllFinite;
  Parameters parameters;
  const auto use = [&](int64_t row, int64_t column, int64_t count, Bits random) {
    const T* x = row_of<T>(p, row);
    uint8_t* packed = p.packed + row * row_bytes;
    if (column == 0) {
      parameters = parameters_of_row(x, n, (1 << kBits) - 1);
      const auto zero = static_cast<uint16_t>(bit_cast<uint32_t>(parameters.zero) >> 16);
      const auto scale = static_cast<uint16_t>(bit_cast<uint32_t>(parameters.scale) >> 16);
      __builtin_memcpy(packed, &zero, 2);
      __builtin_memcpy(packed + 2, &scale, 2);
      if (!parameters.finite && first_bad == kAllFinite) first_bad = row;
    }
    quantize_run<kBits>(x + column, count, parameters, random, packed + kParameterBytes + column * kBits / 8);
  };
  const int64_t ahead = kBytesAhead / (n * static_cast<int64_t>(sizeof(T))) + 1;
  // One 32-bit word for four columns.
  const Keyed words_of_rows{
      .key = p.key, .num_columns = (kBytesBefore + n + 3) / 4, .column_offset = 0, .seed = p.seed};
  uint32_t lower = 32768;
  const auto end_of = [&](int64_t row) { return row + ahead < row_end ? row + ahead : row_end; };
  ask_for_rows<T>(p, row_begin, end_of(row_begin));
  for (int64_t begin = row_begin; begin < row_end; begin += ahead) {
    const int64_t end = end_of(begin);
    ask_for_rows<T>(p, end, end_of(end));
    if (p.stochastic) {
      for_each_run(words_of_rows, Stream::rounding, 1, begin, end,
                   [&](int64_t row, int64_t word, int64_t count, const uint32_t* words) {
                     const auto* bytes = reinterpret_cast<const uint8_t*>(words);  // little-endian
                     const int64_t skipped = word == 0 ? kBytesBefore : 0;
                     const int64_t column = 4 * word + skipped - kBytesBefore;
                     if (word == 0) lower = bytes[0];
                     const int64_t rest = n - column, drawn = 4 * count - skipped;
                     use(row, column, drawn < rest ? drawn : rest, {bytes + skipped, lower});
                   });
    } else {
      for (int64_t row = begin; row < end; ++row) use(row, 0, n, {nullptr, lower});
    }
  }
  return first_bad;
}

template <class T>
void round_to_bfloat16(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  const int64_t n = p.num_columns, ahead = 8;
  for (int64_t row = row_begin; row < row_end; ++row) {
    ask_for_rows<T>(p, row + ahead < row_end ? row + ahead : row_end - 1,
                    row + ahead < row_end ? row + ahead + 1 : row_end);
    const T* x = row_of<T>(p, row);
    auto* packed = reinterpret_cast<BFloat16*>(p.packed + row * packed_row_bytes(n, 16));
    int64_t c = 0;
    for (; c + L <= n; c += L) store<L>(packed + c, load_float<L>(x + c));
    for (; c < n; ++c) store<1>(packed + c, load_float<1>(x + c));
  }
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
      round_to_bfloat16<T>(p, row_begin, row_end);
      return kAllFinite;
  }
}

}  // namespace

int64_t quantize_rows(const QuantizeRows& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.element) {
    case Element::f32:
      return quantize_of_type<float>(problem, row_begin, row_end);
    case Element::f64:
      return quantize_of_type<double>(problem, row_begin, row_end);
    case Element::bf16:
      return quantize_of_type<BFloat16>(problem, row_begin, row_end);
  }
  return kAllFinite;
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
