// Equal shares of the work on a CSR matrix, for rows of any length.
//
// Row i takes 1 + degree(i) units of work, and chunk k is the units [k * chunk_work, (k + 1) * chunk_work) of them all
// laid end to end (the "merge path" of Merrill and Garland, SC 2016). A row belongs to the chunk in which it starts,
// except that a hub, a row longer than chunk_work, is cut at the chunk boundaries into pieces. Chunks depend on the
// matrix and on chunk_work alone, never on the number of threads, and finding one costs two binary searches.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pyg_dist {

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

  RowChunks(const int64_t* rowptr, int64_t num_rows, int64_t chunk_work)
      : rowptr_(rowptr), num_rows_(num_rows), chunk_work_(chunk_work) {}

  int64_t size() const { return (position(num_rows_) + chunk_work_ - 1) / chunk_work_; }

  Chunk operator[](int64_t k) const {
    const int64_t begin = k * chunk_work_, end = begin + chunk_work_;
    Chunk chunk;
    chunk.row_begin = first_row_from(begin);
    chunk.row_end = first_row_from(end);
    if (chunk.row_begin > 0 && position(chunk.row_begin) > begin) chunk.head = piece(chunk.row_begin - 1, begin, end);
    if (chunk.row_end > chunk.row_begin) chunk.tail = piece(chunk.row_end - 1, begin, end);
    if (chunk.tail.row >= 0) --chunk.row_end;
    return chunk;
  }

 private:
  int64_t position(int64_t row) const { return rowptr_[row] + row; }

  int64_t first_row_from(int64_t work) const {
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

  // The edges of `row` among the units [begin, end) if it is a hub.
  Piece piece(int64_t row, int64_t begin, int64_t end) const {
    const int64_t first = rowptr_[row], last = rowptr_[row + 1];
    if (last - first <= chunk_work_) return {};
    const int64_t edge_at_zero = first - position(row) - 1;  // the row itself is one unit, then come its edges
    return {row, std::clamp(begin + edge_at_zero, first, last), std::clamp(end + edge_at_zero, first, last)};
  }

  const int64_t* rowptr_;
  int64_t num_rows_;
  int64_t chunk_work_;
};

}  // namespace pyg_dist
