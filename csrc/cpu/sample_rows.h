// Some entries of rows, drawn uniformly: a function of (seed, the row's key) alone. Plans are made on the host, so that
// no other device has this.
#pragma once

#include <cstdint>

#include "problems/bad_index.h"
#include "problems/csr_from_edges.h"

namespace pyg_dist {

// Of row[i], `count` of its d entries, ascending: without replacement all of them where d <= count, else by Floyd's
// algorithm (Bentley and Floyd, "A sample of brilliance", 1987): for j = d - count .. d - 1 take x = below(j + 1), or j
// where x is taken already. With replacement `count` times x = below(d). Negative: all.
//
// below(n) = floor(n word / 2^64), a word after the other of SplitMix64, which begins at
// combine(combine(0, seed), key[i]): formats/permutation.h. tests/reference_ops.py mirrors it.
struct SampleRows {
  const int64_t* rowptr;  // [num_all_rows + 1]
  const int32_t* col;     // [num_entries]
  Integers place;         // [num_entries], or null: place[k] = k
  const int64_t* row;     // [num_rows], in [0, num_all_rows)
  const int64_t* key;     // [num_rows]
  int64_t num_all_rows;
  int64_t num_entries;
  int64_t num_rows;
  int64_t count;
  bool replace;
  uint64_t seed;
  int64_t* out_rowptr;  // [num_rows + 1]
};

// Fills out_rowptr; returns the first row that is none, or whose bounds fall or lie outside.
BadIndex count_sampled(const SampleRows& p);

// The columns and places of the entries drawn, [out_rowptr[i], out_rowptr[i + 1]) for i in [begin, end).
void sample_rows(const SampleRows& p, int32_t* out_col, int64_t* out_place, int64_t begin, int64_t end);

}  // namespace pyg_dist
