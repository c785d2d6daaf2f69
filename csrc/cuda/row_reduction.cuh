// One value for each row of a CSR pattern and each column, of that row's edges: sums, and what can be put together like
// sums. Rows by equal shares of their edges (problems/row_chunks.h), a hub piece by piece, without atomics: the same
// bits in every run.
//
//   ReduceChunks  a group of lanes for each chunk: finds the row that it begins with, goes through its rows, and puts a
//                 hub's piece into scratch memory
//   JoinHubs      a group for each hub: its pieces in their order
//
// A group is 1 to 32 lanes of a warp, as many as the row has vectors; wider rows take several slices of the grid, the
// chunks of the first slice before those of the second: the columns of a slice, 512 bytes of each row or fewer,
// have the second-level cache for themselves.
//
// An Op has
//   p                                 the problem: rowptr, num_rows, num_edges
//   A                                 what it keeps
//   kVec, kCount                      values of a vector, and vectors of a lane
//   kThreadsAtOnce                    of a multiprocessor, which has so many registers for each
//   identity()                        of no edge
//   add(row, begin, end, columns, v)  takes in edges
//   join(a, b)                        of two pieces
//   finish(row, columns, v)           writes a row
#pragma once

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/queue.h"
#include "cuda/warp.cuh"
#include "problems/row_chunks.h"

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

// The rows of chunk k, one after another; chunks behind the last one have none. Of each its edges there, and for a hub
// the slot of its piece, else -1: each chunk has two, 2 k of the end of a hub and 2 k + 1 of the start of one.
class ChunkRows {
 public:
  int64_t row = 0, begin = 0, end = 0, slot = -1;

  PYG_DIST_DEVICE ChunkRows(const RowChunks& chunks, int64_t k) : chunks_(chunks), first_(chunks.first_row(k)), k_(k) {
    const bool has_head = first_ > 0 && chunks.is_hub(first_ - 1) && chunks.last_chunk(first_ - 1) >= k;
    row = first_ - has_head;
    find();
  }
  PYG_DIST_DEVICE bool has_row() const { return has_row_; }
  PYG_DIST_DEVICE void advance() {
    ++row;
    find();
  }
  // Behind the last row: the hub that starts here, of which that is the piece, or -1.
  PYG_DIST_DEVICE int64_t hub() const { return slot == 2 * k_ + 1 ? row - 1 : -1; }

 private:
  PYG_DIST_DEVICE void find() {
    has_row_ = row < chunks_.num_rows() && chunks_.starts_before(row, k_ + 1);
    if (!has_row_) return;
    const RowChunks::Piece piece = chunks_.piece(row, k_);
    const bool is_piece = piece.row >= 0;
    begin = is_piece ? piece.edge_begin : chunks_.edge_begin(row);
    end = is_piece ? piece.edge_end : chunks_.edge_begin(row + 1);
    slot = is_piece ? 2 * k_ + (row >= first_) : -1;
  }

  const RowChunks& chunks_;
  int64_t first_, k_;
  bool has_row_ = false;
};

// Calls use(row, begin, end, slot) for each of them; the hub that starts there, or -1.
template <class Use>
PYG_DIST_DEVICE int64_t for_rows_of_chunk(const RowChunks& chunks, int64_t k, const Use& use) {
  ChunkRows rows(chunks, k);
  for (; rows.has_row(); rows.advance()) use(rows.row, rows.begin, rows.end, rows.slot);
  return rows.hub();
}

