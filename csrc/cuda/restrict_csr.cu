// Some rows and columns of a pattern: problems/patterns.h. The rows' entries, however many a row has, are cut into
// equal shares; a warp counts those of its share that stay, and when it is known how many all have, writes its own
// behind those of the shares before.

#include <algorithm>

#include "cuda/for_each.cuh"
#include "cuda/kernels.h"
#include "cuda/row_reduction.cuh"
#include "cuda/sort.h"

namespace pyg_dist::gpu {
namespace {

// The first position of anything wrong, kNone if nothing is: what the host asks for beside the number of entries.
struct Found {
  int64_t num_entries;
  uint64_t bad_row, bad_column;
};
constexpr uint64_t kNone = ~uint64_t{0};

struct Clear {
  int32_t* place;
  Found* found;
  int64_t num_columns;

  PYG_DIST_DEVICE void operator()(int64_t column) const {
    if (column < num_columns) place[column] = -1;
    if (column == num_columns) *found = {0, kNone, kNone};
  }
};

// Where each column that stays is numbered.
struct Number {
  RestrictCsr p;
  int32_t* place;
  Found* found;

  PYG_DIST_DEVICE void operator()(int64_t k) const {
    const int64_t column = p.column[k];
    if (column < 0 || column >= p.num_all_cols || (k > 0 && column <= p.column[k - 1])) {
      atomic_min(&found->bad_column, static_cast<uint64_t>(k));
    } else {
      place[column] = static_cast<int32_t>(k);
    }
  }
};

// How many entries a row has; none if it is no row.
struct CountEntries {
  RestrictCsr p;
  int64_t* count;
  Found* found;

  PYG_DIST_DEVICE void operator()(int64_t i) const {
    const int64_t row = p.row[i];
    count[i] = 0;
    if (row >= 0 && row < p.num_all_rows) {
      const int64_t first = p.rowptr[row], last = p.rowptr[row + 1];
      if (first >= 0 && first <= last && last <= p.num_all_entries) {
        count[i] = last - first;
        return;
      }
    }
    atomic_min(&found->bad_row, static_cast<uint64_t>(i));
  }
};

// A warp for each share. kWrites: writes what stays, else counts it.
template <bool kWrites>
struct TakeEntries {
  static constexpr int kThreads = 256;
  using Shared = NoShared;

  RestrictCsr p;
  RestrictedEntries out;
  const int32_t* place;
  const int64_t* start;  // [num_rows + 1], of the rows' entries one behind the other
  int64_t* kept;         // [num_shares]: of each share; writing: of all before it
  int64_t num_shares;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = (block_id() * kThreads + thread_id()) / kWarp;
    if (k >= num_shares) return;  // the next would have no rows, and its count lie where the sum of all comes
    const int64_t units = start[p.num_rows] + p.num_rows, work = (units + num_shares - 1) / num_shares;
    const RowChunks chunks(start, p.num_rows, work > 0 ? work : 1);
    int64_t count = kWrites ? kept[k] : 0;
    for_rows_of_chunk(chunks, k, [&](int64_t i, int64_t begin, int64_t end, int64_t slot) {
      const bool starts_here = slot != 2 * k;
      if (kWrites && starts_here && lane_id() == 0) p.out_rowptr[i] = count;
      const int64_t shift = begin < end ? p.rowptr[p.row[i]] - start[i] : 0;
      for (int64_t first = begin; first < end; first += kWarp) {
        const int64_t e = first + lane_id() + shift;
        const int32_t column = e < end + shift ? place[p.col[e]] : -1;
        const Lanes stays = ballot(kAllLanes, column >= 0);
        if (kWrites && column >= 0) {
          const int64_t to = count + count_bits(stays & ((Lanes{1} << lane_id()) - 1));
          out.entry[to] = e;
          out.col[to] = column;
        }
        count += count_bits(stays);
      }
    });
    if (lane_id() != 0) return;
    if (!kWrites) kept[k] = count;
    if (kWrites && k == num_shares - 1) p.out_rowptr[p.num_rows] = count;
  }
};

BadIndex bad_at(uint64_t position, const int64_t* values, const Queue& queue) {
  if (position == kNone) return {};
  BadIndex bad{.position = static_cast<int64_t>(position), .value = 0};
  copy_to_host(&bad.value, values + position, sizeof(bad.value), queue.stream);
  return bad;
}

}  // namespace

BadRestriction restrict_csr(const RestrictCsr& p, const MakeEntries& make_entries, const Queue& queue) {
  constexpr int64_t kMostShares = 1 << 13;  // as many warps as a large GPU runs at once
  auto* const place = scratch<int32_t>(queue, p.num_all_cols);
  auto* const start = scratch<int64_t>(queue, p.num_rows + 1);
  const int64_t num_shares = std::clamp<int64_t>(p.num_rows, 1, kMostShares);
  constexpr int64_t kWords = sizeof(Found) / sizeof(int64_t);
  auto* const kept = scratch<int64_t>(queue, num_shares + kWords);
  auto* const found = reinterpret_cast<Found*>(kept + num_shares);  // their sum comes first

  for_each(Clear{place, found, p.num_all_cols}, p.num_all_cols + 1, queue);
  for_each(Number{p, place, found}, p.num_cols, queue);
  for_each(CountEntries{p, start, found}, p.num_rows, queue);
  sum_before(start, p.num_rows, queue);
  const int64_t num_blocks = blocks_for(num_shares * kWarp, TakeEntries<false>::kThreads);
  launch(TakeEntries<false>{p, {}, place, start, kept, num_shares}, num_blocks, queue.stream);
  sum_before(kept, num_shares, queue);

  // The one wait: nobody else knows how long the outputs are.
  Found known;
  copy_to_host(&known, found, sizeof(known), queue.stream);
  if (known.bad_row != kNone || known.bad_column != kNone) {
    return {bad_at(known.bad_row, p.row, queue), bad_at(known.bad_column, p.column, queue)};
  }
  const RestrictedEntries out = make_entries(known.num_entries);
  launch(TakeEntries<true>{p, out, place, start, kept, num_shares}, num_blocks, queue.stream);
  transpose_csr({.rowptr = p.out_rowptr,
                 .col = out.col,
                 .num_rows = p.num_rows,
                 .num_cols = p.num_cols,
                 .num_entries = known.num_entries,
                 .out_rowptr = p.turned_rowptr,
                 .out_col = out.turned_col,
                 .out_entry = out.turned_entry},
                {}, queue);
  return {};
}

}  // namespace pyg_dist::gpu
