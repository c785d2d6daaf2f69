// What the kernels of attention share: a group of lanes that has one head of a batch of edges, an edge a lane.
// problems/attention.h has the formulas.
//
// Numbers of an edge (its logit, its dropout, their gradients) are those of its lane: additive ones it computes alone,
// dot products over columns the group computes together, edge after edge. Nothing of an edge is kept in memory.
//
// All lanes of a warp take every step together, those of groups that have no edges (count = 0, nothing is read), too:
// who takes part in a shuffle is then known, and need not be found out by each (MATCH.ANY).
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/row_reduction.cuh"
#include "formats/philox.h"
#include "problems/attention.h"

namespace pyg_dist::gpu {

PYG_DIST_DEVICE float exp_of(float x) { return expf(x); }
PYG_DIST_DEVICE double exp_of(double x) { return exp(x); }
PYG_DIST_DEVICE float log_of(float x) { return logf(x); }
PYG_DIST_DEVICE double log_of(double x) { return log(x); }

template <class A>
PYG_DIST_DEVICE A leaky(A u, A slope) {
  return u > 0 ? u : u * slope;
}
template <class A>
PYG_DIST_DEVICE A leaky_slope(A u, A slope) {
  return u > 0 ? A{1} : slope;
}

// The rows that an edge names, and its place in the storage.
struct Ends {
  int32_t target = 0, source = 0, place = 0;
};

// Rows that edges name: from number num_near on, those of `far`.
struct Sources {
  const void* near = nullptr;
  int64_t stride = 0;
  const void* far = nullptr;
  int64_t far_stride = 0;
  int32_t num_near = INT32_MAX;  // edges name no more

  static PYG_DIST_HOST_DEVICE int32_t named(int64_t num_rows) {
    return num_rows < INT32_MAX ? static_cast<int32_t>(num_rows) : INT32_MAX;
  }
  static PYG_DIST_HOST_DEVICE Sources of_values(const Attention& p) {
    return {p.value, p.value_stride, p.far_value, p.far_value_stride, named(p.num_near)};
  }
  static PYG_DIST_HOST_DEVICE Sources of_keys(const Attention& p) {
    return {p.key, p.key_stride, p.far_key, p.far_key_stride, named(p.num_near)};
  }
  PYG_DIST_DEVICE bool exist() const { return near != nullptr || far != nullptr; }
  template <class T>
  PYG_DIST_DEVICE const T* row(int32_t k) const {  // one product of what is chosen: two would need more registers
    const bool is_near = k < num_near;
    return static_cast<const T*>(is_near ? near : far) + (is_near ? k : k - num_near) * (is_near ? stride : far_stride);
  }
};

PYG_DIST_DEVICE bool any_of_warp(bool is_true) { return ballot(kAllLanes, is_true) != 0; }

template <class T, AttentionForm kForm, int kVec>
struct AttentionHead {
  using A = accumulator_t<T>;
  static constexpr bool kSumsColumns = kForm != AttentionForm::additive;  // to make a logit
  // Edges whose rows are on their way at once, as far as registers reach.
  static constexpr int kAhead = kForm == AttentionForm::dynamic ? 2 : 4;

  const Attention& p;
  const int64_t head;
  const int log_lanes;
  const bool by_source;  // rows of the pattern are sources, and col names targets

  PYG_DIST_DEVICE int lane() const { return lane_id() & ((1 << log_lanes) - 1); }
  PYG_DIST_DEVICE int64_t first_column() const { return head * p.num_columns; }

  // ---- Rows -------------------------------------------------------------------------------------------------------

  PYG_DIST_DEVICE const T* value(const Ends& e) const {
    return Sources::of_values(p).template row<T>(e.source) + first_column();
  }
  PYG_DIST_DEVICE const T* key(const Ends& e) const {
    return Sources::of_keys(p).template row<T>(e.source) + (kSumsColumns ? first_column() : head);
  }
  PYG_DIST_DEVICE const T* query(const Ends& e) const {
    return static_cast<const T*>(p.query) + e.target * p.query_stride + (kSumsColumns ? first_column() : head);
  }
  PYG_DIST_DEVICE const T* edge_attr(const Ends& e) const {
    return static_cast<const T*>(p.edge_attr) + e.place * p.edge_attr_stride;
  }
  // additive, dot: of this head.
  PYG_DIST_DEVICE const T* edge_weight(const Ends& e) const {
    return static_cast<const T*>(p.edge_weight) + e.target * p.edge_weight_stride + head * p.num_edge_columns;
  }

  // ---- Edges ------------------------------------------------------------------------------------------------------

  PYG_DIST_DEVICE Ends ends(int64_t row, int64_t edge) const {
    const auto own = static_cast<int32_t>(row);
    const int32_t other = p.col[edge];
    const bool needs_place = p.edge_key != nullptr || p.num_edge_columns > 0;
    return {by_source ? other : own, by_source ? own : other, needs_place ? p.edge[edge] : 0};
  }