// Calls take(slot) for the pieces of a hub that starts in chunk k, in the order of its edges.
template <class Take>
PYG_DIST_DEVICE void for_pieces(const RowChunks& chunks, int64_t row, int64_t k, const Take& take) {
  const int64_t last = chunks.last_chunk(row);
  take(2 * k + 1);
  PYG_DIST_UNROLL_BY(4)
  for (int64_t other = k + 1; other <= last; ++other) take(2 * other);
}

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
  int64_t* hubs;  // [num_chunks]: the one that starts in each chunk, or -1
  A* pieces;      // [2 num_chunks, num_columns]: head and tail of each chunk
  int64_t num_chunks;
  int64_t num_columns;
  int log_lanes;

  PYG_DIST_DEVICE int64_t chunk() const { return (block_id() * kThreads + thread_id()) >> log_lanes; }
  PYG_DIST_DEVICE int lane() const { return thread_id() & ((1 << log_lanes) - 1); }

  PYG_DIST_DEVICE Columns columns() const {
    const int64_t step = int64_t{Op::kVec} << log_lanes;
    return {block_slice() * step * Op::kCount + lane() * Op::kVec, step, num_columns};
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
  static constexpr int kThreadsAtOnce = Op::kThreadsAtOnce;
  using Base = RowReduction<Op>;
  using typename Base::Columns;
  using typename Base::Shared;
  using typename Base::Values;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = this->chunk();
    if (k >= this->num_chunks) return;
    const Columns columns = this->columns();
    const int64_t hub = for_rows_of_chunk(this->chunks, k, [&](int64_t row, int64_t begin, int64_t end, int64_t slot) {
      Values values = this->identity();
      this->op.add(row, begin, end, columns, values.value);
      if (slot >= 0) {
        save(values, slot, columns);
      } else {
        this->op.finish(row, columns, values.value);
      }
    });
    if (block_slice() == 0 && this->lane() == 0) this->hubs[k] = hub;
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

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = this->chunk();
    if (k >= this->num_chunks) return;
    const int64_t row = this->hubs[k];
    if (row < 0) return;
    const Columns columns = this->columns();
    Values values = this->identity();
    for_pieces(this->chunks, row, k, [&](int64_t slot) { take(slot, columns, values); });
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

// How rows are cut for groups of `lanes`: a function of the sizes alone.
struct ChunkShape {
  int64_t work, num_chunks;

  ChunkShape(int64_t num_rows, int64_t num_edges, int64_t lanes) {
    // As many lanes as a large GPU runs at once, four times over; more chunks would only make more pieces.
    constexpr int64_t kLanesOfAll = 1 << 20;
    const int64_t units = num_rows + num_edges, most = std::max<int64_t>(kLanesOfAll / lanes, 1);
    work = std::max(least_work(lanes), (units + most - 1) / most);
    num_chunks = (units + work - 1) / work;
  }

  // Of a chunk: enough to hide what it costs to begin one.
  static int64_t least_work(int64_t lanes) { return std::clamp<int64_t>(4 * lanes, 32, 128); }
};

// A group has 2^most_log_lanes lanes at most, and a slice their columns.
template <class Op>
void reduce_rows(const Op& op, int64_t num_columns, const Queue& queue, int most_log_lanes = 5) {
  constexpr int64_t kOfLane = Op::kVec * Op::kCount;
  const int log_lanes = std::min(log_lanes_for(num_columns, kOfLane), most_log_lanes);
  const int64_t of_slice = kOfLane << log_lanes, num_slices = (num_columns + of_slice - 1) / of_slice;
  const ChunkShape shape(op.p.num_rows, op.p.num_edges, int64_t{1} << log_lanes);
  const RowChunks chunks(op.p.rowptr, op.p.num_rows, shape.work);
  auto* const hubs = scratch<int64_t>(queue, shape.num_chunks);
  auto* const pieces = scratch<typename Op::A>(queue, 2 * shape.num_chunks * num_columns);
  const RowReduction<Op> all{op, chunks, hubs, pieces, shape.num_chunks, num_columns, log_lanes};
  const int64_t num_blocks = blocks_for(shape.num_chunks << log_lanes, all.kThreads);
  launch(ReduceChunks<Op>{all}, num_blocks, queue.stream, num_slices);
  launch(JoinHubs<Op>{all}, num_blocks, queue.stream, num_slices);
}

}  // namespace pyg_dist::gpu
