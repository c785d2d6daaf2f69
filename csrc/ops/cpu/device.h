// The CPU's table: threads (parallel.h) and memory (block_pool.h) for the kernels of csrc/kernels/cpu/.
#pragma once

#include "kernels/cpu/bipartite_matching.h"
#include "kernels/cpu/table.h"
#include "ops/device.h"

namespace pyg_dist::cpu {

inline const char* isa() { return kernels().isa; }
Tensor allocate(const Tensor& like, Sizes sizes, ScalarType dtype, size_t num_bytes);
RowptrScan scan_rowptr(const int64_t* rowptr, int64_t num_rows);
EntriesScan scan_entries(const CsrFromEdges& problem);
void csr_from_edges(const CsrFromEdges& problem, bool is_sorted, const Tensor& like);
void spmm_csr(const SpmmCsr& problem, const Tensor& x, SpmmForm form);
SpmmForm spmm_csr_guess(int64_t num_rows, int64_t num_edges, const Tensor& x);
void sddmm_csr(const SddmmCsr& problem);
void extreme_csr(const ExtremeCsr& problem);
void extreme_csr_shares(const ExtremeCsr& problem);
void extreme_csr_grad(const ExtremeCsr& problem);
void attention(const AttentionForward& problem);
void attention_by_target(const AttentionGrad& problem);
void attention_by_source(const AttentionGrad& problem);
BadIndex gather_rows(const GatherRows& problem);
BadIndex scatter_add_rows(const ScatterAddRows& problem);
void keyed_dropout(const KeyedDropout& problem);
void keyed_uniform(const KeyedNumbers& problem);
void keyed_normal(const KeyedNumbers& problem);
BadIndex keyed_permutation(const KeyedPermutation& problem);
BadRestriction restrict_csr(const RestrictCsr& problem, const MakeEntries& make_entries);
BadIndex transpose_csr(const TransposeCsr& problem);
bool equals_transpose_csr(const int64_t* rowptr, const int32_t* col, int64_t num_rows);
void find_sorted(const FindSorted& problem);
void norm_relu_dropout(const NormReLUDropout& problem);
void norm_relu_dropout_grad(const NormReLUDropoutGrad& problem);
void relu(const Relu& problem);
void relu_grad(const ReluGrad& problem);
void quantize_csr(const QuantizeCsr& problem);
void dequantize_csr_add(const DequantizeCsr& problem);

inline constexpr DeviceOps kOps = {
    .name = "cpu",
    .isa = isa,
    .allocate = allocate,
    .scan_rowptr = scan_rowptr,
    .raise_bad_index = nullptr,
    .scan_entries = scan_entries,
    .csr_from_edges = csr_from_edges,
    .spmm_csr = spmm_csr,
    .spmm_csr_guess = spmm_csr_guess,
    .sddmm_csr = sddmm_csr,
    .extreme_csr = extreme_csr,
    .extreme_csr_shares = extreme_csr_shares,
    .extreme_csr_grad = extreme_csr_grad,
    .attention = attention,
    .attention_by_target = attention_by_target,
    .attention_by_source = attention_by_source,
    .gather_rows = gather_rows,
    .scatter_add_rows = scatter_add_rows,
    .keyed_dropout = keyed_dropout,
    .keyed_uniform = keyed_uniform,
    .keyed_normal = keyed_normal,
    .keyed_permutation = keyed_permutation,
    .restrict_csr = restrict_csr,
    .transpose_csr = transpose_csr,
    .equals_transpose_csr = equals_transpose_csr,
    .find_sorted = find_sorted,
    .bipartite_matching = pyg_dist::bipartite_matching,
    .norm_relu_dropout = norm_relu_dropout,
    .norm_relu_dropout_grad = norm_relu_dropout_grad,
    .relu = relu,
    .relu_grad = relu_grad,
    .quantize_csr = quantize_csr,
    .dequantize_csr_add = dequantize_csr_add,
};

}  // namespace pyg_dist::cpu
