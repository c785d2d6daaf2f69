// The GPUs' table: the kernels of csrc/cuda/ on the current stream, in a library of its own, which loads where torch
// has CUDA.

#include <map>
#include <mutex>
#include <vector>

#include "cuda/kernels.h"
#include "ops/cuda/current.h"

namespace pyg_dist::cuda {
namespace {

// What kernels have found, by device; none before its first op with indices.
std::mutex mutex;
std::map<int32_t, gpu::BadIndexes> found_on;

gpu::BadIndexes found_here() {
  const std::lock_guard lock(mutex);
  const int32_t device = current_device();
  const auto known = found_on.find(device);
  return known != found_on.end() ? known->second : found_on.emplace(device, gpu::new_bad_indexes()).first->second;
}

// Kernels do not wait for each other, nor does anybody for them: an index may be found out of range when the op that
// had it has long returned.
void raise_bad_index() {
  const std::lock_guard lock(mutex);
  if (found_on.empty()) return;  // and perhaps no device has started
  const auto known = found_on.find(current_device());
  if (known == found_on.end()) return;
  if (const auto bad = gpu::take_bad_index(known->second, current_stream())) {
    fail(bad->op, ": expected '", bad->name, "' to lie in [0, ", bad->size, "), got ", bad->value, " at position ",
         bad->position);
  }
}

// The current stream, and memory of torch's that its work may use after this is gone: torch gives it to what comes
// later on that stream. Every op makes one, and so raises what earlier ones have found.
class CurrentQueue {
 public:
  CurrentQueue() : queue_{current_stream(), [this](int64_t num_bytes) { return allocate(num_bytes); }} {
    raise_bad_index();
  }
  CurrentQueue(const CurrentQueue&) = delete;
  CurrentQueue& operator=(const CurrentQueue&) = delete;

  operator const gpu::Queue&() const { return queue_; }

 private:
  void* allocate(int64_t num_bytes) {
    held_.push_back(torch::stable::empty({num_bytes}, ScalarType::Byte, std::nullopt,
                                         torch::stable::Device(kDevice, static_cast<int16_t>(current_device()))));
    return held_.back().mutable_data_ptr();
  }

  std::vector<Tensor> held_;
  gpu::Queue queue_;
};

// An op with indices, which raises its own where kernels run at once.
template <class Problem, void (*kKernel)(const Problem&, const gpu::IndexCheck&, const gpu::Queue&)>
BadIndex launch_checked(const Problem& problem, const char* op, const char* name) {
  kKernel(problem, {op, name, found_here()}, CurrentQueue());
  raise_bad_index();
  return {};
}

void scatter_add_rows(const ScatterAddRows& problem, const gpu::IndexCheck& check, const gpu::Queue& queue) {
  gpu::scatter_add_rows(problem, check, queue);
}

void spmm_csr(const SpmmCsr& problem, const Tensor&, SpmmForm) { gpu::spmm_csr(problem, CurrentQueue()); }

// An op that needs its problem alone.
template <class Problem, void (*kKernel)(const Problem&, const gpu::Queue&)>
void launch(const Problem& problem) {
  kKernel(problem, CurrentQueue());
}

SpmmForm spmm_csr_guess(int64_t, int64_t, const Tensor&) { return SpmmForm::any; }

DeviceOps table() {
  DeviceOps ops = table_without_kernels();
  ops.isa = [] { return kIsa; };
  ops.raise_bad_index = raise_bad_index;
  ops.spmm_csr = spmm_csr;
  ops.spmm_csr_guess = spmm_csr_guess;
  ops.extreme_csr = launch<ExtremeCsr, gpu::extreme_csr>;
  ops.extreme_csr_shares = launch<ExtremeCsr, gpu::extreme_csr_shares>;
  ops.extreme_csr_grad = launch<ExtremeCsr, gpu::extreme_csr_grad>;
  ops.attention = launch<AttentionForward, gpu::attention>;
  ops.attention_by_target = launch<AttentionGrad, gpu::attention_by_target>;
  ops.attention_by_source = launch<AttentionGrad, gpu::attention_by_source>;
  ops.gather_rows = [](const GatherRows& problem) {
    return launch_checked<GatherRows, gpu::gather_rows>(problem, "gather_rows", "index");
  };
  ops.scatter_add_rows = [](const ScatterAddRows& problem) {
    return launch_checked<ScatterAddRows, scatter_add_rows>(problem, "scatter_add_rows", "index");
  };
  ops.keyed_permutation = [](const KeyedPermutation& problem) {
    return launch_checked<KeyedPermutation, gpu::keyed_permutation>(problem, "keyed_permutation", "place");
  };
  ops.transpose_csr = [](const TransposeCsr& problem) {
    return launch_checked<TransposeCsr, gpu::transpose_csr>(problem, "transpose_csr", "col");
  };
  ops.restrict_csr = [](const RestrictCsr& problem, const MakeEntries& make_entries) {
    return gpu::restrict_csr(problem, make_entries, CurrentQueue());
  };
  ops.find_sorted = launch<FindSorted, gpu::find_sorted>;
  ops.keyed_dropout = launch<KeyedDropout, gpu::keyed_dropout>;
  ops.keyed_uniform = launch<KeyedNumbers, gpu::keyed_uniform>;
  ops.keyed_normal = launch<KeyedNumbers, gpu::keyed_normal>;
  ops.norm_relu_dropout = launch<NormReLUDropout, gpu::norm_relu_dropout>;
  ops.norm_relu_dropout_grad = launch<NormReLUDropoutGrad, gpu::norm_relu_dropout_grad>;
  ops.quantize_csr = launch<QuantizeCsr, gpu::quantize_csr>;
  ops.dequantize_csr_add = launch<DequantizeCsr, gpu::dequantize_csr_add>;
  ops.sddmm_csr = launch<SddmmCsr, gpu::sddmm_csr>;
  return ops;
}

[[maybe_unused]] const bool is_known = [] {
  static const DeviceOps ops = table();
  set_device_ops(kDevice, ops, PYG_DIST_TABLE_HASH);
  return true;
}();

}  // namespace
}  // namespace pyg_dist::cuda
