// The rows of a CSR matrix in chunks of equal work, for ops that add up the edges of each row; a hub, whose edges are
// several chunks', is added up piece by piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/table.h"
#include "formats/narrow.h"
#include "ops/cpu/parallel.h"
#include "problems/row_chunks.h"

namespace pyg_dist::cpu {

// Edges per chunk: about 2^18 multiplications, 20 to 50 microseconds, are enough to hide the cost of taking a chunk and
// few enough to keep many threads busy. A function of the width alone, so that sums do not depend on the threads.
inline int64_t chunk_work(int64_t num_columns) { return std::clamp<int64_t>((1 << 18) / num_columns, 256, 16384); }

// rows(begin, end) does whole rows. sum(begin, end, sums) writes the sums of a hub's edges [begin, end), num_columns of
// type A; finish(row, sums) gets those of all its edges, pieces added in their order. `work`: of a chunk, which decides
// where hubs are cut.
template <class A, class Rows, class Sum, class Finish>
void for_each_row_by_work(const int64_t* rowptr, int64_t num_rows, int64_t num_columns, int64_t work, const Rows& rows,
                          const Sum& sum, const Finish& finish) {
  struct PartialSums {
    int64_t row;
    std::unique_ptr<A[]> sums;
  };
  const auto sum_piece = [&](const RowChunks::Piece& piece) {
    PartialSums partial{piece.row, std::make_unique_for_overwrite<A[]>(static_cast<size_t>(num_columns))};
    sum(piece.edge_begin, piece.edge_end, partial.sums.get());
    return partial;
  };
  const RowChunks chunks(rowptr, num_rows, work);
  // Two slots a chunk, head and tail: a hub's pieces stand in consecutive filled slots, the first one in a tail.
  std::vector<PartialSums> partials(static_cast<size_t>(2 * chunks.size()));
  for_each_chunk(chunks.size(), [&](int64_t k) {
    const RowChunks::Chunk chunk = chunks[k];
    const auto slot = static_cast<size_t>(2 * k);
    if (chunk.head.row >= 0) partials[slot] = sum_piece(chunk.head);
    if (chunk.row_begin < chunk.row_end) rows(chunk.row_begin, chunk.row_end);
    if (chunk.tail.row >= 0) partials[slot + 1] = sum_piece(chunk.tail);
  });
  PartialSums* hub = nullptr;
  for (PartialSums& partial : partials) {
    if (partial.sums == nullptr) continue;
    if (hub != nullptr && hub->row == partial.row) {
      for (int64_t c = 0; c < num_columns; ++c) hub->sums[c] += partial.sums[c];
    } else {
      if (hub != nullptr) finish(hub->row, hub->sums.get());
      hub = &partial;
    }
  }
  if (hub != nullptr) finish(hub->row, hub->sums.get());
}

// The sums of edges of one row, in the accumulator type and without row_scale.
inline void sum_edges(const SpmmCsr& problem, int64_t begin, int64_t end, void* sums) {
  // As a matrix of one row. Edge numbers, and so col and weight, stay those of the whole matrix.
  const int64_t rowptr[] = {begin, end};
  SpmmCsr one_row = problem;
  one_row.rowptr = rowptr;
  one_row.row_scale = nullptr;
  one_row.accumulate = false;
  one_row.out = sums;
  one_row.out_element = accumulator_of(problem.x_element);
  kernels().spmm_rows(one_row, 0, 1);
}

// Writes a hub's sums to its row of the output, or adds them to it: out (+)= scale * sums, or sums / scale.
template <class T>
void write_hub(const accumulator_t<T>* sums, int64_t num_columns, accumulator_t<T> scale, bool divide, bool accumulate,
               T* out) {
  using A = accumulator_t<T>;
  for (int64_t c = 0; c < num_columns; ++c) {
    const A sum = divide ? sums[c] / scale : scale * sums[c];  // not 0 + sum, which loses the sign of -0.0
    if constexpr (kIsNarrow<T>) {
      out[c] = narrow<T>(accumulate ? widen(out[c]) + sum : sum);
    } else {
      out[c] = accumulate ? out[c] + sum : sum;
    }
  }
}

}  // namespace pyg_dist::cpu
