// One value for each row of a CSR pattern and each column, of that row's edges: sums, and what can be put together like
// sums. Rows by equal shares of their edges (kernels/row_chunks.h), a hub piece by piece, without atomics: the same
// bits in every run.
//
//   FindChunks    a thread for each chunk: the row that it begins with
//   ReduceChunks  a group of lanes for each chunk: its rows one after another, a hub's piece into scratch memory
//   JoinHubs      a group for each hub: its pieces in their order
//
// A group is 1 to 32 lanes of a warp, as many as the row has vectors; wider rows take several slices of the grid, the
// chunks of the first slice before those of the second: the columns of a slice, 512 bytes of each row, have the
// second-level cache for themselves.
//
// An Op has
//   p                                 the problem: rowptr, num_rows, num_edges
//   A                                 what it keeps
//   kVec, kCount                      values of a vector, and vectors of a lane
//   identity()                        of no edge
//   add(row, begin, end, columns, v)  takes in edges
//   join(a, b)                        of two pieces
//   finish(row, columns, v)           writes a row
#pragma once

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/queue.h"
#include "cuda/warp.cuh"
#include "kernels/row_chunks.h"

namespace pyg_dist::gpu {

// The columns of a lane: kCount vectors of kVec, `step` apart.
template <int kVec, int kCount>
struct LaneColumns {
  int64_t first, step, end;

  PYG_DIST_DEVICE int64_t at(int u) const { return first + u * step; }
  PYG_DIST_DEVICE bool has(int u) const { return at(u) < end; }
};

template <class Op>
struct LaneValues {
  typename Op::A value[Op::kCount][Op::kVec];
};

// Calls use(u, values) with vector u of the rows of x that edges name, edge after edge; several are on their way at
// once.
template <class T, int kVec, int kCount, class Use>
PYG_DIST_DEVICE void for_gathered(const T* x, int64_t stride, const int32_t* col, int64_t begin, int64_t end,
                                  const LaneColumns<kVec, kCount>& columns, const Use& use) {
  constexpr int kAhead = kCount == 4 ? 2 : 4;
  for (int64_t e = begin; e < end; e += kAhead) {
    Pack<T, kVec> pack[kAhead][kCount];
    PYG_DIST_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const T* const from = x + col[e + k < end ? e + k : e] * stride;
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) pack[k][u] = columns.has(u) ? load<kVec>(from + columns.at(u)) : Pack<T, kVec>{};
    }
    PYG_DIST_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      if (e + k >= end) break;
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        accumulator_t<T> values[kVec];
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) values[v] = to_sum(pack[k][u].value[v]);
        use(u, values);
      }
    }
  }
}

struct FindChunks {
  static constexpr int kThreads = 256;
  using Shared = NoShared;

  RowChunks chunks;
  int64_t num_chunks;
  int64_t* first_row;  // [num_chunks + 1]

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = block_id() * kThreads + thread_id();
    if (k <= num_chunks) first_row[k] = chunks.first_row(k);
  }
};

// What both kernels know.
template <class Op>
struct RowReduction {
  using A = typename Op::A;
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using Columns = LaneColumns<Op::kVec, Op::kCount>;
  using Values = LaneValues<Op>;

  Op op;
  RowChunks chunks;
  const int64_t* first_row;  // [num_chunks + 1]
  A* pieces;                 // [2 num_chunks, num_columns]: head and tail of each chunk
  int64_t num_chunks;
  int64_t num_columns;
  int log_lanes;

  PYG_DIST_DEVICE int64_t chunk() const { return (block_id() * kThreads + thread_id()) >> log_lanes; }

  PYG_DIST_DEVICE Columns columns() const {
    const int lanes = 1 << log_lanes;
    const int64_t step = int64_t{lanes} * Op::kVec;
    return {block_slice() * step * Op::kCount + (thread_id() & (lanes - 1)) * Op::kVec, step, num_columns};
  }

  PYG_DIST_DEVICE Values identity() const {
    Values values;
    PYG_DIST_UNROLL
    for (int u = 0; u < Op::kCount; ++u) {
      PYG_DIST_UNROLL
      for (int v = 0; v < Op::kVec; ++v) values.value[u][v] = op.identity();
    }
    return values;
  }
};

