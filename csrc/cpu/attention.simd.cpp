#include "cpu/attention_edges.h"
#include "cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

PYG_DIST_INLINE float log_of(float x) { return __builtin_logf(x); }
PYG_DIST_INLINE double log_of(double x) { return __builtin_log(x); }

template <class T, AttentionForm kForm>
void rows_of_form(const AttentionForward& f, int64_t row_begin, int64_t row_end) {
  using E = Edges<T, kForm>;
  using A = typename E::A;
  constexpr int L = E::L;
  const Attention& p = f.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns, lanes = edges.lanes;
  const int64_t edge_columns = kForm == AttentionForm::dot ? edges.num_edge_columns : 0;
  const int64_t step = lanes < L ? L : lanes;  // from a vector to the next one of the same heads
  A *const y = edges.sums, *const z = y + edges.row, *const sum = z + heads * edge_columns, *const s = edges.logit;
  A* const largest = sum + heads;  // in whole vectors
  const int64_t batch = edges.batch();
  const T* value_of[E::B];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t target = p.first_row + row, first = p.rowptr[row], end = p.rowptr[row + 1];
    clear(y, edges.row + heads * edge_columns + heads);
    for (int64_t h = 0; h < heads; ++h) largest[h] = -__builtin_inf();
    for (int64_t begin = first; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      for (int64_t b = 0; b < count; ++b) {
        const int64_t e = begin + b;
        edges.prefetch_source(e);
        edges.set_logits(target, p.col[e], p.edge[e], b);
        value_of[b] = edges.value(p.col[e]);
      }
      const int64_t used = count * lanes, padded = (used + L - 1) / L * L;
      for (int64_t at = 0; at < lanes; at += L) {
        const Vec<A, L> least = Vec<A, L>{} - static_cast<A>(__builtin_inf());
        Vec<A, L> most = least;
        for (int64_t k = at; k < padded; k += step) {
          Vec<A, L> logit = load<L>(s + k);
          if constexpr (kForm == AttentionForm::additive) logit = leaky<A, L>(logit, edges.slope);
          if constexpr (kForm == AttentionForm::dot) logit *= edges.scale;
          if (k + L > used) logit = first_lanes<L, A>(used - k) ? logit : least;
          store<L>(s + k, logit);
          most = Most{}(most, logit);
        }
        most = join_edges<L, A>(most, lanes, Most{});
        if (begin > first) {
          A before[L];
          store<L>(before, load<L>(largest + at));
          most = Most{}(load<L>(largest + at), most);
          store<L>(largest + at, most);
          for (int64_t h = at; h < heads && h < at + L; ++h) {
            if (largest[h] == before[h - at]) continue;
            const A factor = sum[h] > 0 ? exp_of<A, 1>(before[h - at] - largest[h]) : A{0};
            sum[h] *= factor;
            for (int64_t c = 0; c < columns; ++c) y[h * columns + c] *= factor;
            for (int64_t d = 0; d < edge_columns; ++d) z[h * edge_columns + d] *= factor;
          }
        } else {
          store<L>(largest + at, most);
        }
        // Of -infinities alone powers are zero, not NaN.
        const Vec<A, L> base = most == static_cast<A>(-__builtin_inf()) ? Vec<A, L>{} : most;
        for (int64_t k = at; k < padded; k += step) store<L>(s + k, exp_of<A, L>(load<L>(s + k) - base));
      }
      add_numbers(sum, s, lanes, count, heads);
      if (p.edge_key != nullptr) {
        edges.set_dropout(begin, count);
        for (int64_t k = 0; k < padded; k += L) store<L>(s + k, load<L>(s + k) * load<L>(edges.keep + k));
      }
      add_rows(y, s, lanes, count, heads, columns, [&](int64_t b) { return value_of[b]; });
      const auto attr = [&](int64_t b) { return edges.edge_attr(p.edge[begin + b]); };
      if (edge_columns > 0) add_rows<true>(z, s, lanes, count, heads, edge_columns, attr);
    }
    const bool may_be_zero = first == end || f.is_part;
    for (int64_t h = 0; h < heads; ++h) {
      const A factor = may_be_zero && sum[h] == 0 ? A{1} : A{1} / sum[h];
      for (int64_t c = 0; c < columns; ++c) y[h * columns + c] *= factor;
      for (int64_t d = 0; d < edge_columns; ++d) z[h * edge_columns + d] *= factor;
      static_cast<A*>(f.lse)[row * heads + h] = sum[h] == 0 ? largest[h] : largest[h] + log_of(sum[h]);
    }
    write_row<T, A>(f.y, f.wide, row, y, edges.row);
    if (edge_columns > 0) write_row<T, A>(f.z, f.wide, row, z, heads * edge_columns);
  }
}

}  // namespace

void attention_rows(const AttentionForward& problem, int64_t begin, int64_t end) {
  for_form(problem.attention, [&]<class T, AttentionForm kForm>() { rows_of_form<T, kForm>(problem, begin, end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
