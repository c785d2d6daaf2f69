// Equal shares of the work on a CSR matrix, for rows of any length.
//
// Row i takes 1 + degree(i) units of work, and chunk k is the units [k * chunk_work, (k + 1) * chunk_work) of them all
// laid end to end (the "merge path" of Merrill and Garland, SC 2016). A row belongs to the chunk in which it starts,
// except that a hub, a row longer than chunk_work, is cut at the chunk boundaries into pieces. Chunks depend on the
// matrix and on chunk_work alone, never on the number of threads, and finding one costs two binary searches.
#pragma once

#include <cstdint>

#include "formats/portable.h"

namespace pyg_dist {

// The row that has an edge: the last one that starts at or before it.
PYG_DIST_PORTABLE int64_t row_of_edge(const int64_t* rowptr, int64_t num_rows, int64_t edge) {
  int64_t low = 0, high = num_rows;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (rowptr[middle] <= edge) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

class RowChunks {
 public:
  struct Piece {  // of a hub: its edges [edge_begin, edge_end); no piece if row < 0
    int64_t row = -1;
    int64_t edge_begin = 0;
    int64_t edge_end = 0;
  };
  struct Chunk {
    Piece head;         // the end, or the middle, of a hub that started in an earlier chunk
    int64_t row_begin;  // the rows that are here from start to end
    int64_t row_end;
    Piece tail;  // the start of a hub that goes on in the next chunk
  };

  PYG_DIST_PORTABLE RowChunks(const int64_t* rowptr, int64_t num_rows, int64_t chunk_work)
      : rowptr_(rowptr), num_rows_(num_rows), chunk_work_(chunk_work) {}

  PYG_DIST_PORTABLE int64_t size() const { return (position(num_rows_) + chunk_work_ - 1) / chunk_work_; }

  PYG_DIST_PORTABLE Chunk operator[](int64_t k) const {
    Chunk chunk;
    chunk.row_begin = first_row(k);
    chunk.row_end = first_row(k + 1);
    if (chunk.row_begin > 0 && last_chunk(chunk.row_begin - 1) >= k) chunk.head = piece(chunk.row_begin - 1, k);
    if (chunk.row_end > chunk.row_begin) chunk.tail = piece(chunk.row_end - 1, k);
    if (chunk.tail.row >= 0) --chunk.row_end;
    return chunk;
  }

  // The first row that starts in chunk k or behind it.
  PYG_DIST_PORTABLE int64_t first_row(int64_t k) const { return first_row_from(k * chunk_work_); }

  // Whether a row starts before chunk k.
  PYG_DIST_PORTABLE bool starts_before(int64_t row, int64_t k) const { return position(row) < k * chunk_work_; }

  PYG_DIST_PORTABLE int64_t num_rows() const { return num_rows_; }
  PYG_DIST_PORTABLE int64_t edge_begin(int64_t row) const { return rowptr_[row]; }

  // Whether a row is cut, the last chunk that it reaches, and its edges in chunk k: no piece if it is not cut.
  PYG_DIST_PORTABLE bool is_hub(int64_t row) const { return rowptr_[row + 1] - rowptr_[row] > chunk_work_; }
  PYG_DIST_PORTABLE int64_t last_chunk(int64_t row) const { return (position(row + 1) - 1) / chunk_work_; }
  PYG_DIST_PORTABLE Piece piece(int64_t row, int64_t k) const {
    if (!is_hub(row)) return {};
    const int64_t first = rowptr_[row], last = rowptr_[row + 1];
    const int64_t begin = k * chunk_work_ - row - 1;  // the row itself is one unit, then come its edges
    return {row, clamp(begin, first, last), clamp(begin + chunk_work_, first, last)};
  }

 private:
  PYG_DIST_PORTABLE int64_t position(int64_t row) const { return rowptr_[row] + row; }

  PYG_DIST_PORTABLE int64_t first_row_from(int64_t work) const {
    int64_t low = 0, high = num_rows_;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (position(middle) < work) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  static PYG_DIST_PORTABLE int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  }

  const int64_t* rowptr_;
  int64_t num_rows_;
  int64_t chunk_work_;
};

}  // namespace pyg_dist
