// The kernels for GPUs: each has the problem of csrc/problems/<op>.h and a queue to launch on, and waits for nothing
// (but restrict_csr).
#pragma once

#include "cuda/bad_index.h"
#include "cuda/queue.h"
#include "problems/attention.h"
#include "problems/dequantize_csr.h"
#include "problems/extreme_csr.h"
#include "problems/gather_rows.h"
#include "problems/keyed.h"
#include "problems/norm_relu_dropout.h"
#include "problems/patterns.h"
#include "problems/quantize_csr.h"
#include "problems/scatter_add_rows.h"
#include "problems/sddmm_csr.h"
#include "problems/spmm_csr.h"

namespace pyg_dist::gpu {

void spmm_csr(const SpmmCsr& problem, const Queue& queue);

void sddmm_csr(const SddmmCsr& problem, const Queue& queue);

void keyed_dropout(const KeyedDropout& problem, const Queue& queue);
void keyed_uniform(const KeyedNumbers& problem, const Queue& queue);
void keyed_normal(const KeyedNumbers& problem, const Queue& queue);

void norm_relu_dropout(const NormReLUDropout& problem, const Queue& queue);
void norm_relu_dropout_grad(const NormReLUDropoutGrad& problem, const Queue& queue);

void extreme_csr(const ExtremeCsr& problem, const Queue& queue);
void extreme_csr_shares(const ExtremeCsr& problem, const Queue& queue);
void extreme_csr_grad(const ExtremeCsr& problem, const Queue& queue);

void attention(const AttentionForward& problem, const Queue& queue);
void attention_by_target(const AttentionGrad& problem, const Queue& queue);
void attention_by_source(const AttentionGrad& problem, const Queue& queue);
// Parts of attention_by_target, where they are asked for.
void attention_by_edge_attr(const AttentionGrad& problem, const Queue& queue);
void attention_by_parameters(const AttentionGrad& problem, const Queue& queue);

void find_sorted(const FindSorted& problem, const Queue& queue);

// Waits once, for the number of entries: outputs of that length are made then.
BadRestriction restrict_csr(const RestrictCsr& problem, const MakeEntries& make_entries, const Queue& queue);

void quantize_csr(const QuantizeCsr& problem, const Queue& queue);
void dequantize_csr_add(const DequantizeCsr& problem, const Queue& queue);

// An index that is out of range counts for nothing, and the check's cell says so.
void gather_rows(const GatherRows& problem, const IndexCheck& check, const Queue& queue);
// By pieces of so many rows, since a sort has fewer than 2^31.
void scatter_add_rows(const ScatterAddRows& problem, const IndexCheck& check, const Queue& queue,
                      int64_t most_rows = INT32_MAX);
void keyed_permutation(const KeyedPermutation& problem, const IndexCheck& check, const Queue& queue);
void transpose_csr(const TransposeCsr& problem, const IndexCheck& check, const Queue& queue);

}  // namespace pyg_dist::gpu
