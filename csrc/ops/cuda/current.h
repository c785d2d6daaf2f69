// The GPU that torch has made the current one, and its stream. tests/simt/ops/cuda/current.h stands in for it where
// there is none.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "cuda/queue.h"
#include "ops/device.h"

namespace pyg_dist::cuda {

inline constexpr DeviceType kDevice = DeviceType::CUDA;
inline constexpr const char* kIsa = PYG_DIST_CUDA_BUILD;

inline int32_t current_device() { return torch::stable::accelerator::getCurrentDeviceIndex(); }

inline gpu::Stream current_stream() {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(current_device(), &stream));
  return static_cast<gpu::Stream>(stream);
}

template <class Result, class... Arguments>
auto no_kernel(Result (*DeviceOps::*)(Arguments...)) -> Result (*)(Arguments...) {
  return [](Arguments...) -> Result {
    fail("expected tensors on cpu, where this op has its only kernel, got them on cuda; move them with .cpu()");
  };
}

inline Tensor allocate(const Tensor& like, Sizes sizes, ScalarType dtype, size_t) {
  return torch::stable::new_empty(like, sizes, dtype);
}

// The table before it gets its kernels: what a host does alone.
inline DeviceOps table_without_kernels() {
  return {
      .name = "cuda",
      .isa = nullptr,
      .allocate = allocate,
      .scan_rowptr = nullptr,
      .raise_bad_index = nullptr,
      .scan_entries = no_kernel(&DeviceOps::scan_entries),
      .csr_from_edges = no_kernel(&DeviceOps::csr_from_edges),
      .spmm_csr = no_kernel(&DeviceOps::spmm_csr),
      .spmm_csr_guess = no_kernel(&DeviceOps::spmm_csr_guess),
      .sddmm_csr = no_kernel(&DeviceOps::sddmm_csr),
      .extreme_csr = no_kernel(&DeviceOps::extreme_csr),
      .extreme_csr_shares = no_kernel(&DeviceOps::extreme_csr_shares),
      .extreme_csr_grad = no_kernel(&DeviceOps::extreme_csr_grad),
      .attention = no_kernel(&DeviceOps::attention),
      .attention_by_target = no_kernel(&DeviceOps::attention_by_target),
      .attention_by_source = no_kernel(&DeviceOps::attention_by_source),
      .gather_rows = no_kernel(&DeviceOps::gather_rows),
      .scatter_add_rows = no_kernel(&DeviceOps::scatter_add_rows),
      .keyed_dropout = no_kernel(&DeviceOps::keyed_dropout),
      .keyed_uniform = no_kernel(&DeviceOps::keyed_uniform),
      .keyed_normal = no_kernel(&DeviceOps::keyed_normal),
      .keyed_permutation = no_kernel(&DeviceOps::keyed_permutation),
      .restrict_csr = no_kernel(&DeviceOps::restrict_csr),
      .transpose_csr = no_kernel(&DeviceOps::transpose_csr),
      .equals_transpose_csr = no_kernel(&DeviceOps::equals_transpose_csr),
      .find_sorted = no_kernel(&DeviceOps::find_sorted),
      .bipartite_matching = no_kernel(&DeviceOps::bipartite_matching),
      .norm_relu_dropout = no_kernel(&DeviceOps::norm_relu_dropout),
      .norm_relu_dropout_grad = no_kernel(&DeviceOps::norm_relu_dropout_grad),
      .relu = no_kernel(&DeviceOps::relu),
      .relu_grad = no_kernel(&DeviceOps::relu_grad),
      .quantize_csr = no_kernel(&DeviceOps::quantize_csr),
      .dequantize_csr_add = no_kernel(&DeviceOps::dequantize_csr_add),
  };
}

}  // namespace pyg_dist::cuda
