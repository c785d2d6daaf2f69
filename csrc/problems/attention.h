// Attention over the in-edges of each row of a CSR pattern: for row i, edge e from j = col[e] at storage place
// t = edge[e], and head h of num_heads,
//
//   additive   s = leaky(key[j, h] + query[i, h] + <edge_weight[i, h, :], edge_attr[t, :]>)
//   dynamic    s = <att[h, :], leaky(value[j, h, :] + query[i, h, :] + edge_attr[t, :] edge_weight[:, h, :])>
//   dot        s = scale (<key[j, h, :], query[i, h, :]> + <edge_weight[i, h, :], edge_attr[t, :]>)
//
//   lse[i, h] = log(sum over e of exp(s)), -infinity for a row without edges, and p = exp(s - lse), NaN if all s are
//                 -infinity; where rows are parts of their targets' edges p is 0 then: the other parts decide
//   k = 0 or dropout_scale: dropout of the edge with key edge_key[t], column h: formats/keyed.h
//   y[i, h, :] = sum over e of k p value[j, h, :]
//   z[i, h, :] = sum over e of k p edge_attr[t, :]                                                       (dot alone)
//
// leaky(u) = u > 0 ? u : slope u with slope >= 0. Heads have num_columns columns; edges num_edge_columns, or 0 where
// there are no edge_attr. Lse is all that is kept for the gradients, which compute s and p again: by target
// (query, att, edge_weight, edge_attr), and over the transposed pattern by source (key, value). With delta[i, h] =
// <grad_y[i, h], y[i, h]> + <grad_z[i, h], z[i, h]>:
//
//   ds = p (k (<grad_y[i, h], value[j, h]> + <grad_z[i, h], edge_attr[t]>) - delta[i, h])
#pragma once

#include <cstdint>

#include "formats/element.h"
#include "formats/portable.h"

namespace pyg_dist {

enum class AttentionForm : uint8_t { additive, dynamic, dot };

// Rows of x are x_stride elements apart. Source j of value and key, j >= num_near, is row j - num_near of far_value and
// far_key: what other ranks have sent lies apart from this rank's rows. A piece of a hub is a problem of one row whose
// inputs are row first_row, of targets or, in the transposed pattern, of sources; its output row is 0.
struct Attention {
  const int64_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [num_edges]
  const int32_t* edge;    // [num_edges]
  int64_t num_rows;
  int64_t num_edges;
  int64_t first_row;

  const void* value;
  const void* key;        // dynamic: null
  const void* query;      // additive: null for zeros
  const void* edge_attr;  // null without
  const void*
      edge_weight;  // additive, dot: element, one row or as many as queries (stride 0: one); dynamic: sums' type
  const void* att;  // [num_heads, num_columns] sums' type; dynamic alone
  int64_t value_stride, key_stride, query_stride, edge_attr_stride, edge_weight_stride;

  const void *far_value, *far_key;  // null: no source is far
  int64_t far_value_stride, far_key_stride;
  int64_t num_near;

  const int64_t* edge_key;  // null: no dropout
  uint64_t seed;
  uint32_t threshold;

  int64_t num_heads, num_columns, num_edge_columns;
  double slope, scale, dropout_scale;
  AttentionForm form;
  Element element;

  void* scratch;  // attention_scratch(*this) numbers of the sums' type, zeros at first
};

// Columns of a query, and of a key, per row.
PYG_DIST_PORTABLE int64_t logit_columns(const Attention& p) {
  return p.form == AttentionForm::additive ? p.num_heads : p.num_heads * p.num_columns;
}
PYG_DIST_PORTABLE int64_t key_columns(const Attention& p) {
  return p.form == AttentionForm::dynamic ? 0 : logit_columns(p);
}
PYG_DIST_PORTABLE int64_t edge_sum_columns(const Attention& p) { return p.num_heads * p.num_edge_columns; }

// Outputs are dense; `wide`: y and z (or the gradients) hold the sums' type, as lse does always.
struct AttentionForward {
  Attention attention;
  void* y;
  void* z;  // dot with edge_attr alone
  void* lse;
  bool is_part;  // whether rows are parts of their targets' edges
  bool wide;
};

struct AttentionGrad {
  Attention attention;
  const void* lse;  // [targets, num_heads] sums' type
  const void* delta;
  const void* grad_y;  // [targets, num_heads, num_columns] element, dense
  const void* grad_z;  // null: zeros
  // By target; the last three are null where nobody asks.
  void* by_query;        // as query
  void* by_edge_weight;  // additive, dot: [rows, num_heads, num_edge_columns]
  void* by_edge_attr;    // [storage, num_edge_columns], written at the places of these edges
  void*
      by_parameters;  // dynamic: [1 + num_edge_columns, num_heads, num_columns] sums' type, added to: att, edge_weight
  // By source.
  void* by_value;
  void* by_key;  // dynamic: null
  bool wide;
};

}  // namespace pyg_dist
