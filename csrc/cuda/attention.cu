// Attention's sums by row, forward and backward. Chunks of edges as in row_reduction.cuh:
//
//   ReduceHeads  a group of lanes for each chunk and head: its rows one after another, batches of edges in each
//   JoinHeads    a lane for each hub and column: its pieces in their order
//
// What has a row per edge, or one for all, is attention_edges.cu's.

#include "cuda/attention.cuh"
#include "cuda/kernels.h"
#include "cuda/row_reduction.cuh"

namespace pyg_dist::gpu {
namespace {

// Rows that edges name, to be weighed and added up; those of each head `head_step` apart.
struct Summed {
  Sources rows;  // null: none
  int64_t head_step = 0, width = 0;
  bool by_place = false;  // edge attributes, else what col names
  bool by_logit = false;  // weighed by the logits' gradients
};

struct Sums {
  void* rows = nullptr;    // [num_rows, num_heads, width], null where `Summed` is null
  void* second = nullptr;  // forward: lse, the sums' type, or null; gradients: sums of the logits' gradients, or null
  bool is_part = false;    // forward: rows are parts of their targets' edges
};

struct HeadChunks {
  RowChunks chunks;
  int64_t* hubs;  // [num_chunks]: the one that starts in each chunk, or -1
  int64_t num_chunks;
};

// What is kept of a softmax over some edges: y = sum / total, lse = largest + log(total). Two numbers a head behind a
// piece's columns; of gradients the first alone, a sum.
template <class A>
struct Softmax {
  A largest, total;

  static PYG_DIST_DEVICE Softmax none() { return {-static_cast<A>(__builtin_inf()), A{0}}; }
  static PYG_DIST_DEVICE A larger(A a, A b) { return a > b || a != a ? a : b; }  // NaN if either is

  // Goes on with logits up to `most`; the factor of what is there.
  PYG_DIST_DEVICE A rise(A most) {
    const A before = largest;
    largest = larger(before, most);
    const A factor = total == 0 ? A{0} : largest == before ? A{1} : exp_of(before - largest);
    total *= factor;
    return factor;
  }
  // What powers are made of: of -infinities alone they are zero, not NaN.
  PYG_DIST_DEVICE A base() const { return largest == -static_cast<A>(__builtin_inf()) ? A{0} : largest; }
  PYG_DIST_DEVICE A lse() const { return total == 0 ? largest : largest + log_of(total); }
  // What the sum is divided by.
  PYG_DIST_DEVICE A divisor(bool may_be_zero) const { return may_be_zero && total == 0 ? A{1} : total; }
};

// The pieces of hubs: [2 num_chunks, num_heads (width + 2)], of each head the columns, and behind all heads' columns
// the two numbers of each.
template <class A>
struct HeadPieces {
  A* data;
  int64_t num_heads, width;

  PYG_DIST_HOST_DEVICE int64_t size() const { return num_heads * (width + 2); }
  PYG_DIST_DEVICE A* columns(int64_t slot, int64_t head) const { return data + slot * size() + head * width; }
  PYG_DIST_DEVICE A* numbers(int64_t slot, int64_t head) const {
    return data + slot * size() + num_heads * width + 2 * head;
  }
};

template <class T, AttentionForm kForm, int kVec, int kCount, bool kForward>
struct ReduceHeads {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;
  using Head = AttentionHead<T, kForm, kVec>;
  using Columns = LaneColumns<kVec, kCount>;
  using Values = A (&)[kCount][kVec];
  static constexpr int kAhead = Head::kAhead;

