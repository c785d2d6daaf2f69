// What follows a layer's linear map, as one pass over its rows:
//
//   n = (x - mean(x)) * rstd     layer norm, rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
//       x * rstd                 RMS norm, rstd = 1 / sqrt(mean(x^2) + eps)
//       x                        none
//   z = n * weight + bias
//   y = dropout(relu(z))         the mask of keyed_dropout; without a key only its factor 1 / (1 - p)
//
// The backward pass computes n, z and the mask again from x, mean and rstd: no other tensor is kept.
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "kernels/cpu/level.h"
#include "kernels/keyed.h"

namespace pyg_dist {

enum class RowNorm : uint8_t { none, layer, rms };

struct RowEpilogue {
  Keyed keyed;         // key is null if nothing is dropped; num_columns always holds
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
};

// grad_weight and grad_bias ([num_columns], accumulator type) are added to; scratch has num_columns of that type.
struct RowEpilogueGrad {
  RowEpilogue forward;
  const void* grad;
  void* grad_x;
  void* grad_weight;
  void* grad_bias;
  void* scratch;
};

PYG_DIST_AT_EVERY_LEVEL(void epilogue_rows(const RowEpilogue& problem, int64_t row_begin, int64_t row_end))
PYG_DIST_AT_EVERY_LEVEL(void epilogue_grad_rows(const RowEpilogueGrad& problem, int64_t row_begin, int64_t row_end))

}  // namespace pyg_dist
