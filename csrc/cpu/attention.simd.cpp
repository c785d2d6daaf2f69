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
  constexpr int64_t B = E::B, L = E::L;
  const Attention& p = f.attention;
  const E edges(p);
  const int64_t heads = edges.num_heads, columns = edges.num_columns;
  const int64_t edge_columns = kForm == AttentionForm::dot ? edges.num_edge_columns : 0;
  A *const y = edges.sums, *const z = y + edges.row, *const largest = z + heads * edge_columns;
  A* const sum = largest + heads;
  const int64_t batch = edges.batch();
  const T* value_of[B];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t target = p.first_row + row, end = p.rowptr[row + 1];
    clear(y, edges.row + heads * edge_columns);
    for (int64_t h = 0; h < heads; ++h) {
      largest[h] = -__builtin_inf();
      sum[h] = 0;
    }
    for (int64_t begin = p.rowptr[row]; begin < end; begin += batch) {
      const int64_t count = batch < end - begin ? batch : end - begin;
      const int64_t padded = (count + L - 1) / L * L;
      for (int64_t b = 0; b < count; ++b) {
        const int64_t e = begin + b;
        edges.prefetch_source(e);
        edges.set_logits(target, p.col[e], p.edge[e], b);
        value_of[b] = edges.value(p.col[e]);
      }
      edges.set_dropout(begin, count);
      for (int64_t h = 0; h < heads; ++h) {
        A* const s = edges.logit + h * B;
        if constexpr (kForm == AttentionForm::additive) {
          for (int64_t b = 0; b < padded; b += L) store<L>(s + b, leaky<A, L>(load<L>(s + b), edges.slope));
        }
        for (int64_t b = count; b < padded; ++b) s[b] = -__builtin_inf();
        Vec<A, L> of_lanes = Vec<A, L>{} - static_cast<A>(__builtin_inf());
        for (int64_t b = 0; b < padded; b += L) of_lanes = Most{}(of_lanes, load<L>(s + b));
        const A most = Most{}(largest[h], reduce<L, A>(of_lanes, Most{}));
        if (!(most == largest[h])) {
          const A factor = sum[h] > 0 ? exp_of<A, 1>(largest[h] - most) : A{0};
          largest[h] = most;
          sum[h] *= factor;
          for (int64_t c = 0; c < columns; ++c) y[h * columns + c] *= factor;
          for (int64_t d = 0; d < edge_columns; ++d) z[h * edge_columns + d] *= factor;
        }
        const A base = most == -__builtin_inf() ? A{0} : most;  // of -infinities alone: powers are zero, not NaN
        for (int64_t b = 0; b < padded; b += L) store<L>(s + b, exp_of<A, L>(load<L>(s + b) - base));
        sum[h] = total_of(sum[h], s, count);
        for (int64_t b = 0; b < padded; b += L) store<L>(s + b, load<L>(s + b) * load<L>(edges.keep + h * B + b));
        const auto value = [&](int64_t b) { return value_of[b] + h * columns; };
        add_rows<A>(y + h * columns, s, count, columns, value);
        const auto attr = [&](int64_t b) { return edges.edge_attr(p.edge[begin + b]); };
        if (edge_columns > 0) add_rows<A>(z + h * edge_columns, s, count, edge_columns, attr);
      }
    }
    const bool may_be_zero = p.rowptr[row] == end || f.is_part;
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