  AttentionGrad g;  // forward: its attention alone
  Summed summed;
  Sums out;
  HeadChunks chunks;
  HeadPieces<A> pieces;
  HeadGroups groups;
  bool by_source;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t group = (block_id() * kThreads + thread_id()) >> groups.log_lanes;
    const int64_t k = groups.item(group), head = groups.head(group, block_slice());
    const bool has_work = k < chunks.num_chunks && head < g.attention.num_heads;
    const Head edges{g.attention, has_work ? head : 0, groups.log_lanes, by_source};
    const int64_t slice = groups.column_slice(block_slice()), lanes = int64_t{1} << groups.log_lanes;
    const Columns columns = groups.columns<kVec, kCount>(slice, edges.lane(), summed.width);
    const bool has_numbers = slice == 0 && edges.lane() == 0;
    ChunkRows rows(chunks.chunks, has_work ? k : chunks.num_chunks);
    A sum[kCount][kVec] = {};
    Softmax<A> state = kForward ? Softmax<A>::none() : Softmax<A>{};
    for (int64_t first = rows.begin; any_of_warp(rows.has_row());) {
      const int64_t rest = rows.has_row() ? rows.end - first : 0;
      const int count = static_cast<int>(rest < lanes ? rest : lanes);
      const Ends own = count > 0 ? edges.ends(rows.row, first + (edges.lane() < count ? edges.lane() : 0)) : Ends{};
      if constexpr (kForward) {
        add_softmax(edges, own, count, columns, state, sum);
      } else {
        add_gradients(edges, own, count, columns, state, sum);
      }
      first += lanes;
      const bool is_done = rows.has_row() && first >= rows.end;
      if (!kForward && out.second != nullptr && any_of_warp(is_done)) {
        const A all = sum_lanes(state.largest, groups.log_lanes, kAllLanes);
        if (is_done) state.largest = all;
      }
      if (!is_done) continue;
      if (rows.slot >= 0) {
        save(rows.slot, head, columns, has_numbers, state, sum);
      } else {
        finish(rows.row, head, columns, has_numbers, rows.begin == rows.end, state, sum);
      }
      PYG_DIST_UNROLL
      for (int u = 0; u < kCount; ++u) {
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) sum[u][v] = A{0};
      }
      state = kForward ? Softmax<A>::none() : Softmax<A>{};
      rows.advance();
      first = rows.begin;
    }
    if (has_work && has_numbers && head == 0) chunks.hubs[k] = rows.hub();
  }

 private:
  PYG_DIST_DEVICE void add_softmax(const Head& edges, const Ends& own, int count, const Columns& columns,
                                   Softmax<A>& state, Values sum) const {
    A logit = edges.logit(own, count);
    if (edges.lane() >= count) logit = -static_cast<A>(__builtin_inf());
    const A factor = state.rise(join_lanes(logit, groups.log_lanes, kAllLanes, Softmax<A>::larger));
    const A power = edges.lane() < count ? exp_of(logit - state.base()) : A{0};
    state.total += sum_lanes(power, groups.log_lanes, kAllLanes);
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) sum[u][v] *= factor;
    }
    add_rows(edges, own, count, count > 0 ? power * edges.kept(own) : A{0}, columns, sum);
  }

  PYG_DIST_DEVICE void add_gradients(const Head& edges, const Ends& own, int count, const Columns& columns,
                                     Softmax<A>& state, Values sum) const {
    const typename Head::Gradient of_edge = edges.gradient(g, own, count);
    if (edges.lane() < count) state.largest += of_edge.by_logit;
    if (summed.rows.exist()) {
      add_rows(edges, own, count, summed.by_logit ? of_edge.by_logit : of_edge.weight, columns, sum);
    }
    if constexpr (kForm == AttentionForm::dynamic) {
      for (int b = 0; any_of_warp(b < count); ++b) {
        const Ends e = edges.ends_of(own, b);
        const A ds = edges.of_lane(of_edge.by_logit, b);
        PYG_DIST_UNROLL
        for (int u = 0; u < kCount; ++u) {
          if (b >= count || !columns.has(u)) continue;
          A by_u[kVec];
          edges.by_ends(e, columns.at(u), ds, by_u);
          PYG_DIST_UNROLL
          for (int v = 0; v < kVec; ++v) sum[u][v] += by_u[v];
        }
      }
    }
  }

  // Weighs the rows that the batch's edges name, and adds them; `weight` is that of this lane's edge.
  PYG_DIST_DEVICE void add_rows(const Head& edges, const Ends& own, int count, A weight, const Columns& columns,
                                Values sum) const {
    // Each lane finds its edge's row once; others take the address.
    const int32_t number = summed.by_place ? own.place : by_source ? own.target : own.source;
    const auto own_row = reinterpret_cast<uint64_t>(summed.rows.row<T>(number) + edges.head * summed.head_step);
    for (int b = 0; any_of_warp(b < count); b += kAhead) {
      Pack<T, kVec> pack[kAhead][kCount];
      A factor[kAhead];
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const bool is_edge = b + k < count;
        const int from = is_edge ? b + k : 0;
        const auto* const row = reinterpret_cast<const T*>(edges.of_lane(own_row, from));
        factor[k] = edges.of_lane(weight, from);
        PYG_DIST_UNROLL
        for (int u = 0; u < kCount; ++u) {
          pack[k][u] = is_edge && columns.has(u) ? load<kVec>(row + columns.at(u)) : Pack<T, kVec>{};
        }
      }
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (b + k >= count) break;
        PYG_DIST_UNROLL
        for (int u = 0; u < kCount; ++u) {
          PYG_DIST_UNROLL
          for (int v = 0; v < kVec; ++v) sum[u][v] += factor[k] * to_sum(pack[k][u].value[v]);
        }
      }
    }
  }

  PYG_DIST_DEVICE void save(int64_t slot, int64_t head, const Columns& columns, bool has_numbers,
                            const Softmax<A>& state, Values sum) const {
    A* const to = pieces.columns(slot, head);
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) to[columns.at(u) + v] = sum[u][v];
    }
    if (!has_numbers) return;
    pieces.numbers(slot, head)[0] = state.largest;
    pieces.numbers(slot, head)[1] = state.total;
  }

  PYG_DIST_DEVICE void finish(int64_t row, int64_t head, const Columns& columns, bool has_numbers, bool is_empty,
                              const Softmax<A>& state, Values sum) const {
    const int64_t of_head = row * g.attention.num_heads + head;
    const A factor = kForward ? A{1} / state.divisor(is_empty || out.is_part) : A{1};
    T* const to = static_cast<T*>(out.rows) + of_head * summed.width;
    PYG_DIST_UNROLL
    for (int u = 0; u < kCount; ++u) {
      if (!columns.has(u)) continue;
      PYG_DIST_UNROLL
      for (int v = 0; v < kVec; ++v) sum[u][v] *= factor;
      store_values<T, kVec>(to + columns.at(u), sum[u]);
    }
    if (!has_numbers || out.second == nullptr) return;
    if constexpr (kForward) {
      static_cast<A*>(out.second)[of_head] = state.lse();
    } else {
      static_cast<T*>(out.second)[of_head] = from_sum<T>(state.largest);
    }
  }
};

