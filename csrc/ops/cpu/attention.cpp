#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/table.h"
#include "formats/narrow.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"
#include "problems/row_chunks.h"

namespace pyg_dist::cpu {
namespace {

// As in spmm_csr: a function of the widths alone.
int64_t chunk_work(const Attention& p) {
  return std::clamp<int64_t>((1 << 18) / std::max<int64_t>(p.num_heads * p.num_columns, 1), 256, 16384);
}

// What a hub's piece makes: numbers of the sums' type, one output behind the other.
template <class A>
struct Piece {
  int64_t row;
  std::unique_ptr<A[]> sums;
};

// Rows by equal shares of their edges. A pass is
//   rows(problem, row_begin, row_end)   the kernel
//   piece_size                          of the outputs of one row
//   set_outputs(problem, sums)          one row's outputs go there
//   join(sums, other)                   the pieces of a hub, in the order of its edges
//   finish(row, sums)                   a hub's row goes where it belongs
// and begin_chunk(problem, k) prepares for the rows and pieces of chunk k.
template <class A, class Problem, class Pass>
void for_row_chunks(const Problem& problem, int64_t work, const Pass& pass) {
  const Attention& whole = problem.attention;
  const RowChunks chunks(whole.rowptr, whole.num_rows, work);
  std::vector<Piece<A>> pieces(static_cast<size_t>(2 * chunks.size()));  // head and tail of each chunk
  for_each_chunk(chunks.size(), [&](int64_t k) {
    std::vector<A> scratch(static_cast<size_t>(attention_scratch(whole)));
    Problem part = problem;
    part.attention.scratch = scratch.data();
    pass.begin_chunk(part, k);
    const auto do_piece = [&](const RowChunks::Piece& piece, size_t slot) {
      if (piece.row < 0) return;
      pieces[slot] = {piece.row, std::make_unique_for_overwrite<A[]>(static_cast<size_t>(pass.piece_size))};
      const int64_t rowptr[] = {piece.edge_begin, piece.edge_end};  // edge numbers stay those of the whole pattern
      Problem one_row = part;
      one_row.attention.rowptr = rowptr;
      one_row.attention.first_row = piece.row;
      one_row.wide = true;
      pass.set_outputs(one_row, pieces[slot].sums.get());
      pass.rows(one_row, 0, 1);
    };
    const RowChunks::Chunk chunk = chunks[k];
    do_piece(chunk.head, static_cast<size_t>(2 * k));
    if (chunk.row_begin < chunk.row_end) pass.rows(part, chunk.row_begin, chunk.row_end);
    do_piece(chunk.tail, static_cast<size_t>(2 * k + 1));
  });
  Piece<A>* hub = nullptr;
  for (Piece<A>& piece : pieces) {
    if (piece.sums == nullptr) continue;
    if (hub != nullptr && hub->row == piece.row) {
      pass.join(hub->sums.get(), piece.sums.get());
    } else {
      if (hub != nullptr) pass.finish(hub->row, hub->sums.get());
      hub = &piece;
    }
  }
  if (hub != nullptr) pass.finish(hub->row, hub->sums.get());
}

template <class T>
void copy_row(void* out, int64_t row, const accumulator_t<T>* sums, int64_t width) {
  if (out == nullptr) return;
  T* to = static_cast<T*>(out) + row * width;
  for (int64_t c = 0; c < width; ++c) {
    if constexpr (kIsNarrow<T>) {
      to[c] = narrow<T>(sums[c]);
    } else {
      to[c] = sums[c];
    }
  }
}

template <class T>
struct ForwardPass {
  using A = accumulator_t<T>;
  const AttentionForward& problem;
  int64_t heads, columns, edge_columns, piece_size;

  explicit ForwardPass(const AttentionForward& forward)
      : problem(forward),
        heads(forward.attention.num_heads),
        columns(forward.attention.num_columns),
        edge_columns(forward.z == nullptr ? 0 : forward.attention.num_edge_columns),
        piece_size(heads * (columns + edge_columns + 1)) {}

  A* z_of(A* sums) const { return sums + heads * columns; }
  A* lse_of(A* sums) const { return z_of(sums) + heads * edge_columns; }

