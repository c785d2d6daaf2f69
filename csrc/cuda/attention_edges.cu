// Attention's gradients that have a row per edge, or one for all edges: by edge_attr, and dynamic attention's by att
// and edge_weight.

#include "cuda/attention.cuh"
#include "cuda/kernels.h"

namespace pyg_dist::gpu {
namespace {

// A group of lanes for as many edges, all heads one after another; a slice has kColumns of an edge's columns.
template <class T, AttentionForm kForm>
struct EdgeGradients {
  static constexpr int kThreads = 256;
  static constexpr int kColumns = 4;
  using Shared = NoShared;
  using A = accumulator_t<T>;
  using Head = AttentionHead<T, kForm, 1>;

  AttentionGrad g;
  int log_lanes;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const Attention& p = g.attention;
    const int lanes = 1 << log_lanes, lane = thread_id() & (lanes - 1);
    const int64_t first = (block_id() * kThreads + thread_id()) >> log_lanes << log_lanes;
    const int64_t rest = first < p.num_edges ? p.num_edges - first : 0;
    const int count = rest < lanes ? static_cast<int>(rest) : lanes;
    const int64_t edge = first + (lane < count ? lane : 0);
    const int64_t row = count > 0 ? row_of_edge(p.rowptr, p.num_rows, edge) : 0;
    const int64_t column = block_slice() * kColumns;
    A sum[kColumns] = {};
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const Head head{p, h, log_lanes, false};
      const Ends own = count > 0 ? head.ends(row, edge) : Ends{};
      const typename Head::Gradient of_edge = head.gradient(g, own, count);
      if constexpr (kForm == AttentionForm::dynamic) {
        add_parts(head, own, count, column, of_edge.by_logit, sum);
      } else if (count > 0) {
        const T* const weight = head.edge_weight(own);
        const T* const by_z = static_cast<const T*>(g.grad_z) + (own.target * p.num_heads + h) * p.num_edge_columns;
        PYG_DIST_UNROLL
        for (int d = 0; d < kColumns; ++d) {
          if (column + d >= p.num_edge_columns) break;
          sum[d] += of_edge.by_logit * to_sum(weight[column + d]);
          if (g.grad_z != nullptr) sum[d] += of_edge.weight * to_sum(by_z[column + d]);
        }
      }
    }
    if (lane >= count) return;
    T* const to = static_cast<T*>(g.by_edge_attr) + p.edge[edge] * p.num_edge_columns;
    PYG_DIST_UNROLL
    for (int d = 0; d < kColumns; ++d) {
      if (column + d < p.num_edge_columns) to[column + d] = from_sum<T>(sum[d]);
    }
  }

 private:
  PYG_DIST_DEVICE void add_parts(const Head& head, const Ends& own, int count, int64_t column, A by_logit,
                                 A (&sum)[kColumns]) const {
    const Attention& p = g.attention;
    A part[kColumns] = {};
    head.sum_columns(own, count, part, [&](const Ends& e, int64_t c, A(&to)[kColumns]) {
      A by_u[1];
      head.by_ends(e, c, A{1}, by_u);
      const A* const weight = static_cast<const A*>(p.edge_weight) + head.first_column() + c;
      PYG_DIST_UNROLL
      for (int d = 0; d < kColumns; ++d) {
        if (column + d < p.num_edge_columns) to[d] += by_u[0] * weight[(column + d) * p.num_heads * p.num_columns];
      }
    });
    PYG_DIST_UNROLL
    for (int d = 0; d < kColumns; ++d) sum[d] += by_logit * part[d];
  }
};

// A group of lanes for each head of a share of the edges, whose sums go into scratch memory: kRows rows of the
// parameters' gradient, of which row 0 is att's and row 1 + d that of edge_weight's row d; slices have the others.
template <class T>
struct SumParameters {
  static constexpr int kThreads = 256;
  static constexpr int kRows = 4, kCount = 2;
  using Shared = NoShared;
  using A = accumulator_t<T>;
  using Head = AttentionHead<T, AttentionForm::dynamic, 1>;

