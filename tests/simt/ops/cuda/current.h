// csrc/ops/cuda/current.h for CPU tensors: kernels run where they are launched, and what has none is the CPU's.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "cuda/queue.h"
#include "ops/device.h"

namespace pyg_dist::cuda {

inline constexpr DeviceType kDevice = DeviceType::CPU;
inline constexpr const char* kIsa = "simt";

inline int32_t current_device() { return -1; }
inline gpu::Stream current_stream() { return nullptr; }

inline DeviceOps table_without_kernels() { return *device_ops("simt", torch::stable::Device(DeviceType::CPU)); }

}  // namespace pyg_dist::cuda
