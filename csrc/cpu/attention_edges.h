// Batches of a row's edges, whose logits attention computes before it adds their rows; only for .simd.cpp files.
#pragma once

#include "cpu/attention.h"
#include "cpu/head_columns.h"
#include "cpu/keyed_words.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

constexpr int64_t kPrefetchEdges = 32;  // as in spmm_csr

template <class T, AttentionForm kForm>
struct Edges {
  using A = accumulator_t<T>;
  static constexpr int L = kLanes<A>;
  static constexpr int64_t B = kAttentionBatch;

  const Attention& p;
  const int64_t num_heads, num_columns, num_edge_columns, row, lanes;
  const A slope, scale;
  A *const logit, *const weight, *const keep, *const delta, *const lse;  // [edges, lanes]: of head h of edge b
  A *const columns, *const sums;
  int64_t words_of_edge;

  explicit Edges(const Attention& attention)
      : p(attention),
        num_heads(p.num_heads),
        num_columns(p.num_columns),
        num_edge_columns(p.num_edge_columns),
        row(num_heads * num_columns),
        lanes(head_lanes(num_heads)),
        slope(static_cast<A>(p.slope)),
        scale(static_cast<A>(p.scale)),
        logit(static_cast<A*>(p.scratch)),
        weight(logit + lanes * B),
        keep(weight + lanes * B),
        delta(keep + lanes * B),
        lse(delta + lanes * B),
        columns(lse + lanes * B),
        sums(columns + row),
        words_of_edge((num_heads + 3) / 4) {
    for (int64_t k = 0; k < lanes * B; ++k) keep[k] = A{1};
  }

  // How many edges are looked at together: words of dropout for all of them lie in one batch of numbers.
  int64_t batch() const {
    const int64_t most = p.edge_key == nullptr ? B : kBatch / words_of_edge;
    return most < B ? most : B;
  }

  PYG_DIST_INLINE const T* value(int64_t source) const {
    return source < p.num_near ? static_cast<const T*>(p.value) + source * p.value_stride
                               : static_cast<const T*>(p.far_value) + (source - p.num_near) * p.far_value_stride;
  }
  PYG_DIST_INLINE const T* key(int64_t source) const {
    return source < p.num_near ? static_cast<const T*>(p.key) + source * p.key_stride
                               : static_cast<const T*>(p.far_key) + (source - p.num_near) * p.far_key_stride;
  }
  PYG_DIST_INLINE const T* query(int64_t target) const {
    return static_cast<const T*>(p.query) + target * p.query_stride;
  }
  PYG_DIST_INLINE const T* edge_attr(int64_t place) const {
    return static_cast<const T*>(p.edge_attr) + place * p.edge_attr_stride;
  }
  PYG_DIST_INLINE const T* edge_weight(int64_t target) const {
    return static_cast<const T*>(p.edge_weight) + target * p.edge_weight_stride;
  }

  // columns[h, c] = query + value (+ edge): what `dynamic` takes the leaky ReLU of.
  PYG_DIST_INLINE void add_ends(int64_t target, int64_t source, int64_t place) const {
    const T *x = value(source), *q = query(target);
    const auto* w = static_cast<const A*>(p.edge_weight);
    for_vectors<A>(row, [&]<int K>(int64_t c) __attribute__((always_inline)) {
      Vec<A, K> sum = load<K>(x + c) + load<K>(q + c);
      if (num_edge_columns > 0) {
        const T* attr = edge_attr(place);
        for (int64_t d = 0; d < num_edge_columns; ++d) sum += load<K>(w + d * row + c) * load<1>(attr + d);
      }
      store<K>(columns + c, sum);
    });
  }

