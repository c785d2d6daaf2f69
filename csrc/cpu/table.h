// The kernels of the instruction set in use, behind one pointer each, and those of which there is one version.
#pragma once

#include <cstdint>

#include "cpu/find_numbers.h"
#include "cpu/level.h"
#include "cpu/patterns.h"
#include "cpu/quantize_rows.h"
#include "problems/attention.h"
#include "problems/bad_index.h"
#include "problems/bipartite_matching.h"
#include "problems/dequantize_csr.h"
#include "problems/extreme_csr.h"
#include "problems/gather_rows.h"
#include "problems/keyed.h"
#include "problems/norm_relu_dropout.h"
#include "problems/relu.h"
#include "problems/scatter_add_rows.h"
#include "problems/sddmm_csr.h"
#include "problems/spmm_csr.h"

namespace pyg_dist {

// X(result, kernel, problem) for each: result kernel(const problem&, int64_t begin, int64_t end) does a part of the
// work, by rows of the output unless its name says otherwise. quantize_rows returns the first bad row or kAllFinite,
// filter_rows how many entries it has kept.
#define PYG_DIST_FOR_EACH_KERNEL(X)                  \
  X(void, spmm_rows, SpmmCsr)                        \
  X(void, sddmm_edges, SddmmCsr)                     \
  X(void, extreme_rows, ExtremeCsr)                  \
  X(void, extreme_share_rows, ExtremeCsr)            \
  X(void, extreme_grad_rows, ExtremeCsr)             \
  X(void, attention_rows, AttentionForward)          \
  X(void, attention_target_rows, AttentionGrad)      \
  X(void, attention_source_rows, AttentionGrad)      \
  X(void, scatter_add_places, ScatterAddRows)        \
  X(void, dropout_rows, KeyedDropout)                \
  X(void, uniform_rows, KeyedNumbers)                \
  X(void, epilogue_rows, NormReLUDropout)            \
  X(void, epilogue_grad_groups, NormReLUDropoutGrad) \
  X(int64_t, quantize_rows, QuantizeRows)            \
  X(int64_t, filter_rows, FilterRows)                \
  X(void, remap_entries, RemapEntries)               \
  X(void, find_in_windows, FindInWindows)            \
  X(void, dequantize_add_rows, DequantizeCsr)

#define PYG_DIST_DECLARE(result, kernel, problem) result kernel(const problem& p, int64_t begin, int64_t end);
#define PYG_DIST_DECLARE_LEVEL(level)        \
  namespace level {                          \
  PYG_DIST_FOR_EACH_KERNEL(PYG_DIST_DECLARE) \
  }
PYG_DIST_FOR_EACH_LEVEL(PYG_DIST_DECLARE_LEVEL)

struct Kernels {
  const char* isa;
#define PYG_DIST_POINTER(result, kernel, problem) result (*kernel)(const problem& p, int64_t begin, int64_t end);
  PYG_DIST_FOR_EACH_KERNEL(PYG_DIST_POINTER)
};

// Chosen at the first call: PYG_DIST_ISA if set, else the best level of this machine. Throws std::runtime_error when
// the environment asks for a level that is unknown or that this machine lacks.
const Kernels& kernels();

// The C library's memcpy chooses its own instruction set. False if an index is out of range; its row is left as it was.
bool gather_rows(const GatherRows& p, int64_t row_begin, int64_t row_end);

// Equal to the last bit at every instruction set, since the C library's logarithm, sine and cosine are.
void normal_rows(const KeyedNumbers& p, int64_t row_begin, int64_t row_end);

// Integers of 64 bits, whose product no instruction set before AVX-512 has. False if a place is out of range.
bool permute_places(const KeyedPermutation& p, int64_t begin, int64_t end);

// By one thread. The first entry whose column is out of range; where there is one, nothing is written.
BadIndex bipartite_matching(const BipartiteMatching& p);

// Memory sets the pace: plain loops, which compilers turn into vectors of the baseline, are as fast as wider ones. The
// first element is a multiple of 8.
void relu_elements(const Relu& p, int64_t begin, int64_t end);
void relu_grad_elements(const ReluGrad& p, int64_t begin, int64_t end);

}  // namespace pyg_dist