  // Of lane b of each group.
  template <class N>
  PYG_DIST_DEVICE N of_lane(N number, int b) const {
    return shuffle(kAllLanes, number, (lane_id() & ~((1 << log_lanes) - 1)) + b);
  }
  PYG_DIST_DEVICE Ends ends_of(const Ends& own, int b) const {
    return {of_lane(own.target, b), of_lane(own.source, b), of_lane(own.place, b)};
  }

  // The factor of an edge: zero, or what dropout scales by.
  PYG_DIST_DEVICE A kept(const Ends& e) const {
    if (p.edge_key == nullptr) return A{1};
    const Words words = philox(p.seed, static_cast<uint64_t>(p.edge_key[e.place]), static_cast<uint32_t>(head / 4),
                               pyg_dist::Stream::dropout);
    const uint32_t pair[] = {head & 1 ? words.word[1] : words.word[0], head & 1 ? words.word[3] : words.word[2]};
    return (head & 2 ? pair[1] : pair[0]) >= p.threshold ? static_cast<A>(p.dropout_scale) : A{0};
  }

  // Calls f(edge's ends, column, sums) for vectors of the head's columns, and gives each lane the sums of its edge.
  template <int kSums, class F>
  PYG_DIST_DEVICE void sum_columns(const Ends& own, int count, A (&sums)[kSums], const F& f) const {
    constexpr int kEdges = kSums > 1 && kSumsColumns ? 2 : kAhead;
    for (int b = 0; any_of_warp(b < count); b += kEdges) {
      Ends e[kEdges];
      A part[kEdges][kSums] = {};
      PYG_DIST_UNROLL
      for (int k = 0; k < kEdges; ++k) e[k] = ends_of(own, b + k < count ? b + k : 0);
      for (int64_t c = lane() * kVec; b < count && c < p.num_columns; c += int64_t{kVec} << log_lanes) {
        PYG_DIST_UNROLL
        for (int k = 0; k < kEdges; ++k) f(e[k], c, part[k]);
      }
      PYG_DIST_UNROLL
      for (int k = 0; k < kEdges; ++k) {
        PYG_DIST_UNROLL
        for (int s = 0; s < kSums; ++s) {
          const A sum = sum_lanes(part[k][s], log_lanes, kAllLanes);
          if (lane() == b + k) sums[s] = sum;
        }
      }
    }
  }

  PYG_DIST_DEVICE A edge_dot(const T* weight, const Ends& e) const {
    const T* const attr = edge_attr(e);
    A sum = 0;
    for (int64_t d = 0; d < p.num_edge_columns; ++d) sum += to_sum(weight[d]) * to_sum(attr[d]);
    return sum;
  }

  // ---- Logits -----------------------------------------------------------------------------------------------------

  // dynamic: u = value + query (+ edge), what the leaky ReLU is taken of.
  PYG_DIST_DEVICE void add_ends(const Ends& e, int64_t c, A (&u)[kVec]) const {
    A q[kVec];
    load_values<T, kVec>(value(e) + c, u);
    load_values<T, kVec>(query(e) + c, q);
    PYG_DIST_UNROLL
    for (int v = 0; v < kVec; ++v) u[v] += q[v];
    if (p.num_edge_columns == 0) return;
    const T* const attr = edge_attr(e);
    const A* weight = static_cast<const A*>(p.edge_weight) + first_column() + c;
    for (int64_t d = 0; d < p.num_edge_columns; ++d) {
      const A factor = to_sum(attr[d]);
      A w[kVec];
      load_values<A, kVec>(weight, w);
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) u[v] += factor * w[v];
      weight += p.num_heads * p.num_columns;
    }
  }
  PYG_DIST_DEVICE void load_att(int64_t c, A (&att)[kVec]) const {
    load_values<A, kVec>(static_cast<const A*>(p.att) + first_column() + c, att);
  }

