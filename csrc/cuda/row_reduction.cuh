// One value for each row of a CSR pattern and each column, of that row's edges: sums, and what can be put together like
// sums. Rows by equal shares of their edges (problems/row_chunks.h), a hub piece by piece, without atomics: the same
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

// The rows of chunk k, one after another; the chunk begins with row `first`, and the one behind it with row `next`. Of
// each its edges there, and for a hub the slot of its piece, else -1: each chunk has two, of the end and of the start
// of a hub.
class ChunkRows {
 public:
  int64_t row = 0, begin = 0, end = 0, slot = -1;

  PYG_DIST_DEVICE ChunkRows(const RowChunks& chunks, int64_t first, int64_t next, int64_t k)
      : chunks_(chunks), first_(first), next_(next), k_(k) {
    const bool has_head = first > 0 && chunks.is_hub(first - 1) && chunks.last_chunk(first - 1) >= k;
    row = first - has_head;
    find();
  }
  PYG_DIST_DEVICE bool has_row() const { return row < next_; }
  PYG_DIST_DEVICE void advance() {
    ++row;
    find();
  }

 private:
  PYG_DIST_DEVICE void find() {
    if (!has_row()) return;
    const RowChunks::Piece piece = chunks_.piece(row, k_);
    const bool is_piece = piece.row >= 0;
    begin = is_piece ? piece.edge_begin : chunks_.edge_begin(row);
    end = is_piece ? piece.edge_end : chunks_.edge_begin(row + 1);
    slot = is_piece ? 2 * k_ + (row >= first_) : -1;
  }

  const RowChunks& chunks_;
  int64_t first_, next_, k_;
};

// Calls use(row, begin, end, slot) for each of them.
template <class Use>
PYG_DIST_DEVICE void for_rows_of_chunk(const RowChunks& chunks, int64_t first, int64_t next, int64_t k,
                                       const Use& use) {
  for (ChunkRows rows(chunks, first, next, k); rows.has_row(); rows.advance()) {
    use(rows.row, rows.begin, rows.end, rows.slot);
  }
}

// The hub that starts in chunk k, where it is the last row, or -1.
PYG_DIST_DEVICE int64_t hub_of_chunk(const RowChunks& chunks, const int64_t* first_row, int64_t k) {
  const int64_t row = first_row[k + 1] - 1;
  return row >= first_row[k] && chunks.is_hub(row) ? row : -1;
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
  static constexpr int kThreadsAtOnce = Op::kThreadsAtOnce;
  using Base = RowReduction<Op>;
  using typename Base::Columns;
  using typename Base::Shared;
  using typename Base::Values;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = this->chunk();
    if (k >= this->num_chunks) return;
    const Columns columns = this->columns();
    for_rows_of_chunk(this->chunks, this->first_row[k], this->first_row[k + 1], k,
                      [&](int64_t row, int64_t begin, int64_t end, int64_t slot) {
                        Values values = this->identity();
                        this->op.add(row, begin, end, columns, values.value);
                        if (slot >= 0) {
                          save(values, slot, columns);
                        } else {
                          this->op.finish(row, columns, values.value);
                        }
                      });
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
    const int64_t row = hub_of_chunk(this->chunks, this->first_row, k);
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

  // The row that each chunk begins with, found on the device: [num_chunks + 1].
  const int64_t* first_rows(const RowChunks& chunks, const Queue& queue) const {
    auto* const first_row = scratch<int64_t>(queue, num_chunks + 1);
    launch(FindChunks{chunks, num_chunks, first_row}, num_chunks / FindChunks::kThreads + 1, queue.stream);
    return first_row;
  }
};

template <class Op>
void reduce_rows(const Op& op, int64_t num_columns, const Queue& queue) {
  constexpr int64_t kOfLane = Op::kVec * Op::kCount;
  const int log_lanes = log_lanes_for(num_columns, kOfLane);
  const int64_t of_slice = kOfLane << log_lanes, num_slices = (num_columns + of_slice - 1) / of_slice;
  const ChunkShape shape(op.p.num_rows, op.p.num_edges, int64_t{1} << log_lanes);
  const RowChunks chunks(op.p.rowptr, op.p.num_rows, shape.work);
  const int64_t* const first_row = shape.first_rows(chunks, queue);
  auto* const pieces = scratch<typename Op::A>(queue, 2 * shape.num_chunks * num_columns);
  const RowReduction<Op> all{op, chunks, first_row, pieces, shape.num_chunks, num_columns, log_lanes};
  const int64_t num_blocks = blocks_for(shape.num_chunks << log_lanes, all.kThreads);
  launch(ReduceChunks<Op>{all}, num_blocks, queue.stream, num_slices);
  launch(JoinHubs<Op>{all}, num_blocks, queue.stream, num_slices);
}

}  // namespace pyg_dist::gpu