// A warp for each chunk that a hub starts in, which has 32 columns of the piece; slices have the others.
template <class T, bool kForward>
struct JoinHeads {
  static constexpr int kThreads = 256;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  Sums out;
  HeadChunks chunks;
  HeadPieces<A> pieces;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t k = (block_id() * kThreads + thread_id()) / kWarp, c = block_slice() * kWarp + lane_id();
    const int64_t num_sums = pieces.num_heads * pieces.width;
    if (k >= chunks.num_chunks || c >= num_sums + pieces.num_heads) return;
    const int64_t row = chunks.hubs[k];
    if (row < 0) return;
    const bool is_sum = c < num_sums;
    const int64_t head = is_sum ? c / pieces.width : c - num_sums;
    A sum = 0;
    Softmax<A> state = kForward ? Softmax<A>::none() : Softmax<A>{};
    for_pieces(chunks.chunks, row, k, [&](int64_t slot) {
      const A* const numbers = pieces.numbers(slot, head);
      const A part = is_sum ? pieces.data[slot * pieces.size() + c] : A{0};
      if constexpr (kForward) {
        sum *= state.rise(numbers[0]);
        const A its = numbers[0] == state.largest ? A{1} : exp_of(numbers[0] - state.base());
        sum += its * part;
        state.total += its * numbers[1];
      } else {
        sum += is_sum ? part : numbers[0];
      }
    });
    if (is_sum) {
      static_cast<T*>(out.rows)[row * num_sums + c] = from_sum<T>(kForward ? sum / state.divisor(out.is_part) : sum);
    } else if (out.second != nullptr) {
      if constexpr (kForward) {
        static_cast<A*>(out.second)[row * pieces.num_heads + head] = state.lse();
      } else {
        static_cast<T*>(out.second)[row * pieces.num_heads + head] = from_sum<T>(sum);
      }
    }
  }
};

template <class T, AttentionForm kForm, int kVec, int kCount, bool kForward>
void reduce_heads(const AttentionGrad& g, const Summed& summed, const Sums& out, bool by_source, const Queue& queue) {
  using Kernel = ReduceHeads<T, kForm, kVec, kCount, kForward>;
  using A = accumulator_t<T>;
  const Attention& p = g.attention;
  const HeadGroups groups(p, summed.width, kVec, kVec * kCount);
  const ChunkShape shape(p.num_rows, p.num_edges, groups.lanes());
  const RowChunks rows(p.rowptr, p.num_rows, shape.work);
  const HeadChunks chunks{rows, scratch<int64_t>(queue, shape.num_chunks), shape.num_chunks};
  HeadPieces<A> pieces{nullptr, p.num_heads, summed.width};
  pieces.data = scratch<A>(queue, 2 * shape.num_chunks * pieces.size());
  launch(Kernel{g, summed, out, chunks, pieces, groups, by_source},
         blocks_for(shape.num_chunks * groups.lanes(), Kernel::kThreads), queue.stream, groups.num_slices);
  using Join = JoinHeads<T, kForward>;
  const int64_t numbers = p.num_heads * (summed.width + 1);
  launch(Join{out, chunks, pieces}, blocks_for(shape.num_chunks * kWarp, Join::kThreads), queue.stream,
         blocks_for(numbers, kWarp));
}