  // What a vector of columns adds to the sum that a logit is made of.
  PYG_DIST_DEVICE A logit_part(const Ends& e, int64_t c) const {
    A a[kVec], b[kVec], sum = 0;
    if constexpr (kForm == AttentionForm::dot) {
      load_values<T, kVec>(key(e) + c, a);
      load_values<T, kVec>(query(e) + c, b);
    } else {
      load_att(c, a);
      add_ends(e, c, b);
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) b[v] = leaky(b[v], static_cast<A>(p.slope));
    }
    PYG_DIST_UNROLL
    for (int v = 0; v < kVec; ++v) sum += a[v] * b[v];
    return sum;
  }
  // The logit of an edge of which `sum` is that sum; additive: needs none.
  PYG_DIST_DEVICE A logit_from(const Ends& e, A sum) const {
    if constexpr (kForm == AttentionForm::dynamic) return sum;
    if constexpr (kForm == AttentionForm::additive) {
      sum = to_sum(*key(e));
      if (p.query != nullptr) sum += to_sum(*query(e));
    }
    if (p.num_edge_columns > 0) sum += edge_dot(edge_weight(e), e);
    if constexpr (kForm == AttentionForm::additive) return leaky(sum, static_cast<A>(p.slope));
    return sum * static_cast<A>(p.scale);
  }

  // Of this lane's edge, one of `count` that the group has; what lanes without one get says nothing.
  PYG_DIST_DEVICE A logit(const Ends& own, int count) const {
    A sum[1] = {};
    if constexpr (kSumsColumns) {
      sum_columns(own, count, sum, [&](const Ends& e, int64_t c, A(&to)[1]) { to[0] += logit_part(e, c); });
    }
    return count > 0 ? logit_from(own, sum[0]) : A{0};
  }

  // Of this lane's edge alike: the gradient by its logit (additive: before the leaky ReLU; dot: before the scale), and
  // the weight of its row in the sum.
  struct Gradient {
    A by_logit, weight;
  };
  PYG_DIST_DEVICE Gradient gradient(const AttentionGrad& g, const Ends& own, int count) const {
    const auto* const grad_y = static_cast<const T*>(g.grad_y);
    A sums[2] = {};  // <grad_y, value>, and what a logit is made of
    sum_columns(own, count, sums, [&](const Ends& e, int64_t c, A(&to)[2]) {
      A x[kVec], y[kVec];
      load_values<T, kVec>(value(e) + c, x);
      load_values<T, kVec>(grad_y + (e.target * p.num_heads + head) * p.num_columns + c, y);
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) to[0] += x[v] * y[v];
      if constexpr (kSumsColumns) to[1] += logit_part(e, c);
    });
    if (count == 0) return {};
    const int64_t of_head = own.target * p.num_heads + head;
    if (g.grad_z != nullptr) {
      sums[0] += edge_dot(static_cast<const T*>(g.grad_z) + of_head * p.num_edge_columns, own);
    }
    const A s = logit_from(own, sums[1]), keep = kept(own);
    const A probability = exp_of(s - static_cast<const A*>(g.lse)[of_head]);
    A by_logit = probability * (keep * sums[0] - static_cast<const A*>(g.delta)[of_head]);
    if constexpr (kForm == AttentionForm::additive) by_logit *= leaky_slope(s, static_cast<A>(p.slope));
    if constexpr (kForm == AttentionForm::dot) by_logit *= static_cast<A>(p.scale);
    return {by_logit, keep * probability};
  }

  // dynamic: the gradient by u where the one by the logit is ds.
  PYG_DIST_DEVICE void by_ends(const Ends& e, int64_t c, A ds, A (&by_u)[kVec]) const {
    A att[kVec];
    load_att(c, att);
    add_ends(e, c, by_u);
    PYG_DIST_UNROLL
    for (int v = 0; v < kVec; ++v) by_u[v] = att[v] * leaky_slope(by_u[v], static_cast<A>(p.slope)) * ds;
  }
};

// How heads share lanes: groups of one item of work side by side, a head each, as many as have 512 bytes of a row;
// other heads, and columns that a group has no room for, are other slices of the grid.
struct HeadGroups {
  int log_lanes;
  int64_t heads, num_column_slices, num_slices;

  // For sums of `width` columns a head, `of_lane` of them a lane.
  HeadGroups(const Attention& p, int64_t width, int vec, int of_lane) {
    constexpr int kLeastLogLanes = 3;  // so that as many edges' exponentials are taken at once
    constexpr int64_t kBytes = 512;
    log_lanes = std::max(log_lanes_for(std::max(width, p.num_columns), vec), kLeastLogLanes);
    heads = std::clamp<int64_t>(kBytes / std::max<int64_t>(p.num_columns * bytes_of(p.element), 1), 1, p.num_heads);
    const int64_t columns = int64_t{of_lane} << log_lanes;
    num_column_slices = std::max<int64_t>(blocks_for(width, columns), 1);
    num_slices = blocks_for(p.num_heads, heads) * num_column_slices;
  }

  int64_t lanes() const { return heads << log_lanes; }

  PYG_DIST_DEVICE int64_t item(int64_t group) const { return group / heads; }
  PYG_DIST_DEVICE int64_t head(int64_t group, int64_t slice) const {
    return slice / num_column_slices * heads + group % heads;
  }
  PYG_DIST_DEVICE int64_t column_slice(int64_t slice) const { return slice % num_column_slices; }
  template <int kVec, int kCount>
  PYG_DIST_DEVICE LaneColumns<kVec, kCount> columns(int64_t column_slice, int lane, int64_t width) const {
    const int64_t step = int64_t{kVec} << log_lanes;
    return {column_slice * step * kCount + lane * kVec, step, width};
  }
};

// Calls f.operator()<T, form>().
template <class F>
void for_attention(const Attention& p, const F& f) {
  for_element(p.element, [&]<class T>() {
    switch (p.form) {
      case AttentionForm::additive:
        return f.template operator()<T, AttentionForm::additive>();
      case AttentionForm::dynamic:
        return f.template operator()<T, AttentionForm::dynamic>();
      case AttentionForm::dot:
        return f.template operator()<T, AttentionForm::dot>();
    }
  });
}

}  // namespace pyg_dist::gpu
