// The kernels for GPUs: each has the problem of csrc/kernels/<op>.h and a queue to launch on, and waits for nothing.
#pragma once

#include "cuda/bad_index.h"
#include "cuda/queue.h"
#include "kernels/extreme_csr.h"
#include "kernels/gather_rows.h"
#include "kernels/spmm_csr.h"

namespace pyg_dist::gpu {

void spmm_csr(const SpmmCsr& problem, const Queue& queue);

void extreme_csr(const ExtremeCsr& problem, const Queue& queue);
void extreme_csr_shares(const ExtremeCsr& problem, const Queue& queue);
void extreme_csr_grad(const ExtremeCsr& problem, const Queue& queue);

// A row whose index is out of range is left as it was, and the cell says so in the name of `op`.
void gather_rows(const GatherRows& problem, const char* op, BadIndexCell* cell, const Queue& queue);

}  // namespace pyg_dist::gpu