  static void rows(const AttentionForward& p, int64_t begin, int64_t end) { kernels().attention_rows(p, begin, end); }
  static void begin_chunk(AttentionForward&, int64_t) {}
  void set_outputs(AttentionForward& p, A* sums) const {
    p.y = sums;
    p.z = z_of(sums);
    p.lse = lse_of(sums);
    p.is_part = true;
  }
  // Two softmaxes over parts of the edges: each counts by the sum of its exponentials.
  void join(A* sums, A* other) const {
    for (int64_t h = 0; h < heads; ++h) {
      A& lse = lse_of(sums)[h];
      const A other_lse = lse_of(other)[h];
      const A largest = other_lse > lse || std::isnan(other_lse) ? other_lse : lse;
      A own = 1, its = 1, sum = 1;  // of parts that count for nothing
      if (largest != -std::numeric_limits<A>::infinity()) {
        own = std::exp(lse - largest);
        its = std::exp(other_lse - largest);
        sum = own + its;
      }
      lse = largest + std::log(sum);
      const auto mix = [&](A* to, const A* from, int64_t width) {
        for (int64_t c = 0; c < width; ++c) to[c] = (to[c] * own + from[c] * its) / sum;
      };
      mix(sums + h * columns, other + h * columns, columns);
      mix(z_of(sums) + h * edge_columns, z_of(other) + h * edge_columns, edge_columns);
    }
  }
  void finish(int64_t row, A* sums) const {
    for (int64_t h = 0; h < heads && !problem.is_part; ++h) {
      if (lse_of(sums)[h] != -std::numeric_limits<A>::infinity()) continue;
      std::fill_n(sums + h * columns, columns, std::numeric_limits<A>::quiet_NaN());
      std::fill_n(z_of(sums) + h * edge_columns, edge_columns, std::numeric_limits<A>::quiet_NaN());
    }
    copy_row<T>(problem.y, row, sums, heads * columns);
    copy_row<T>(problem.z, row, z_of(sums), heads * edge_columns);
    copy_row<A>(problem.lse, row, lse_of(sums), heads);
  }
};

// Pieces of sums: two outputs, of which the second may be missing.
template <class T>
struct GradPass {
  using A = accumulator_t<T>;
  void (*kernel)(const AttentionGrad&, int64_t, int64_t);
  void *AttentionGrad::*first, *AttentionGrad::*second;
  const AttentionGrad& problem;
  int64_t first_size, second_size, piece_size = first_size + second_size;
  A* parameters = nullptr;  // a row of parameter_size for each chunk
  int64_t parameter_size = 0;

  void rows(const AttentionGrad& p, int64_t begin, int64_t end) const { kernel(p, begin, end); }
  void begin_chunk(AttentionGrad& p, int64_t k) const {
    if (parameters != nullptr) p.by_parameters = parameters + k * parameter_size;
  }
  void set_outputs(AttentionGrad& p, A* sums) const {
    p.*first = sums;
    p.*second = p.*second == nullptr ? nullptr : sums + first_size;
  }
  void join(A* sums, A* other) const {
    for (int64_t c = 0; c < piece_size; ++c) sums[c] += other[c];
  }
  void finish(int64_t row, A* sums) const {
    copy_row<T>(problem.*first, row, sums, first_size);
    copy_row<T>(problem.*second, row, sums + first_size, second_size);
  }
};

template <class T>
void by_target_of_type(const AttentionGrad& problem) {
  using A = accumulator_t<T>;
  const Attention& p = problem.attention;
  GradPass<T> pass{
      .kernel = kernels().attention_target_rows,
      .first = &AttentionGrad::by_query,
      .second = &AttentionGrad::by_edge_weight,
      .problem = problem,
      .first_size = logit_columns(p),
      .second_size = problem.by_edge_weight == nullptr ? 0 : edge_sum_columns(p),
  };
  if (problem.by_parameters == nullptr) {
    for_row_chunks<A>(problem, chunk_work(p), pass);
    return;
  }
  // Parameters' sums by chunk: few enough chunks to hold a row of them for each, cut by the pattern alone.
  constexpr int64_t kMaxChunks = 256;
  const int64_t work = std::max(chunk_work(p), (p.num_rows + p.num_edges) / kMaxChunks + 1);
  const int64_t num_chunks = RowChunks(p.rowptr, p.num_rows, work).size();
  pass.parameter_size = (1 + p.num_edge_columns) * p.num_heads * p.num_columns;
  std::vector<A> parameters(static_cast<size_t>(num_chunks * pass.parameter_size));
  pass.parameters = parameters.data();
  for_row_chunks<A>(problem, work, pass);
  auto* sums = static_cast<A*>(problem.by_parameters);
  for (int64_t k = 0; k < num_chunks; ++k) {
    for (int64_t c = 0; c < pass.parameter_size; ++c)
      sums[c] += parameters[static_cast<size_t>(k * pass.parameter_size + c)];
  }
}

template <class T>
void by_source_of_type(const AttentionGrad& problem) {
  const Attention& p = problem.attention;
  const GradPass<T> pass{
      .kernel = kernels().attention_source_rows,
      .first = &AttentionGrad::by_value,
      .second = &AttentionGrad::by_key,
      .problem = problem,
      .first_size = p.num_heads * p.num_columns,
      .second_size = key_columns(p),
  };
  for_row_chunks<accumulator_t<T>>(problem, chunk_work(p), pass);
}

}  // namespace

void attention(const AttentionForward& problem) {
  for_element(problem.attention.element, [&]<class T>() {
    for_row_chunks<accumulator_t<T>>(problem, chunk_work(problem.attention), ForwardPass<T>(problem));
  });
}

void attention_by_target(const AttentionGrad& problem) {
  for_element(problem.attention.element, [&]<class T>() { by_target_of_type<T>(problem); });
}

void attention_by_source(const AttentionGrad& problem) {
  for_element(problem.attention.element, [&]<class T>() { by_source_of_type<T>(problem); });
}

}  // namespace pyg_dist::cpu
