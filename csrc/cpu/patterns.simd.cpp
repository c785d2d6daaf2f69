// Of each instruction set for its count of bits and its shifts alone: entries go one by one.
#include "cpu/patterns.h"

#include "cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {

int64_t filter_rows(const FilterRows& f, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 8;  // rows lie far apart: the bounds of one and the columns of another are on their way
  constexpr int64_t kPerLine = 16, kAheadInRow = 4 * kPerLine;  // what is further in a row, the processor foresees
  const int64_t* const rowptr = f.of.rowptr;                    // copies, which no store can change
  const int64_t* const row = f.of.row;
  const int32_t* const col = f.of.col;
  const ColumnBits columns = f.columns;
  int64_t* const entry = f.entry;
  int32_t* const found = f.col;
  int64_t kept = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (i + 2 * kAhead < end) __builtin_prefetch(rowptr + row[i + 2 * kAhead]);
    if (i + kAhead < end) {
      const int64_t first = rowptr[row[i + kAhead]], last = rowptr[row[i + kAhead] + 1];
      for (int64_t e = first; e < last && e < first + kAheadInRow; e += kPerLine) __builtin_prefetch(col + e);
    }
    const int64_t before = kept, last = rowptr[row[i] + 1];
    for (int64_t e = rowptr[row[i]]; e < last; ++e) {
      const int32_t c = col[e];
      entry[kept] = e;  // no branch, which samples would mislead
      found[kept] = c;
      kept += columns.has(c);
    }
    f.of.out_rowptr[i + 1] = kept - before;
  }
  return kept;
}

void remap_entries(const RemapEntries& r, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) r.out[k] = r.columns.place(r.col[k]);
}

void find_in_windows(const FindInWindows& f, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    int64_t number = -1;
    for (std::size_t w = 0; w < f.num_windows; ++w) {
      const IdWindow& window = f.window[w];
      const uint64_t bit = static_cast<uint64_t>(f.value[k]) - static_cast<uint64_t>(window.least);
      if (bit >= window.span || !window.bits.has(static_cast<int32_t>(bit))) continue;
      const int32_t place = window.bits.place(static_cast<int32_t>(bit));
      number = window.number == nullptr ? window.first + place : window.number[place];
      break;
    }
    f.number[k] = number;
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
