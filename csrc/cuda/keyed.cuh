// Random words where they belong: formats/keyed.h.
#pragma once

#include "cuda/element.cuh"
#include "formats/keyed.h"
#include "problems/keyed.h"

namespace pyg_dist::gpu {

// A thread's part of a row: the columns of one counter, of which the row's first and last may lack some.
template <int kColumns>
struct CounterColumns {
  int64_t row;
  int64_t first;  // may lie before the row's first column
  int64_t end;    // of the row
  uint32_t block;

  PYG_DIST_DEVICE bool has(int k) const { return first + k >= 0 && first + k < end; }
  PYG_DIST_DEVICE bool is_whole() const { return first >= 0 && first + kColumns <= end; }
};

template <int kColumns>
PYG_DIST_HOST_DEVICE inline int64_t counters_of_row(const Keyed& keyed) {
  if (keyed.num_columns == 0) return 0;
  return (keyed.column_offset + keyed.num_columns - 1) / kColumns - keyed.column_offset / kColumns + 1;
}

template <int kColumns>
PYG_DIST_DEVICE CounterColumns<kColumns> columns_of_counter(const Keyed& keyed, int64_t row, int64_t k) {
  const int64_t block = keyed.column_offset / kColumns + k;
  return {row, block * kColumns - keyed.column_offset, keyed.num_columns, static_cast<uint32_t>(block)};
}

// The values of these columns, zeros where there are none; in one piece where `is_aligned` says that they can be.
template <class T, int kColumns>
PYG_DIST_DEVICE void load_columns(const T* row, const CounterColumns<kColumns>& columns, bool is_aligned,
                                  accumulator_t<T> (&values)[kColumns]) {
  if (is_aligned && columns.is_whole()) {
    load_values<T, kColumns>(row + columns.first, values);
    return;
  }
  PYG_DIST_UNROLL
  for (int k = 0; k < kColumns; ++k) values[k] = columns.has(k) ? to_sum(row[columns.first + k]) : accumulator_t<T>{0};
}

template <class T, int kColumns>
PYG_DIST_DEVICE void store_columns(T* row, const CounterColumns<kColumns>& columns, bool is_aligned,
                                   const accumulator_t<T> (&values)[kColumns]) {
  if (is_aligned && columns.is_whole()) {
    store_values<T, kColumns>(row + columns.first, values);
    return;
  }
  PYG_DIST_UNROLL
  for (int k = 0; k < kColumns; ++k) {
    if (columns.has(k)) row[columns.first + k] = from_sum<T>(values[k]);
  }
}

// Whether load_columns and store_columns may move whole counters' columns of dense rows.
template <class T, int kColumns>
bool are_aligned(const Keyed& keyed, const Alignment<T>& alignment) {
  constexpr uint64_t kBytes = kColumns * sizeof(T) < 16 ? kColumns * sizeof(T) : 16;
  return keyed.column_offset % kColumns == 0 && alignment.allows(kBytes);
}

}  // namespace pyg_dist::gpu
