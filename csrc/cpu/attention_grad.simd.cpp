#include "cpu/attention_edges.h"
#include "cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

// Of a batch ds in place of logits, and k p as weights. `other` is the end that col names.
template <class T, AttentionForm kForm, bool kBySource>
PYG_DIST_INLINE void set_gradients(const AttentionGrad& g, const Edges<T, kForm>& edges, int64_t own, int64_t begin,
                                   int64_t count) {
  using A = accumulator_t<T>;
  constexpr int L = kLanes<A>;
  const Attention& p = g.attention;
  const int64_t heads = edges.num_heads, columns = edges.num_columns, lanes = edges.lanes;
  const auto* grad_y = static_cast<const T*>(g.grad_y);
  const auto* grad_z = static_cast<const T*>(g.grad_z);
  const auto* lse = static_cast<const A*>(g.lse);
  const auto* delta = static_cast<const A*>(g.delta);
  edges.set_dropout(begin, count);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t e = begin + b, other = p.col[e], place = p.edge[e];
    const int64_t target = kBySource ? other : own, source = kBySource ? own : other;
    if constexpr (kBySource) {
      edges.prefetch_row(grad_y, edges.row, edges.row, e);
      edges.prefetch_row(lse, heads, heads, e);
      edges.prefetch_row(delta, heads, heads, e);
      if (p.query != nullptr) edges.prefetch_row(edges.query(0), p.query_stride, logit_columns(p), e);
    } else {
      edges.prefetch_source(e);
    }
    edges.set_logits(target, source, place, b);
    const T *row = grad_y + target * edges.row, *x = edges.value(source);
    A* const weight = edges.weight + b * lanes;
    sum_heads<A>(weight, heads, columns,
                 [&]<int K>(int64_t c) __attribute__((always_inline)) { return load<K>(row + c) * load<K>(x + c); });
    if (grad_z != nullptr) {
      const T *of_target = grad_z + target * edge_sum_columns(p), *attr = edges.edge_attr(place);
      for (int64_t h = 0; h < heads; ++h) {
        weight[h] += dot<A>(of_target + h * edges.num_edge_columns, attr, edges.num_edge_columns);
      }
    }
    for_vectors<A>(heads, [&]<int K>(int64_t h) __attribute__((always_inline)) {
      store<K>(edges.lse + b * lanes + h, load<K>(lse + target * heads + h));
      store<K>(edges.delta + b * lanes + h, load<K>(delta + target * heads + h));
    });
  }
  for (int64_t l = 0; l < count * lanes; l += L) {
    A *const s = edges.logit + l, *const w = edges.weight + l;
    Vec<A, L> logit = load<L>(s), slope = {};
    if constexpr (kForm == AttentionForm::additive) {
      slope = leaky_slope<A, L>(logit, edges.slope);
      logit *= slope;
    }
    if constexpr (kForm == AttentionForm::dot) logit *= edges.scale;
    const Vec<A, L> k = load<L>(edges.keep + l), probability = exp_of<A, L>(logit - load<L>(edges.lse + l));
    Vec<A, L> ds = probability * (k * load<L>(w) - load<L>(edges.delta + l));
    if constexpr (kForm == AttentionForm::additive) ds *= slope;
    if constexpr (kForm == AttentionForm::dot) ds *= edges.scale;
    store<L>(s, ds);
    store<L>(w, k * probability);
  }
}

