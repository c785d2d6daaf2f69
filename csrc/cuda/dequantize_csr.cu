#include <algorithm>
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/row_reduction.cuh"
#include "formats/packed_rows.h"

namespace pyg_dist::gpu {
namespace {

// The bytes behind a packed row's parameters, in `Word`s; a "column" of the reduction is a number in the order of the
// bytes: number k of byte i is 8 / kBits i + k. (16 bits: a bfloat16 each.)
template <class T_, int kBits, class Word, int kCount_>
struct UnpackEdges {
  using T = T_;
  using A = float;
  static constexpr int kInByte = kBits < 8 ? 8 / kBits : 1, kOfNumber = kBits == 16 ? 2 : 1;  // numbers; bytes
  static constexpr int kVec = sizeof(Word) / kOfNumber * kInByte, kCount = kCount_, kThreadsAtOnce = 512;
  static constexpr int64_t kHeader = kBits == 16 ? 0 : kParameterBytes;
  using Columns = LaneColumns<kVec, kCount>;

  DequantizeCsr p;
  int64_t row_bytes;
  bool is_whole;  // words do not cross blocks, and rows of out are aligned to as many values as a word has bytes

  static PYG_DIST_DEVICE A identity() { return 0; }
  static PYG_DIST_DEVICE A join(A a, A b) { return a + b; }

  PYG_DIST_DEVICE void add(int64_t, int64_t begin, int64_t end, const Columns& columns, A (&sum)[kCount][kVec]) const {
    const auto* const weight = static_cast<const accumulator_t<T>*>(p.weight);
    PYG_DIST_UNROLL_BY(2)
    for (int64_t e = begin; e < end; ++e) {
      const uint8_t* const row = p.packed + p.col[e] * row_bytes;
      float scale = weight == nullptr ? 1 : static_cast<float>(weight[e]), zero = 0;
      if constexpr (kBits < 16) {
        const uint32_t both = parameters(row);
        zero = scale * widen(BFloat16{static_cast<uint16_t>(both)});
        scale = scale * widen(BFloat16{static_cast<uint16_t>(both >> 16)});
      }
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        if (!columns.has(u)) continue;
        const int64_t byte = columns.at(u) / kInByte * kOfNumber;
        add_word(load<1>(reinterpret_cast<const Word*>(row + kHeader + byte)).value[0], zero, scale, sum[u]);
      }
    }
  }

  PYG_DIST_DEVICE void finish(int64_t row, const Columns& columns, A (&sum)[kCount][kVec]) const {
    if (p.rowptr[row] == p.rowptr[row + 1]) return;
    const auto* const row_scale = static_cast<const accumulator_t<T>*>(p.row_scale);
    const float scale = row_scale == nullptr ? 1 : static_cast<float>(row_scale[row]);
    T* const to = static_cast<T*>(p.out) + row * p.out_stride;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      if (is_whole) {
        add_vectors(to, columns.at(u), sum[u], scale);
        continue;
      }
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) {
        const int64_t column = column_of(columns.at(u) + v);
        if (column >= 0) to[column] = from_sum<T>(to_sum(to[column]) + sum[u][v] * scale);
      }
    }
  }

 private:
  // The numbers k of a word's bytes stand side by side.
  PYG_DIST_DEVICE void add_vectors(T* to, int64_t first, const A (&sum)[kVec], float scale) const {
    constexpr int kBytes = kVec / kInByte;
    PYG_DIST_UNROLL
    for (int k = 0; k < kInByte; ++k) {
      T* const at = to + column_of(first + k);
      accumulator_t<T> values[kBytes];
      load_values<T, kBytes>(at, values);
      PYG_DIST_UNROLL
      for (int v = 0; v < kBytes; ++v) values[v] += sum[v * kInByte + k] * scale;
      store_values<T, kBytes>(at, values);
    }
  }

  // Z, then S: by one load where words are.
  static PYG_DIST_DEVICE uint32_t parameters(const uint8_t* row) {
    if constexpr (sizeof(Word) == sizeof(uint32_t)) {
      return load<1>(reinterpret_cast<const uint32_t*>(row)).value[0];
    } else {
      return static_cast<uint32_t>(row[0] | row[1] << 8 | row[2] << 16) | static_cast<uint32_t>(row[3]) << 24;
    }
  }

  static PYG_DIST_DEVICE void add_word(Word word, float zero, float scale, A (&sum)[kVec]) {
    constexpr int kWidth = kBits == 16 ? 16 : kBits;
    PYG_DIST_UNROLL
    for (int v = 0; v < kVec; ++v) {
      const auto number = static_cast<uint32_t>(word) >> (v * kWidth) & ((1u << kWidth) - 1);
      if constexpr (kBits == 16) {
        sum[v] += scale * widen(BFloat16{static_cast<uint16_t>(number)});
      } else {
        sum[v] += zero + scale * static_cast<float>(number);
      }
    }
  }

  // The column that a number stands for, or -1.
  PYG_DIST_DEVICE int64_t column_of(int64_t number) const {
    if constexpr (kBits >= 8) {
      return number < p.num_columns ? number : -1;
    } else {
      constexpr int64_t kBlockBytes = kBlock * kBits / 8;
      const int64_t byte = number / kInByte, block = byte / kBlockBytes, rest = p.num_columns - block * kBlock;
      const int64_t n = rest < kBlock ? rest : kBlock, stretch = (n * kBits + 7) / 8;
      const int64_t column = byte % kBlockBytes + number % kInByte * stretch;
      return column < n ? block * kBlock + column : -1;
    }
  }
};

}  // namespace

void dequantize_csr_add(const DequantizeCsr& p, const Queue& queue) {
  const int64_t row_bytes = packed_row_bytes(p.num_columns, p.bits);
  const bool has_words = (reinterpret_cast<uintptr_t>(p.packed) | static_cast<uint64_t>(row_bytes)) % 4 == 0;
  const auto add = [&]<class T, int kBits>() {
    const int64_t numbers = kBits == 16 ? p.num_columns : (row_bytes - kParameterBytes) * (8 / kBits);
    Alignment<T> alignment(p.num_columns);
    alignment.template rows<T>(p.out, p.out_stride);
    const bool is_whole =
        p.num_columns * kBits % 32 == 0 && alignment.allows(std::min<uint64_t>(sizeof(T) * (kBits == 16 ? 2 : 4), 16));
    if (has_words) {
      reduce_rows(UnpackEdges<T, kBits, uint32_t, kBits == 2 ? 1 : 2>{p, row_bytes, is_whole}, numbers, queue);
    } else {
      using Least = std::conditional_t<kBits == 16, uint16_t, uint8_t>;
      reduce_rows(UnpackEdges<T, kBits, Least, 4>{p, row_bytes, false}, numbers, queue);
    }
  };
  for_element(p.element, [&]<class T>() {
    switch (p.bits) {
      case 2:
        return add.template operator()<T, 2>();
      case 4:
        return add.template operator()<T, 4>();
      case 8:
        return add.template operator()<T, 8>();
      default:
        return add.template operator()<T, 16>();
    }
  });
}

}  // namespace pyg_dist::gpu
