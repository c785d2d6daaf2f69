// What attention kernels and their callers agree on.
#pragma once

#include "problems/attention.h"

namespace pyg_dist {

constexpr int64_t kAttentionBatch = 32;  // edges whose logits are computed before their rows are added: 16 KiB of rows
constexpr int64_t kMaxHeads = 2048;      // of dropout: words for a batch of one edge

// How far apart the numbers of two edges lie: the next power of two, or whole vectors, so that vectors of several edges
// have a head in the same lanes. Static: a file of each level has its own, which the linker does not merge.
constexpr int64_t kMostLanes = 16;
static inline int64_t head_lanes(int64_t num_heads) {
  if (num_heads > kMostLanes) return (num_heads + kMostLanes - 1) / kMostLanes * kMostLanes;
  int64_t lanes = 1;
  while (lanes < num_heads) lanes *= 2;
  return lanes;
}

// Numbers of the sums' type: of a batch logits, weights, dropout factors, deltas and lse; one edge's columns; sums of a
// row; its largest logits and sums of powers.
inline int64_t attention_scratch(const Attention& p) {
  const int64_t row = p.num_heads * p.num_columns, lanes = head_lanes(p.num_heads);
  return 5 * lanes * kAttentionBatch + 3 * row + edge_sum_columns(p) + lanes + kMostLanes + p.num_heads;
}

}  // namespace pyg_dist