template <class Op>
struct ReduceChunks : RowReduction<Op> {
  using Base = RowReduction<Op>;
  using typename Base::Columns;
  using typename Base::Shared;
  using typename Base::Values;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = this->chunk();
    if (k >= this->num_chunks) return;
    const Columns columns = this->columns();
    const int64_t first = this->first_row[k], next = this->first_row[k + 1];
    const bool has_head = first > 0 && this->chunks.is_hub(first - 1) && this->chunks.last_chunk(first - 1) >= k;
    for (int64_t row = first - has_head; row < next; ++row) {
      const RowChunks::Piece piece = this->chunks.piece(row, k);
      const bool is_piece = piece.row >= 0;
      Values values = this->identity();
      this->op.add(row, is_piece ? piece.edge_begin : this->op.p.rowptr[row],
                   is_piece ? piece.edge_end : this->op.p.rowptr[row + 1], columns, values.value);
      if (is_piece) {
        save(values, 2 * k + (row >= first), columns);
      } else {
        this->op.finish(row, columns, values.value);
      }
    }
  }

 private:
  PYG_DIST_DEVICE void save(const Values& values, int64_t slot, const Columns& columns) const {
    typename Op::A* const to = this->pieces + slot * this->num_columns;
    PYG_DIST_UNROLL
    for (int u = 0; u < Op::kCount; ++u) {
      if (!columns.has(u)) continue;
      PYG_DIST_UNROLL
      for (int v = 0; v < Op::kVec; ++v) to[columns.at(u) + v] = values.value[u][v];
    }
  }
};

template <class Op>
struct JoinHubs : RowReduction<Op> {
  using Base = RowReduction<Op>;
  using typename Base::Columns;
  using typename Base::Shared;
  using typename Base::Values;

  // A hub starts in the chunk that ends with it.
  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = this->chunk();
    if (k >= this->num_chunks) return;
    const int64_t row = this->first_row[k + 1] - 1;
    if (row < this->first_row[k] || !this->chunks.is_hub(row)) return;
    const Columns columns = this->columns();
    Values values = this->identity();
    const int64_t last = this->chunks.last_chunk(row);
    take(2 * k + 1, columns, values);
    PYG_DIST_UNROLL_BY(4)
    for (int64_t other = k + 1; other <= last; ++other) take(2 * other, columns, values);
    this->op.finish(row, columns, values.value);
  }

 private:
  PYG_DIST_DEVICE void take(int64_t slot, const Columns& columns, Values& values) const {
    const typename Op::A* const from = this->pieces + slot * this->num_columns;
    PYG_DIST_UNROLL
    for (int u = 0; u < Op::kCount; ++u) {
      if (!columns.has(u)) continue;
      PYG_DIST_UNROLL
      for (int v = 0; v < Op::kVec; ++v) {
        values.value[u][v] = this->op.join(values.value[u][v], from[columns.at(u) + v]);
      }
    }
  }
};

// How a reduction is cut: a function of its sizes alone.
struct ReductionShape {
  int log_lanes;
  int64_t work, num_chunks, num_slices;

  ReductionShape(int64_t num_rows, int64_t num_edges, int64_t num_columns, int64_t columns_per_lane) {
    // As many lanes as a large GPU runs at once, four times over; more chunks would only make more pieces.
    constexpr int64_t kLanesOfAll = 1 << 20;
    log_lanes = log_lanes_for(num_columns, columns_per_lane);
    const int64_t lanes = int64_t{1} << log_lanes, units = num_rows + num_edges, most = kLanesOfAll / lanes;
    work = std::max(least_work(lanes), (units + most - 1) / most);
    num_chunks = (units + work - 1) / work;
    num_slices = (num_columns + columns_per_lane * lanes - 1) / (columns_per_lane * lanes);
  }

  // Of a chunk: enough to hide what it costs to begin one.
  static int64_t least_work(int64_t lanes) { return std::clamp<int64_t>(4 * lanes, 32, 128); }
};

template <class Op>
void reduce_rows(const Op& op, int64_t num_columns, const Queue& queue) {
  const ReductionShape shape(op.p.num_rows, op.p.num_edges, num_columns, Op::kVec * Op::kCount);
  const RowChunks chunks(op.p.rowptr, op.p.num_rows, shape.work);
  auto* const first_row = scratch<int64_t>(queue, shape.num_chunks + 1);
  auto* const pieces = scratch<typename Op::A>(queue, 2 * shape.num_chunks * num_columns);
  launch(FindChunks{chunks, shape.num_chunks, first_row}, shape.num_chunks / FindChunks::kThreads + 1, queue.stream);
  const RowReduction<Op> all{op, chunks, first_row, pieces, shape.num_chunks, num_columns, shape.log_lanes};
  const int64_t threads = shape.num_chunks << shape.log_lanes;
  const int64_t num_blocks = blocks_for(threads, all.kThreads);
  launch(ReduceChunks<Op>{all}, num_blocks, queue.stream, shape.num_slices);
  launch(JoinHubs<Op>{all}, num_blocks, queue.stream, shape.num_slices);
}

}  // namespace pyg_dist::gpu
