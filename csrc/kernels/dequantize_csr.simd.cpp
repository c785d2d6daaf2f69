#include "kernels/dequantize_csr.h"

#include "kernels/packed_rows.h"
#include "kernels/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int L = kLanes<float>;
constexpr int64_t kPrefetchEdges = 16;

// Bytes of L columns.
template <int kBits>
constexpr int64_t kVectorPacked = L * kBits / 8;

// Where a vector's numbers are still shifted within their lanes, what they have to be multiplied by: lane l holds
// q 2^(bits l), which is as exact in float32 as q.
template <int kBits>
constexpr bool kShifted = kBits < 8 && L * kBits <= 32;

template <int kBits>
PYG_DIST_INLINE Vec<float, L> unshift() {
  Vec<float, L> factor = Vec<float, L>{} + 1.0f;
  if constexpr (kShifted<kBits>) {
    for (int lane = 1; lane < L; ++lane) factor[lane] = factor[lane - 1] * (1.0f / (1 << kBits));
  }
  return factor;
}

// The numbers of L columns from p on, times what unshift() takes back.
template <int kBits>
PYG_DIST_INLINE Vec<float, L> unpack(const uint8_t* p) {
  if constexpr (kBits == 16) {
    return load<L>(reinterpret_cast<const BFloat16*>(p));
  } else if constexpr (kBits == 8) {
    Vec<uint8_t, L> bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    return convert<float, L, int32_t>(convert<int32_t, L, uint8_t>(bytes));
  } else if constexpr (kShifted<kBits>) {
    uint32_t word = 0;
    __builtin_memcpy(&word, p, kVectorPacked<kBits>);
    Vec<uint32_t, L> mask;
    for (int lane = 0; lane < L; ++lane) mask[lane] = ((1u << kBits) - 1) << (kBits * lane);
    const Vec<uint32_t, L> lanes = (Vec<uint32_t, L>{} + word) & mask;
    if constexpr (L * kBits == 32) {
      return convert<float, L, uint32_t>(lanes);
    } else {
      return convert<float, L, int32_t>(bit_cast<Vec<int32_t, L>>(lanes));
    }
  } else {  // 4 bits, L / 2 bytes: one in each 64-bit lane, whose halves take one number each
    static_assert(kBits == 4);
    Vec<uint8_t, L / 2> bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    const auto wide = convert<uint64_t, L / 2, uint8_t>(bytes);
    const Vec<uint64_t, L / 2> halves = (wide | (wide << 28)) & uint64_t{0x0000000f0000000f};
    return convert<float, L, int32_t>(bit_cast<Vec<int32_t, L>>(halves));
  }
}

struct Parameters {
  float zero, scale;
};

template <int kBits>
PYG_DIST_INLINE Parameters parameters_of(const uint8_t* row) {
  if constexpr (kBits == 16) {
    return {0.0f, 1.0f};
  } else {
    uint16_t zero, scale;
    __builtin_memcpy(&zero, row, 2);
    __builtin_memcpy(&scale, row + 2, 2);
    return {bit_cast<float>(static_cast<uint32_t>(zero) << 16), bit_cast<float>(static_cast<uint32_t>(scale) << 16)};
  }
}

template <class T>
PYG_DIST_INLINE float factor_of(const void* factors, int64_t i) {
  return factors == nullptr ? 1.0f : static_cast<float>(static_cast<const accumulator_t<T>*>(factors)[i]);
}

template <class T>
PYG_DIST_INLINE void add_to(T* out, Vec<float, L> sum) {
  if constexpr (sizeof(T) == 8) {
    // Lane by lane: a vector of L doubles is wider than the registers.
    float lanes[L];
    __builtin_memcpy(lanes, &sum, sizeof(lanes));
    for (int lane = 0; lane < L; ++lane) out[lane] += lanes[lane];
  } else {
    store<L>(out, load<L>(out) + sum);
  }
}

