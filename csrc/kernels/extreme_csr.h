// The largest or smallest value among the in-edges of each row, column by column, and its gradient.
//
//   extreme:  y[i, :] = max (or min) of x[col[e], :] over the edges e of row i, zero for a row without; a NaN wins
//   shares:   s[i, :] = g[i, :] / number of edges e of row i with x[col[e], :] = y[i, :]; where y is zero, plus one
//   grad:     d[j, :] = sum of s[col[e], :] [x[j, :] = y[col[e], :]] over the e of row j of the *transposed* pattern;
//             zero times infinity is NaN: where y is NaN no edge ties, and all get NaN
//
// The "plus one" is torch's: its scatter_reduce counts the zeros that it starts from among the ties, though they get no
// gradient.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "kernels/cpu/level.h"

namespace pyg_dist {

// x, y, g and d hold `element`, s its accumulator type. Rows of x are x_stride elements apart, and rows that `grad`
// gathers y_stride; all others are dense.
struct ExtremeCsr {
  const int64_t* rowptr;  // of the pattern; for `grad` of its transpose
  const int32_t* col;
  const void* x;
  const void* y;  // extreme: not read
  const void* g;  // shares: the gradient; grad: the shares
  void* out;
  int64_t num_edges;
  int64_t num_features;
  int64_t x_stride;
  int64_t y_stride;
  Element element;
  bool largest;
};

PYG_DIST_AT_EVERY_LEVEL(void extreme_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end))
PYG_DIST_AT_EVERY_LEVEL(void extreme_share_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end))
PYG_DIST_AT_EVERY_LEVEL(void extreme_grad_rows(const ExtremeCsr& problem, int64_t row_begin, int64_t row_end))

}  // namespace pyg_dist
