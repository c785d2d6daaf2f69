// What follows a layer's linear map, as one pass over its rows:
//
//   n = (x - mean(x)) * rstd     layer norm, rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
//       x * rstd                 RMS norm, rstd = 1 / sqrt(mean(x^2) + eps)
//       x                        none
//   z = n * weight + bias
//   y = dropout(relu(z))         the mask of keyed_dropout; without a key only its factor 1 / (1 - p)
//
// The backward pass computes n, z and the mask again from x, mean and rstd: no other tensor is kept.
//
// Where a row's columns lie on several ranks, its sums are put together between two passes, in both directions.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "problems/keyed.h"

namespace pyg_dist {

enum class RowNorm : uint8_t { none, layer, rms };

// Whether mean and rstd are made, or given, or all that is made: then there is no y, and in the place of rstd is
// mean((x - mean)^2), or mean(x^2).
enum class RowMoments : uint8_t { made, given, alone };

struct NormReLUDropout {
  Keyed keyed;         // key is null if nothing is dropped; num_rows and num_columns always hold
  const void* x;       // [num_rows, num_columns], dense, as y, grad and grad_x are
  const void* weight;  // [num_columns] accumulator type, or null for ones
  const void* bias;    // [num_columns] accumulator type, or null for zeros
  void* mean;          // [num_rows] accumulator type; null unless there is a layer norm
  void* rstd;          // [num_rows] accumulator type; null unless there is a norm
  void* y;
  double eps;
  double scale;  // 1 / (1 - p)
  uint32_t threshold;
  RowNorm norm;
  bool relu;
  Element element;
  RowMoments moments = RowMoments::made;
};

enum class RowGrad : uint8_t { whole, first, second };

// In two passes: the first one leaves the gradient by n in grad_x, and the sums of these columns in by_row; the second
// one takes the means over all columns from by_row, and grad_x's gradient by n, which it overwrites.
//
// Sums over rows are made by groups, group g being the rows [g num_rows / num_groups, (g + 1) num_rows / num_groups):
// their number alone decides the order of additions.
struct NormReLUDropoutGrad {
  NormReLUDropout forward;
  const void* grad;
  void* grad_x;
  void* sums;  // [num_groups, 3, num_columns] accumulator type, zeros: by weight, by bias (if there is one), scratch
  int64_t num_groups;
  RowGrad pass = RowGrad::whole;
  void* by_row = nullptr;  // [num_rows, 2] accumulator type, unless the pass is whole: of by_n, and of by_n n
};

}  // namespace pyg_dist
