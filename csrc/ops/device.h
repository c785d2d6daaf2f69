// What a device does for the ops.
//
// An op's own file, ops/<op>.cpp, checks, shapes and makes the outputs, whatever the device, and then makes one call of
// the device's table with a problem of raw pointers (csrc/problems/<op>.h). A device is such a table: ops/cpu/device.h,
// ops/cuda/device.cpp; it repeats no check.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <functional>
#include <optional>
#include <string>

#include "ops/check.h"
#include "problems/attention.h"
#include "problems/bipartite_matching.h"
#include "problems/csr_from_edges.h"
#include "problems/dequantize_csr.h"
#include "problems/extreme_csr.h"
#include "problems/gather_rows.h"
#include "problems/keyed.h"
#include "problems/norm_relu_dropout.h"
#include "problems/patterns.h"
#include "problems/quantize_csr.h"
#include "problems/relu.h"
#include "problems/scatter_add_rows.h"
#include "problems/sddmm_csr.h"
#include "problems/spmm_csr.h"

#define PYG_DIST_EXPORT __attribute__((visibility("default")))

namespace pyg_dist {

using torch::headeronly::DeviceType;
using MaybeTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// What the checks want to know of values, which only their device may read.
struct RowptrScan {
  int64_t first, last;
  int64_t falls_at = -1;  // the first position with less than before it, or -1
  int64_t before = 0, after = 0;
};

// X(result, op, parameters...) for each op that kernels do; a device is a function of each.
#define PYG_DIST_FOR_EACH_OP(X)                                                                \
  X(EntriesScan, scan_entries, const CsrFromEdges& problem)                                    \
  /* All entries are inside. */                                                                \
  X(void, csr_from_edges, const CsrFromEdges& problem, bool is_sorted, const Tensor& like)     \
  /* x: what copies are made like. */                                                          \
  X(void, spmm_csr, const SpmmCsr& problem, const Tensor& x, SpmmForm form)                    \
  /* any: there is one form. */                                                                \
  X(SpmmForm, spmm_csr_guess, int64_t num_rows, int64_t num_edges, const Tensor& x)            \
  X(void, sddmm_csr, const SddmmCsr& problem)                                                  \
  X(void, extreme_csr, const ExtremeCsr& problem)                                              \
  X(void, extreme_csr_shares, const ExtremeCsr& problem)                                       \
  X(void, extreme_csr_grad, const ExtremeCsr& problem)                                         \
  X(void, attention, const AttentionForward& problem)                                          \
  X(void, attention_by_target, const AttentionGrad& problem)                                   \
  X(void, attention_by_source, const AttentionGrad& problem)                                   \
  /* In range or not, the other rows are written. */                                           \
  X(BadIndex, gather_rows, const GatherRows& problem)                                          \
  /* Where one is out of range nothing is added. */                                            \
  X(BadIndex, scatter_add_rows, const ScatterAddRows& problem)                                 \
  X(void, keyed_dropout, const KeyedDropout& problem)                                          \
  X(void, keyed_uniform, const KeyedNumbers& problem)                                          \
  X(void, keyed_normal, const KeyedNumbers& problem)                                           \
  /* Where a place is out of range, not all is written. */                                     \
  X(BadIndex, keyed_permutation, const KeyedPermutation& problem)                              \
  X(BadRestriction, restrict_csr, const RestrictCsr& problem, const MakeEntries& make_entries) \
  X(BadIndex, transpose_csr, const TransposeCsr& problem)                                      \
  X(bool, equals_transpose_csr, const int64_t* rowptr, const int32_t* col, int64_t num_rows)   \
  X(void, find_sorted, const FindSorted& problem)                                              \
  X(BadIndex, bipartite_matching, const BipartiteMatching& problem)                            \
  X(void, norm_relu_dropout, const NormReLUDropout& problem)                                   \
  X(void, norm_relu_dropout_grad, const NormReLUDropoutGrad& problem)                          \
  X(void, relu, const Relu& problem)                                                           \
  X(void, relu_grad, const ReluGrad& problem)                                                  \
  X(void, quantize_csr, const QuantizeCsr& problem)                                            \
  X(void, dequantize_csr_add, const DequantizeCsr& problem)

struct DeviceOps {
  const char* name;
  const char* (*isa)();  // the instruction set that its kernels use
  Tensor (*allocate)(const Tensor& like, Sizes sizes, ScalarType dtype, size_t num_bytes);  // uninitialised
  RowptrScan (*scan_rowptr)(const int64_t* rowptr, int64_t num_rows);  // null: a look would wait for the device
  // Throws what kernels have found since their ops returned; null: ops find all themselves.
  void (*raise_bad_index)();
#define PYG_DIST_POINTER_TO(result, op, ...) result (*op)(__VA_ARGS__);
  PYG_DIST_FOR_EACH_OP(PYG_DIST_POINTER_TO)
};

// The table for tensors on `device`, or an error that says which devices this build has.
PYG_DIST_EXPORT const DeviceOps* device_ops(const char* op, const torch::stable::Device& device);

// Another library's table for tensors on `type`. `sources` is its PYG_DIST_TABLE_HASH: where it is not this library's
// one, the two do not know the same table, and nothing changes.
PYG_DIST_EXPORT void set_device_ops(DeviceType type, const DeviceOps& ops, const char* sources);

[[noreturn]] void fail_mixed_devices(const char* op, const torch::stable::Device& one,
                                     const torch::stable::Device& other);

// A device's table, and that device as the current one as long as this lives.
class OnDevice {
 public:
  OnDevice(const char* op, const torch::stable::Device& device) : ops_(device_ops(op, device)) {
    if (device.type() != DeviceType::CPU) guard_.emplace(device.index());
  }
  const DeviceOps* operator->() const { return ops_; }
  const DeviceOps& operator*() const { return *ops_; }

 private:
  const DeviceOps* ops_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// For all the tensors of a call, which lie on one device.
template <class... Tensors>
OnDevice device_of(const char* op, const Tensor& first, const Tensors&... others) {
  const torch::stable::Device device = first.device();
  [[maybe_unused]] const auto check = [&](const MaybeTensor& other) {
    if (other && other->device() != device) fail_mixed_devices(op, device, other->device());
  };
  (check(others), ...);
  return {op, device};
}

// Defines the ops of a file for every device that a table may stand for: where there is none, device_ops says so.
#define PYG_DIST_OPS(m)                                                         \
  static void register_ops(torch::stable::detail::StableLibrary&);              \
  STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, library) { register_ops(library); }  \
  STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CUDA, library) { register_ops(library); } \
  static void register_ops(torch::stable::detail::StableLibrary& m)

}  // namespace pyg_dist
