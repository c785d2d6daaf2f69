// Rows sorted by where they go. Sums of float32 and float64 are then a product with the pattern of the order, which
// cuts targets of many rows by work; narrower ones round after each addition, as the CPU does, so a group adds one by
// one.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/ascending.cuh"
#include "cuda/bad_index.cuh"
#include "cuda/element.cuh"
#include "cuda/for_each.cuh"
#include "cuda/kernels.h"
#include "cuda/sort.h"
#include "cuda/warp.cuh"

namespace pyg_dist::gpu {
namespace {

// Keys of rows: where they go; num_out_rows, behind all others, for those that go nowhere.
struct TargetKeys {
  ScatterAddRows p;
  int64_t first;  // of these among all
  uint32_t* key;
  IndexCheck check;

  PYG_DIST_DEVICE void operator()(int64_t r) const {
    const bool is_good = is_in_range(p.index[r], p.num_out_rows, first + r, check);
    key[r] = static_cast<uint32_t>(is_good ? p.index[r] : p.num_out_rows);
  }
};

// Where the rows of each target begin: a rowptr, without those that go nowhere.
struct TargetStarts {
  Sorted sorted;
  int64_t count;
  int64_t* rowptr;

  PYG_DIST_DEVICE void operator()(int64_t target) const {
    rowptr[target] = count_less(sorted.key, count, static_cast<uint32_t>(target));
  }
};

void add_products(const ScatterAddRows& p, const Sorted& sorted, const Queue& queue) {
  auto* const rowptr = scratch<int64_t>(queue, p.num_out_rows + 1);
  for_each(TargetStarts{sorted, p.num_rows, rowptr}, p.num_out_rows + 1, queue);
  spmm_csr({.rowptr = rowptr,
            .col = sorted.place,
            .x = p.rows,
            .weight = nullptr,
            .row_scale = nullptr,
            .col_scale = nullptr,
            .out = p.out,
            .num_rows = p.num_out_rows,
            .num_source_rows = p.num_rows,
            .num_edges = p.num_rows,
            .num_features = p.num_features,
            .x_stride = p.rows_stride,
            .out_stride = p.out_stride,
            .x_element = p.element,
            .out_element = p.element,
            .accumulate = true,
            .divide = false},
           queue);
}

// A group of lanes for each row of `out` that gets addends: where they begin in the order of the keys.
template <class T, int kVec>
struct AddRuns {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  ScatterAddRows p;
  Sorted sorted;
  int log_lanes;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t first = (block_id() * kThreads + thread_id()) >> log_lanes;
    if (first >= p.num_rows || (first > 0 && sorted.key[first - 1] == sorted.key[first])) return;
    const uint32_t target = sorted.key[first];
    if (target >= p.num_out_rows) return;
    const int lane = thread_id() & ((1 << log_lanes) - 1);
    const auto* const rows = static_cast<const T*>(p.rows);
    T* const out = static_cast<T*>(p.out) + target * p.out_stride;
    for (int64_t c = lane * kVec; c < p.num_features; c += int64_t{kVec} << log_lanes) {
      A sum[kVec];
      load_values<T, kVec>(out + c, sum);
      for (int64_t k = first; k < p.num_rows && sorted.key[k] == target; ++k) {
        A addend[kVec];
        load_values<T, kVec>(rows + sorted.place[k] * p.rows_stride + c, addend);
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) sum[v] = to_sum(from_sum<T>(sum[v] + addend[v]));
      }
      store_values<T, kVec>(out + c, sum);
    }
  }
};

template <class T>
void add_runs(const ScatterAddRows& p, const Sorted& sorted, const Queue& queue) {
  Alignment<T> alignment(p.num_features);
  alignment.template rows<T>(p.rows, p.rows_stride).template rows<T>(p.out, p.out_stride);
  with_vectors<T>(alignment, [&]<int kVec, int>() {
    using Kernel = AddRuns<T, kVec>;
    const int log_lanes = log_lanes_for(p.num_features, kVec);
    launch(Kernel{p, sorted, log_lanes}, blocks_for(p.num_rows << log_lanes, Kernel::kThreads), queue.stream);
  });
}

// Of fewer than 2^31 rows, as many as are sorted at once.
void add_piece(const ScatterAddRows& p, int64_t first, const IndexCheck& check, const Queue& queue) {
  auto* const key = scratch<uint32_t>(queue, p.num_rows);
  for_each(TargetKeys{p, first, key, check}, p.num_rows, queue);
  int num_bits = 0;
  while (p.num_out_rows >> num_bits > 0) ++num_bits;
  const Sorted sorted = sort_keys(key, p.num_rows, num_bits, queue);
  for_element(p.element, [&]<class T>() {
    if constexpr (kIsNarrow<T>) {
      add_runs<T>(p, sorted, queue);
    } else {
      add_products(p, sorted, queue);
    }
  });
}

}  // namespace

void scatter_add_rows(const ScatterAddRows& p, const IndexCheck& check, const Queue& queue, int64_t most_rows) {
  if (p.num_out_rows >= UINT32_MAX) {
    throw std::runtime_error("scatter_add_rows: expected fewer than 2^32 - 1 rows of 'out', got " +
                             std::to_string(p.num_out_rows));
  }
  for (int64_t first = 0; first < p.num_rows; first += most_rows) {
    ScatterAddRows piece = p;
    piece.index += first;
    piece.rows = static_cast<const char*>(p.rows) + first * p.rows_stride * bytes_of(p.element);
    piece.num_rows = std::min(p.num_rows - first, most_rows);
    add_piece(piece, first, check, queue);
  }
}

}  // namespace pyg_dist::gpu
