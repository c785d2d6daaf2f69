// Every kernel of the instruction set in use: `make cross` runs it under an emulator, `make sanitize` under sanitizers.

#include "kernels_trial.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cpu/attention.h"
#include "cpu/patterns.h"
#include "cpu/table.h"
#include "sampling_trial.h"

namespace pyg_dist {
namespace {

struct Cpu {
  static constexpr int kHub = 0;  // whoever calls these kernels cuts hubs

  void spmm_csr(const SpmmCsr& p) const { kernels().spmm_rows(p, 0, p.num_rows); }
  void sddmm_csr(const SddmmCsr& p) const { kernels().sddmm_edges(p, 0, p.num_edges); }
  void scatter_add_rows(ScatterAddRows p) const {
    std::vector<int64_t> order;
    for (int64_t r = 0; r < p.num_rows; r += 2) order.push_back(r);
    for (int64_t r = 1; r < p.num_rows; r += 2) order.push_back(r);
    p.order = order.data();
    kernels().scatter_add_places(p, 0, p.num_rows);
  }
  bool gather_rows(const GatherRows& p) const { return pyg_dist::gather_rows(p, 0, p.num_rows); }
  void relu(const Relu& p) const { relu_elements(p, 0, p.num_elements); }
  void relu_grad(const ReluGrad& p) const { relu_grad_elements(p, 0, p.num_elements); }
  void extreme_csr(const ExtremeCsr& p) const { kernels().extreme_rows(p, 0, p.num_rows); }
  void extreme_csr_shares(const ExtremeCsr& p) const { kernels().extreme_share_rows(p, 0, p.num_rows); }
  void extreme_csr_grad(const ExtremeCsr& p) const { kernels().extreme_grad_rows(p, 0, p.num_rows); }
  void keyed_dropout(const KeyedDropout& p) const { kernels().dropout_rows(p, 0, p.keyed.num_rows); }
  void keyed_uniform(const KeyedNumbers& p) const { kernels().uniform_rows(p, 0, p.keyed.num_rows); }
  void keyed_normal(const KeyedNumbers& p) const { normal_rows(p, 0, p.keyed.num_rows); }
  void keyed_permutation(const KeyedPermutation& p) const { permute_places(p, 0, p.num_places); }
  void norm_relu_dropout(const NormReLUDropout& p) const { kernels().epilogue_rows(p, 0, p.keyed.num_rows); }
  void norm_relu_dropout_grad(const NormReLUDropoutGrad& p) const {
    kernels().epilogue_grad_groups(p, 0, p.num_groups);
  }
  void transpose_csr(const TransposeCsr& p) const { pyg_dist::transpose_csr(p); }
  void quantize_csr(const QuantizeCsr& p) const {  // of rows that are one row of x each
    const QuantizeRows rows{.key = p.key,
                            .index = p.sums.col,
                            .x = p.sums.x,
                            .packed = p.packed,
                            .num_columns = p.sums.num_features,
                            .x_stride = p.sums.x_stride,
                            .seed = p.seed,
                            .bits = p.bits,
                            .element = p.sums.x_element};
    *p.bad_row = kernels().quantize_rows(rows, 0, p.sums.num_rows);
  }
  void dequantize_csr_add(const DequantizeCsr& p) const { kernels().dequantize_add_rows(p, 0, p.num_rows); }

  void attention(AttentionForward p) const { with_scratch(p, kernels().attention_rows); }
  void attention_by_target(AttentionGrad p) const { with_scratch(p, kernels().attention_target_rows); }
  void attention_by_source(AttentionGrad p) const { with_scratch(p, kernels().attention_source_rows); }

