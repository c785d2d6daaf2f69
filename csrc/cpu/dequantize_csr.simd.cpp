#include "cpu/table.h"
#include "cpu/vec.h"
#include "formats/packed_rows.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int L = kLanes<float>;
constexpr int64_t kPrefetchEdges = 16;

// Vectors of a quarter of a block, and of a block.
constexpr int kInQuarter = kQuarter / L, kInBlock = 4 * kInQuarter;
static_assert(kQuarter % L == 0);

// Blocks whose sums are in registers at once.
constexpr int kBlocksAtOnce = kMaxVectors > kInBlock ? kMaxVectors / kInBlock : 1;

// Numbers stay where they are in their bytes: those of stretch k are q 2^(bits k), as exact in float32 as q, and what
// they are multiplied by makes up for it.
template <int kBits>
constexpr int kStretches = kBits < 8 ? 8 / kBits : 1;

// Adds a block, or what lies in a block's bytes, to its sums: vector v has columns v L ... of a whole block.
template <int kBits>
PYG_DIST_INLINE void add_block(const uint8_t* from, const Vec<float, L>* factors, Vec<float, L>* sums) {
  if constexpr (kBits == 16) {
#pragma GCC unroll 16
    for (int v = 0; v < kInBlock; ++v) {
      sums[v] += load<L>(reinterpret_cast<const BFloat16*>(from) + v * L) * factors[0];
    }
  } else {
    constexpr int kVectors = kInBlock / kStretches<kBits>;  // of bytes
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Vec<int32_t, L> lanes = load_bytes<L>(from + v * L);
#pragma GCC unroll 4
      for (int k = 0; k < kStretches<kBits>; ++k) {
        const auto q = kBits == 8 ? lanes : lanes & (((1 << kBits) - 1) << (kBits * k));
        sums[k * kVectors + v] += convert<float, L, int32_t>(q) * factors[k];
      }
    }
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
PYG_DIST_INLINE void add_to(T* out, Vec<float, L> sum, int64_t count = L) {
  if constexpr (sizeof(T) == 8) {
    // Lane by lane: a vector of L doubles is wider than the registers.
    float lanes[L];
    __builtin_memcpy(lanes, &sum, sizeof(lanes));
    for (int64_t lane = 0; lane < count; ++lane) out[lane] += lanes[lane];
  } else {
    count == L ? store<L>(out, load<L>(out) + sum) : store_first<L>(out, load_first<L>(out, count) + sum, count);
  }
}

// The sums of blocks_at_once blocks of a row, from `block` on; kTail: of the last columns, which fill no block.
template <int kBits, int kBlocks, bool kTail, class T>
PYG_DIST_INLINE void blocks_of_row(const DequantizeCsr& p, int64_t row, int64_t block) {
  constexpr int64_t kHeader = kBits == 16 ? 0 : kParameterBytes;
  constexpr int64_t kBytes = kBlock * kBits / 8;
  const int64_t row_bytes = packed_row_bytes(p.num_columns, kBits), offset = kHeader + block * kBytes;
  Vec<float, L> sums[kBlocks * kInBlock] = {};
  float zeros = 0;
  for (int64_t e = p.rowptr[row]; e < p.rowptr[row + 1]; ++e) {
    const uint8_t* from = p.packed + p.col[e] * row_bytes;
    const Parameters parameters = parameters_of<kBits>(from);
    const float weight = factor_of<T>(p.weight, e);
    zeros += weight * parameters.zero;
    Vec<float, L> factors[kStretches<kBits>];
    for (int k = 0; k < kStretches<kBits>; ++k) {
      factors[k] = Vec<float, L>{} + weight * parameters.scale * (1.0f / static_cast<float>(1 << (kBits % 8 * k)));
    }
    from += offset;
    uint8_t last[kBytes];
    if constexpr (kTail) {
      if (from + kBytes > p.packed_end) {
        __builtin_memcpy(last, from, static_cast<std::size_t>(row_bytes - offset));
        from = last;
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) add_block<kBits>(from + b * kBytes, factors, sums + b * kInBlock);
  }
  const float scale = factor_of<T>(p.row_scale, row);
  T* to = static_cast<T*>(p.out) + row * p.out_stride + block * kBlock;
  if constexpr (kTail) {
    constexpr int kInStretch = kInBlock / kStretches<kBits>;  // vectors
    const int64_t n = p.num_columns - block * kBlock, stretch = (n + kStretches<kBits> - 1) / kStretches<kBits>;
    float scaled[kBlock + L];  // a stretch overwrites what the lanes behind the one before hold
#pragma GCC unroll 16
    for (int v = 0; v < kInBlock; ++v) {
      const int64_t first = v % kInStretch * L;
      if (first < stretch) store<L>(scaled + v / kInStretch * stretch + first, (sums[v] + zeros) * scale);
    }
    for (int64_t c = 0; c < n; c += L) add_to(to + c, load<L>(scaled + c), n - c < L ? n - c : L);
  } else {
#pragma GCC unroll 16
    for (int v = 0; v < kBlocks * kInBlock; ++v) add_to(to + v * L, (sums[v] + zeros) * scale);
  }
}

template <class T, int kBits>
void add_rows_of(const DequantizeCsr& p, int64_t row_begin, int64_t row_end) {
  const int64_t row_bytes = packed_row_bytes(p.num_columns, kBits), num_blocks = p.num_columns / kBlock;
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (p.rowptr[row] == p.rowptr[row + 1]) continue;
    for (int64_t e = p.rowptr[row]; e < p.rowptr[row + 1]; ++e) {
      if (e + kPrefetchEdges < p.num_edges) prefetch(p.packed + p.col[e + kPrefetchEdges] * row_bytes, row_bytes);
    }
    int64_t block = 0;
    for (; block + kBlocksAtOnce <= num_blocks; block += kBlocksAtOnce) {
      blocks_of_row<kBits, kBlocksAtOnce, false, T>(p, row, block);
    }
    for (; block < num_blocks; ++block) blocks_of_row<kBits, 1, false, T>(p, row, block);
    if (block * kBlock < p.num_columns) blocks_of_row<kBits, 1, true, T>(p, row, block);
  }
}

template <class T>
void add_rows(const DequantizeCsr& p, int64_t row_begin, int64_t row_end) {
  switch (p.bits) {
    case 2:
      return add_rows_of<T, 2>(p, row_begin, row_end);
    case 4:
      return add_rows_of<T, 4>(p, row_begin, row_end);
    case 8:
      return add_rows_of<T, 8>(p, row_begin, row_end);
    default:
      return add_rows_of<T, 16>(p, row_begin, row_end);
  }
}

}  // namespace

void dequantize_add_rows(const DequantizeCsr& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return add_rows<T>(problem, row_begin, row_end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
