// Ops whose rows or elements do not depend on each other: ranges of them, as threads come.
#include <algorithm>

#include "cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 15;

template <class Problem>
void for_each_row(const Problem& problem, const Keyed& rows, void (*kernel)(const Problem&, int64_t, int64_t)) {
  for_each_range(rows.num_rows, kElementsPerChunk / rows.num_columns,
                 [&](int64_t begin, int64_t end) { kernel(problem, begin, end); });
}

template <class Problem>
void for_each_element(const Problem& problem, void (*kernel)(const Problem&, int64_t, int64_t)) {
  for_each_range(problem.num_elements, 2 * kElementsPerChunk,
                 [&](int64_t begin, int64_t end) { kernel(problem, begin, end); });
}

}  // namespace

void keyed_dropout(const KeyedDropout& problem) { for_each_row(problem, problem.keyed, kernels().dropout_rows); }

void keyed_uniform(const KeyedNumbers& problem) { for_each_row(problem, problem.keyed, kernels().uniform_rows); }

void keyed_normal(const KeyedNumbers& problem) { for_each_row(problem, problem.keyed, normal_rows); }

void norm_relu_dropout(const NormReLUDropout& problem) {
  for_each_row(problem, problem.keyed, kernels().epilogue_rows);
}

void norm_relu_dropout_grad(const NormReLUDropoutGrad& problem) {
  for_each_chunk(problem.num_groups, [&](int64_t k) { kernels().epilogue_grad_groups(problem, k, k + 1); });
}

void relu(const Relu& problem) { for_each_element(problem, relu_elements); }

void relu_grad(const ReluGrad& problem) { for_each_element(problem, relu_grad_elements); }

}  // namespace pyg_dist::cpu