  // Logits of one edge; of `additive` before the leaky ReLU, and of `dot` before the scale, which whole vectors take.
  PYG_DIST_INLINE void set_logits(int64_t target, int64_t source, int64_t place, int64_t b) const {
    A* const of_edge = logit + b * lanes;
    if constexpr (kForm == AttentionForm::additive) {
      const T* k = key(source);
      const T* q = p.query == nullptr ? nullptr : query(target);
      for_vectors<A>(num_heads, [&]<int K>(int64_t h) __attribute__((always_inline)) {
        store<K>(of_edge + h, q == nullptr ? load<K>(k + h) : load<K>(k + h) + load<K>(q + h));
      });
    } else if constexpr (kForm == AttentionForm::dot) {
      const T *k = key(source), *q = query(target);
      sum_heads<A>(of_edge, num_heads, num_columns,
                   [&]<int K>(int64_t c) __attribute__((always_inline)) { return load<K>(k + c) * load<K>(q + c); });
    } else {
      add_ends(target, source, place);
      const auto* att = static_cast<const A*>(p.att);
      sum_heads<A>(of_edge, num_heads, num_columns, [&]<int K>(int64_t c) __attribute__((always_inline)) {
        return load<K>(att + c) * leaky<A, K>(load<K>(columns + c), slope);
      });
    }
    if constexpr (kForm != AttentionForm::dynamic) {
      if (num_edge_columns > 0) {
        const T *w = edge_weight(target), *attr = edge_attr(place);
        for (int64_t h = 0; h < num_heads; ++h) {
          of_edge[h] += dot<A>(w + h * num_edge_columns, attr, num_edge_columns);
        }
      }
    }
  }

  // Dropout's factors of the edges [begin, begin + count).
  void set_dropout(int64_t begin, int64_t count) const {
    if (p.edge_key == nullptr) return;
    Batch words;
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t k = 0; k < words_of_edge; ++k) {
        words.key[b * words_of_edge + k] = static_cast<uint64_t>(p.edge_key[p.edge[begin + b]]);
        words.block[b * words_of_edge + k] = static_cast<uint64_t>(k);
      }
    }
    for (int64_t l = count * words_of_edge; l % Batch::L != 0; ++l) words.key[l] = words.block[l] = 0;
    words.template draw<Philox::kRounds>(count * words_of_edge, p.seed, Stream::dropout);
    const A factor = static_cast<A>(p.dropout_scale);
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t h = 0; h < num_heads; ++h) {
        keep[b * lanes + h] = words.words[4 * b * words_of_edge + h] >= p.threshold ? factor : A{0};
      }
    }
  }

  // What col names some way ahead of edge e.
  PYG_DIST_INLINE int64_t ahead(int64_t e) const {
    return p.col[e + kPrefetchEdges < p.num_edges ? e + kPrefetchEdges : p.num_edges - 1];
  }
  // Asks for rows of a source, or for others, that far ahead.
  PYG_DIST_INLINE void prefetch_source(int64_t e) const {
    const int64_t source = ahead(e);
    prefetch(value(source), row * static_cast<int64_t>(sizeof(T)));
    if constexpr (kForm != AttentionForm::dynamic) {
      prefetch(key(source), (kForm == AttentionForm::dot ? row : num_heads) * static_cast<int64_t>(sizeof(T)));
    }
  }
  template <class U>
  PYG_DIST_INLINE void prefetch_row(const U* rows, int64_t stride, int64_t width, int64_t e) const {
    prefetch(rows + ahead(e) * stride, width * static_cast<int64_t>(sizeof(U)));
  }
};

template <class T, class A>
PYG_DIST_INLINE void write_row(void* out, bool wide, int64_t row, const A* sums, int64_t width) {
  if (wide) {
    A* to = static_cast<A*>(out) + row * width;
    for_vectors<A>(width,
                   [&]<int K>(int64_t c) __attribute__((always_inline)) { store<K>(to + c, load<K>(sums + c)); });
  } else {
    T* to = static_cast<T*>(out) + row * width;
    for_vectors<A>(width,
                   [&]<int K>(int64_t c) __attribute__((always_inline)) { store<K>(to + c, load<K>(sums + c)); });
  }
}

template <class A>
PYG_DIST_INLINE void clear(A* numbers, int64_t count) {
  for (int64_t k = 0; k < count; ++k) numbers[k] = 0;
}

// Calls f.operator()<T, form>().
template <class F>
PYG_DIST_INLINE void for_form(const Attention& p, const F& f) {
  const auto of_type = [&]<class T>() {
    switch (p.form) {
      case AttentionForm::additive:
        return f.template operator()<T, AttentionForm::additive>();
      case AttentionForm::dynamic:
        return f.template operator()<T, AttentionForm::dynamic>();
      case AttentionForm::dot:
        return f.template operator()<T, AttentionForm::dot>();
    }
  };
  return for_element(p.element, of_type);
}

}  // namespace
}  // namespace pyg_dist::PYG_DIST_LEVEL