template <class T, AttentionForm kForm>
void target_rows_of_form(const AttentionGrad& g, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  const Attention& p = g.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns, edge_columns = edges.num_edge_columns;
  const int64_t lanes = edges.lanes;
  const int64_t query_columns = logit_columns(p);
  const bool weighs_edges = kForm != AttentionForm::dynamic && edge_columns > 0;
  A *const by_query = edges.sums, *const by_edge_weight = by_query + query_columns;
  auto* const by_attr = static_cast<T*>(g.by_edge_attr);
  auto* const by_parameters = static_cast<A*>(g.by_parameters);
  const auto* att = static_cast<const A*>(p.att);
  const int64_t batch = edges.batch();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t target = p.first_row + row, end = p.rowptr[row + 1];
    clear(by_query, query_columns);
    if (weighs_edges) clear(by_edge_weight, heads * edge_columns);
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      set_gradients<T, kForm, false>(g, edges, target, begin, count);
      const A* const ds_of = edges.logit;
      if constexpr (kForm == AttentionForm::additive) add_numbers(by_query, ds_of, lanes, count, heads);
      if constexpr (kForm == AttentionForm::dot) {
        const auto key = [&](int64_t b) { return edges.key(p.col[begin + b]); };
        add_rows(by_query, ds_of, lanes, count, heads, columns, key);
      }
      const auto attr = [&](int64_t b) { return edges.edge_attr(p.edge[begin + b]); };
      if (weighs_edges) add_rows<true>(by_edge_weight, ds_of, lanes, count, heads, edge_columns, attr);
      if (kForm != AttentionForm::dynamic && by_attr == nullptr) continue;
      for (int64_t b = 0; b < count; ++b) {
        const int64_t place = p.edge[begin + b];
        if constexpr (kForm == AttentionForm::dynamic) {
          edges.add_ends(target, p.col[begin + b], place);
          for (int64_t h = 0; h < heads; ++h) {
            const A ds = ds_of[b * lanes + h];
            const int64_t at = h * columns;
            A* const u = edges.columns + at;
            for_vectors<A>(columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
              const Vec<A, K> before = load<K>(u + c);
              if (by_parameters != nullptr) {
                A* const to = by_parameters + at + c;
                store<K>(to, load<K>(to) + leaky<A, K>(before, edges.slope) * ds);
              }
              const Vec<A, K> by_u = load<K>(att + at + c) * leaky_slope<A, K>(before, edges.slope) * ds;
              store<K>(by_query + at + c, load<K>(by_query + at + c) + by_u);
              store<K>(u + c, by_u);
            });
          }
          if (edge_columns > 0 && by_parameters != nullptr) {
            for (int64_t d = 0; d < edge_columns; ++d) {
              add<A>(by_parameters + (1 + d) * edges.row, edges.columns, load<1>(edges.edge_attr(place) + d),
                     edges.row);
            }
          }
        }
        if (by_attr == nullptr) continue;
        for (int64_t d = 0; d < edge_columns; ++d) {
          A sum = 0;
          if constexpr (kForm == AttentionForm::dynamic) {
            sum = dot<A>(static_cast<const A*>(p.edge_weight) + d * edges.row, edges.columns, edges.row);
          } else {
            for (int64_t h = 0; h < heads; ++h) {
              sum += ds_of[b * lanes + h] * load<1>(edges.edge_weight(target) + h * edge_columns + d);
              if (g.grad_z != nullptr) {
                const T* of_edge = static_cast<const T*>(g.grad_z) + (target * heads + h) * edge_columns;
                sum += edges.weight[b * lanes + h] * load<1>(of_edge + d);
              }
            }
          }
          store<1>(by_attr + place * edge_columns + d, sum);
        }
      }
    }
    if (g.by_query != nullptr) write_row<T, A>(g.by_query, g.wide, row, by_query, query_columns);
    if (g.by_edge_weight != nullptr) {
      write_row<T, A>(g.by_edge_weight, g.wide, row, by_edge_weight, heads * edge_columns);
    }
  }
}

template <class T, AttentionForm kForm>
void source_rows_of_form(const AttentionGrad& g, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  const Attention& p = g.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns, num_key_columns = key_columns(p);
  const int64_t lanes = edges.lanes;
  A *const by_value = edges.sums, *const by_key = by_value + edges.row;
  const auto* grad_y = static_cast<const T*>(g.grad_y);
  const auto* att = static_cast<const A*>(p.att);
  const int64_t batch = edges.batch();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t source = p.first_row + row, end = p.rowptr[row + 1];
    clear(by_value, edges.row + num_key_columns);
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      set_gradients<T, kForm, true>(g, edges, source, begin, count);
      if constexpr (kForm == AttentionForm::dynamic) {
        for (int64_t b = 0; b < count; ++b) {
          const int64_t target = p.col[begin + b];
          const T* grad = grad_y + target * edges.row;
          edges.add_ends(target, source, p.edge[begin + b]);
          for (int64_t h = 0; h < heads; ++h) {
            const A ds = edges.logit[b * lanes + h], weight = edges.weight[b * lanes + h];
            const int64_t at = h * columns;
            for_vectors<A>(columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
              const Vec<A, K> slope = leaky_slope<A, K>(load<K>(edges.columns + at + c), edges.slope);
              store<K>(by_value + at + c, load<K>(by_value + at + c) + load<K>(grad + at + c) * weight +
                                              load<K>(att + at + c) * slope * ds);
            });
          }
        }
        continue;
      }
      const auto grad = [&](int64_t b) { return grad_y + p.col[begin + b] * edges.row; };
      add_rows(by_value, edges.weight, lanes, count, heads, columns, grad);
      if constexpr (kForm == AttentionForm::additive) add_numbers(by_key, edges.logit, lanes, count, heads);
      if constexpr (kForm == AttentionForm::dot) {
        const auto query = [&](int64_t b) { return edges.query(p.col[begin + b]); };
        add_rows(by_key, edges.logit, lanes, count, heads, columns, query);
      }
    }
    write_row<T, A>(g.by_value, g.wide, row, by_value, edges.row);
    if (num_key_columns > 0) write_row<T, A>(g.by_key, g.wide, row, by_key, num_key_columns);
  }
}

}  // namespace

void attention_target_rows(const AttentionGrad& problem, int64_t begin, int64_t end) {
  for_form(problem.attention,
           [&]<class T, AttentionForm kForm>() { target_rows_of_form<T, kForm>(problem, begin, end); });
}

void attention_source_rows(const AttentionGrad& problem, int64_t begin, int64_t end) {
  for_form(problem.attention,
           [&]<class T, AttentionForm kForm>() { source_rows_of_form<T, kForm>(problem, begin, end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