 private:
  template <class Problem>
  static void with_scratch(Problem& p, void (*kernel)(const Problem&, int64_t, int64_t)) {
    std::vector<double> scratch(static_cast<size_t>(attention_scratch(p.attention)));
    p.attention.scratch = scratch.data();
    kernel(p, 0, p.attention.num_rows);
  }
};

// Of a pattern that is its transpose, of one whose columns do not ascend, and of one with a column beyond its rows.
int64_t try_equal_transposes() {
  const int64_t rowptr[] = {0, 2, 3, 4};
  const int32_t same[] = {1, 2, 0, 0}, falling[] = {2, 1, 0, 0}, beyond[] = {1, 3, 0, 0};
  return !equals_transpose(rowptr, same, 3) + equals_transpose(rowptr, falling, 3) +
         equals_transpose(rowptr, beyond, 3);
}

int64_t row_of_col(const std::vector<int32_t>& col_of, int32_t col) {
  return std::find(col_of.begin(), col_of.end(), col) - col_of.begin();
}

// Matchings of patterns with repeated entries: as large as by any augmenting paths (Kuhn), and all of entries; what is
// reached leads to what is. A column that is not there is found.
int64_t try_matching() {
  int64_t wrong = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const int num_rows = draw(25), num_cols = 1 + draw(25);
    const Pattern p(num_rows, num_cols, 20);
    const auto num_entries = static_cast<int64_t>(p.col.size());
    std::vector<int32_t> col_of(static_cast<size_t>(num_rows));
    const std::unique_ptr<bool[]> row_reached(new bool[static_cast<size_t>(num_rows)]),
        col_reached(new bool[static_cast<size_t>(num_cols)]);
    BipartiteMatching problem{p.rowptr.data(), p.col.data(),  num_rows,          num_cols,
                              num_entries,     col_of.data(), row_reached.get(), col_reached.get()};
    wrong += bipartite_matching(problem).position != -1;
    std::vector<bool> is_used(static_cast<size_t>(num_cols));
    int size = 0, want = 0;
    std::vector<int64_t> row_of(static_cast<size_t>(num_cols), -1);
    std::vector<bool> seen;
    const std::function<bool(int64_t)> is_matched = [&](int64_t row) {
      for (auto e = static_cast<size_t>(p.rowptr[static_cast<size_t>(row)]);
           e < static_cast<size_t>(p.rowptr[static_cast<size_t>(row) + 1]); ++e) {
        const auto c = static_cast<size_t>(p.col[e]);
        if (seen[c]) continue;
        seen[c] = true;
        if (row_of[c] >= 0 && !is_matched(row_of[c])) continue;
        row_of[c] = row;
        return true;
      }
      return false;
    };
    for (int row = 0; row < num_rows; ++row) {
      seen.assign(static_cast<size_t>(num_cols), false);
      want += is_matched(row);
      const auto r = static_cast<size_t>(row);
      if (col_of[r] < 0) continue;
      ++size;
      wrong += std::find(p.col.data() + p.rowptr[r], p.col.data() + p.rowptr[r + 1], col_of[r]) ==
                   p.col.data() + p.rowptr[r + 1] ||
               is_used[static_cast<size_t>(col_of[r])];
      is_used[static_cast<size_t>(col_of[r])] = true;
    }
    wrong += size != want;
    if (num_entries == 0) continue;
    for (int64_t r = 0; r < num_rows; ++r) {
      for (auto e = p.rowptr[static_cast<size_t>(r)]; e < p.rowptr[static_cast<size_t>(r) + 1]; ++e) {
        const int32_t c = p.col[static_cast<size_t>(e)], partner = col_of[static_cast<size_t>(r)];
        wrong += row_reached[static_cast<size_t>(r)] && !row_reached[static_cast<size_t>(row_of_col(col_of, c))];
        wrong += col_reached[static_cast<size_t>(c)] && !col_reached[static_cast<size_t>(partner)];
      }
    }
    problem.num_cols = p.col[0];
    const BadIndex bad = bipartite_matching(problem);
    wrong += bad.position < 0 || bad.value < p.col[0];
  }
  return wrong;
}

}  // namespace
}  // namespace pyg_dist

// The argument names the instruction set to try; 77 says that this machine lacks it.
int main(int argc, char** argv) {
  using namespace pyg_dist;
  if (argc > 1) setenv("PYG_DIST_ISA", argv[1], 1);
  try {
    kernels();
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 77;
  }
  const int64_t wrong = try_all(Cpu()) + try_equal_transposes() + try_matching() + try_sample_rows() + try_distinct() +
                        try_id_lists() + try_add_places() + try_find_numbers();
  std::printf("%s: %lld wrong values\n", kernels().isa, static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}