  AttentionGrad g;
  HeadGroups groups;
  int64_t num_shares, share;  // edges of one
  A* sums;                    // [num_shares, 1 + num_edge_columns, num_heads, num_columns]

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const Attention& p = g.attention;
    const int64_t group = (block_id() * kThreads + thread_id()) >> groups.log_lanes;
    const int64_t slice = block_slice() % groups.num_slices, first_row = block_slice() / groups.num_slices * kRows;
    const int64_t k = groups.item(group), h = groups.head(group, slice);
    const bool has_work = k < num_shares && h < p.num_heads;
    const Head head{p, has_work ? h : 0, groups.log_lanes, false};
    const auto columns = groups.columns<1, kCount>(groups.column_slice(slice), head.lane(), p.num_columns);
    const int64_t begin = k * share;
    const int64_t size = !has_work ? 0 : begin + share < p.num_edges ? share : p.num_edges - begin;
    const int lanes = 1 << groups.log_lanes;
    A sum[kRows][kCount] = {};
    for (int64_t done = 0; done < share; done += lanes) {
      const int64_t first = begin + done, rest = done < size ? size - done : 0;
      const int count = rest < lanes ? static_cast<int>(rest) : lanes;
      const int64_t edge = first + (head.lane() < count ? head.lane() : 0);
      const Ends own = count > 0 ? head.ends(row_of_edge(p.rowptr, p.num_rows, edge), edge) : Ends{};
      const A by_logit = head.gradient(g, own, count).by_logit;
      for (int b = 0; any_of_warp(b < count); ++b) {
        const Ends e = head.ends_of(own, b);
        const A ds = head.of_lane(by_logit, b);
        if (b < count) add(head, e, ds, first_row, columns, sum);
      }
    }
    if (!has_work) return;
    A* const to = sums + (k * num_rows() * p.num_heads + h) * p.num_columns;
    PYG_DIST_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        if (first_row + r < num_rows() && columns.has(u)) {
          to[(first_row + r) * p.num_heads * p.num_columns + columns.at(u)] = sum[r][u];
        }
      }
    }
  }

  PYG_DIST_HOST_DEVICE int64_t num_rows() const { return 1 + g.attention.num_edge_columns; }

 private:
  PYG_DIST_DEVICE void add(const Head& head, const Ends& e, A ds, int64_t first_row,
                           const LaneColumns<1, kCount>& columns, A (&sum)[kRows][kCount]) const {
    const Attention& p = g.attention;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      A ends[1], att[1];
      head.add_ends(e, columns.at(u), ends);
      head.load_att(columns.at(u), att);
      const A slope = static_cast<A>(p.slope), by_u = att[0] * leaky_slope(ends[0], slope) * ds;
      PYG_DIST_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first_row + r;
        if (row == 0) {
          sum[r][u] += leaky(ends[0], slope) * ds;
        } else if (row < num_rows()) {
          sum[r][u] += by_u * to_sum(head.edge_attr(e)[row - 1]);
        }
      }
    }
  }
};

// The shares' sums, in their order.
template <class A>
struct AddShares {
  static constexpr int kThreads = 256;
  using Shared = NoShared;

  const A* sums;
  A* out;
  int64_t num_shares, count;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t i = block_id() * kThreads + thread_id();
    if (i >= count) return;
    A sum = 0;
    PYG_DIST_UNROLL_BY(4)
    for (int64_t k = 0; k < num_shares; ++k) sum += sums[k * count + i];
    out[i] += sum;
  }
};

}  // namespace

void attention_by_edge_attr(const AttentionGrad& g, const Queue& queue) {
  if (g.by_edge_attr == nullptr) return;
  for_attention(g.attention, [&]<class T, AttentionForm kForm>() {
    using Kernel = EdgeGradients<T, kForm>;
    const Attention& p = g.attention;
    const int log_lanes = HeadGroups(p, p.num_columns, 1, 1).log_lanes;
    launch(Kernel{g, log_lanes}, blocks_for(p.num_edges, Kernel::kThreads), queue.stream,
           blocks_for(p.num_edge_columns, Kernel::kColumns));
  });
}

void attention_by_parameters(const AttentionGrad& g, const Queue& queue) {
  if (g.by_parameters == nullptr) return;
  for_element(g.attention.element, [&]<class T>() {
    using Kernel = SumParameters<T>;
    using A = accumulator_t<T>;
    const Attention& p = g.attention;
    const HeadGroups groups(p, p.num_columns, 1, Kernel::kCount);
    // Many shares keep all lanes busy, few leave little to add up.
    constexpr int64_t kMostShares = 1024, kLeast = 64;
    const int64_t share = std::max(kLeast, blocks_for(p.num_edges, kMostShares));
    Kernel kernel{g, groups, blocks_for(p.num_edges, share), share, nullptr};
    const int64_t count = kernel.num_rows() * p.num_heads * p.num_columns;
    kernel.sums = scratch<A>(queue, kernel.num_shares * count);
    launch(kernel, blocks_for(kernel.num_shares * groups.lanes(), Kernel::kThreads), queue.stream,
           groups.num_slices * blocks_for(kernel.num_rows(), Kernel::kRows));
    launch(AddShares<A>{kernel.sums, static_cast<A*>(g.by_parameters), kernel.num_shares, count},
           blocks_for(count, AddShares<A>::kThreads), queue.stream);
  });
}

}  // namespace pyg_dist::gpu