// Whether all rows that a group reads or writes begin where vectors of kVec values do.
template <class T, int kVec>
bool has_vectors(const AttentionGrad& g, const Summed& summed, const Sums& out) {
  using A = accumulator_t<T>;
  const Attention& p = g.attention;
  Alignment<T> alignment(p.num_columns);
  alignment.template rows<T>(p.value, p.value_stride).template rows<T>(p.far_value, p.far_value_stride);
  alignment.template rows<T>(g.grad_y, p.num_columns);
  if (p.form != AttentionForm::additive) {
    alignment.template rows<T>(p.key, p.key_stride).template rows<T>(p.far_key, p.far_key_stride);
    alignment.template rows<T>(p.query, p.query_stride);
  }
  if (p.form == AttentionForm::dynamic) {
    alignment.template rows<A>(p.att, p.num_columns).template rows<A>(p.edge_weight, p.num_columns);
  }
  alignment.template rows<T>(summed.rows.near, summed.rows.stride).template rows<T>(out.rows, summed.width);
  return alignment.allows(kVec * sizeof(T));
}

template <bool kForward>
void reduce(const AttentionGrad& g, const Summed& summed, const Sums& out, bool by_source, const Queue& queue) {
  constexpr int kVec = 4;
  constexpr int64_t kFewest = 8 * kVec;  // columns of a head: a vector for each of eight lanes
  for_attention(g.attention, [&]<class T, AttentionForm kForm>() {
    if constexpr (sizeof(T) == 8) {
      reduce_heads<T, kForm, 1, 2, kForward>(g, summed, out, by_source, queue);
    } else if (g.attention.num_columns >= kFewest && has_vectors<T, kVec>(g, summed, out)) {
      reduce_heads<T, kForm, kVec, 2, kForward>(g, summed, out, by_source, queue);
    } else {
      reduce_heads<T, kForm, 1, 4, kForward>(g, summed, out, by_source, queue);
    }
  });
}

Summed values(const Sources& rows, const Attention& p, bool by_logit) {
  return {rows, p.num_columns, p.num_columns, false, by_logit};
}
Summed edge_attr(const Attention& p, bool by_logit) {
  return {{p.edge_attr, p.edge_attr_stride}, 0, p.num_edge_columns, true, by_logit};
}

}  // namespace

void attention(const AttentionForward& f, const Queue& queue) {
  const Attention& p = f.attention;
  AttentionGrad g{};
  g.attention = p;
  reduce<true>(g, values(Sources::of_values(p), p, false), {f.y, f.lse, f.is_part}, false, queue);
  if (f.z != nullptr) reduce<true>(g, edge_attr(p, false), {f.z, nullptr, f.is_part}, false, queue);
}

void attention_by_target(const AttentionGrad& g, const Queue& queue) {
  const Attention& p = g.attention;
  switch (p.form) {
    case AttentionForm::additive:
      if (g.by_edge_weight != nullptr) {
        reduce<false>(g, edge_attr(p, true), {g.by_edge_weight, g.by_query}, false, queue);
      } else {
        reduce<false>(g, {}, {nullptr, g.by_query}, false, queue);
      }
      break;
    case AttentionForm::dynamic:
      reduce<false>(g, values({}, p, true), {g.by_query, nullptr}, false, queue);
      break;
    case AttentionForm::dot:
      reduce<false>(g, values(Sources::of_keys(p), p, true), {g.by_query, nullptr}, false, queue);
      if (g.by_edge_weight != nullptr) reduce<false>(g, edge_attr(p, true), {g.by_edge_weight, nullptr}, false, queue);
      break;
  }
  attention_by_edge_attr(g, queue);
  attention_by_parameters(g, queue);
}

void attention_by_source(const AttentionGrad& g, const Queue& queue) {
  const Attention& p = g.attention;
  const int64_t stride = p.num_heads * p.num_columns;
  reduce<false>(g, values({g.grad_y, stride}, p, false),
                {g.by_value, p.form == AttentionForm::additive ? g.by_key : nullptr}, true, queue);
  if (p.form == AttentionForm::dot) {
    reduce<false>(g, values({p.query, p.query_stride}, p, true), {g.by_key, nullptr}, true, queue);
  }
}

}  // namespace pyg_dist::gpu