// V vectors of columns from `column` on; kTail: the last one has `tail` columns only, and so many bytes are read.
template <int kBits, int V, bool kTail, class T>
void columns_of(const DequantizeCsr& p, int64_t row_begin, int64_t row_end, int64_t column, int tail) {
  constexpr int64_t kHeader = kBits == 16 ? 0 : kParameterBytes;
  constexpr int64_t kBytes = kVectorPacked<kBits>;
  const int64_t row_bytes = packed_row_bytes(p.num_columns, kBits), offset = kHeader + column * kBits / 8;
  const int64_t tail_bytes = (tail * kBits + 7) / 8;
  const Vec<float, L> shift_back = unshift<kBits>();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t end = p.rowptr[row + 1];
    if (p.rowptr[row] == end) continue;
    Vec<float, L> sum[V] = {};
    float zeros = 0;
    for (int64_t e = p.rowptr[row]; e < end; ++e) {
      const int64_t ahead = e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1;
      prefetch(p.packed + p.col[ahead] * row_bytes + offset, V * kBytes);
      const uint8_t* from = p.packed + p.col[e] * row_bytes;
      const Parameters parameters = parameters_of<kBits>(from);
      const float weight = factor_of<T>(p.weight, e);
      zeros += weight * parameters.zero;
      const Vec<float, L> factor = shift_back * (weight * parameters.scale);
      from += offset;
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        if (kTail && v == V - 1) {
          uint8_t rest[L * 2] = {};
          for (int64_t byte = 0; byte < tail_bytes; ++byte) rest[byte] = from[v * kBytes + byte];
          sum[v] += unpack<kBits>(rest) * factor;
        } else {
          sum[v] += unpack<kBits>(from + v * kBytes) * factor;
        }
      }
    }
    const float scale = factor_of<T>(p.row_scale, row);
    T* to = static_cast<T*>(p.out) + row * p.out_stride + column;
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const Vec<float, L> scaled = (sum[v] + zeros) * scale;
      if (kTail && v == V - 1) {
        for (int lane = 0; lane < tail; ++lane) {
          store<1>(to + v * L + lane, load<1>(to + v * L + lane) + static_cast<accumulator_t<T>>(scaled[lane]));
        }
      } else {
        add_to(to + v * L, scaled);
      }
    }
  }
}

// As many vectors at once as there are registers, then half as many, ...
template <int kBits, int V, class T>
void blocks_of(const DequantizeCsr& p, int64_t row_begin, int64_t row_end, int64_t column) {
  for (; column + V * L <= p.num_columns; column += V * L)
    columns_of<kBits, V, false, T>(p, row_begin, row_end, column, 0);
  if constexpr (V > 1) {
    blocks_of<kBits, V / 2, T>(p, row_begin, row_end, column);
  } else if (column < p.num_columns) {
    columns_of<kBits, 1, true, T>(p, row_begin, row_end, column, static_cast<int>(p.num_columns - column));
  }
}

template <class T>
void add_rows(const DequantizeCsr& p, int64_t row_begin, int64_t row_end) {
  switch (p.bits) {
    case 2:
      return blocks_of<2, kMaxVectors, T>(p, row_begin, row_end, 0);
    case 4:
      return blocks_of<4, kMaxVectors, T>(p, row_begin, row_end, 0);
    case 8:
      return blocks_of<8, kMaxVectors, T>(p, row_begin, row_end, 0);
    default:
      return blocks_of<16, kMaxVectors, T>(p, row_begin, row_end, 0);
  }
}

}  // namespace

void dequantize_add_rows(const DequantizeCsr& problem, int64_t row_begin, int64_t row_end) {
  switch (problem.element) {
    case Element::f32:
      return add_rows<float>(problem, row_begin, row_end);
    case Element::f64:
      return add_rows<double>(problem, row_begin, row_end);
    case Element::bf16:
      return add_rows<BFloat16>(problem, row_begin, row_end);
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
