// What attention kernels and their callers agree on.
#pragma once

#include "problems/attention.h"

namespace pyg_dist {

constexpr int64_t kAttentionBatch = 32;  // edges whose logits are computed before their rows are added: 16 KiB of rows
constexpr int64_t kMaxHeads = 2048;      // of dropout: words for a batch of one edge

// Numbers of the sums' type: of a batch logits, weights, dropout factors, means and slopes; one edge's columns; sums of
// a row.
inline int64_t attention_scratch(const Attention& p) {
  const int64_t row = p.num_heads * p.num_columns;
  return 5 * p.num_heads * kAttentionBatch + 3 * row + edge_sum_columns(p) + 2 * p.num_heads;
}

}  // namespace pyg_dist
