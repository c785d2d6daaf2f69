// The largest or smallest value among the in-edges of each row, column by column, and its gradient; formats/extreme.h
// has the rules for ties and NaN.
//
//   extreme:  y[i, :] = max (or min) of x[col[e], :] over the edges e of row i, zero for a row without
//   shares:   s[i, :] = g[i, :] / ties of y[i, :] among the x[col[e], :], plus one where y is zero
//   grad:     d[j, :] = sum of s[col[e], :] [x[j, :] = y[col[e], :]] over the e of row j of the *transposed* pattern;
//             zero times infinity is NaN: where y is NaN no edge ties, and all get NaN
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

// x, y, g and d hold `element`, s its accumulator type. Rows of x are x_stride elements apart, and rows that `grad`
// gathers y_stride; all others are dense.
struct ExtremeCsr {
  const int64_t* rowptr;  // of the pattern; for `grad` of its transpose
  const int32_t* col;
  const void* x;
  const void* y;  // extreme: not read
  const void* g;  // shares: the gradient; grad: the shares; extreme: not read
  void* out;
  int64_t num_rows;
  int64_t num_edges;
  int64_t num_features;
  int64_t x_stride;
  int64_t y_stride;
  Element element;
  bool largest;
};

}  // namespace pyg_dist
