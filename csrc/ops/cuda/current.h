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
  return {.name = "cuda",
          .isa = nullptr,
          .allocate = allocate,
          .scan_rowptr = nullptr,
          .raise_bad_index = nullptr,
#define PYG_DIST_NO_KERNEL(result, op, ...) .op = no_kernel(&DeviceOps::op),
          PYG_DIST_FOR_EACH_OP(PYG_DIST_NO_KERNEL)};
}

}  // namespace pyg_dist::cuda
