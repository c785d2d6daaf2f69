#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "ops/cpu/block_pool.h"
#include "ops/cpu/device.h"

#if defined(__linux__)
#  include <dlfcn.h>
#endif

namespace pyg_dist::cpu {
namespace {

// torch/csrc/stable/c/shim.h has it from torch 2.11 on, and this library asks for 2.10 only.
using FromBlob = AOTITorchError(void* data, int64_t num_dims, const int64_t* sizes, const int64_t* strides,
                                int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                AtenTensorHandle* out, int32_t layout, const uint8_t* metadata, int64_t metadata_size,
                                void (*deleter)(void* data, void* context), void* context);

FromBlob* find_from_blob() {
#if defined(__linux__)
  return reinterpret_cast<FromBlob*>(dlsym(RTLD_DEFAULT, "torch_from_blob"));
#else
  return nullptr;
#endif
}

// A tensor that gives its block back.
Tensor in_block(FromBlob* from_blob, void* block, Sizes sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * sizes[dim];
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = from_blob(
      block, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), aoti_torch_device_type_cpu(), -1, &handle,
      aoti_torch_layout_strided(), nullptr, 0, [](void* data, void*) { BlockPool::instance().give_back(data); },
      nullptr);
  if (error != AOTI_TORCH_SUCCESS) {
    BlockPool::instance().give_back(block);
    fail("expected torch to make a tensor of a block of memory, got error ", error);
  }
  return Tensor(handle);
}

std::tuple<int64_t, int64_t> block_bytes() {
  const auto bytes = BlockPool::instance().bytes();
  return {static_cast<int64_t>(bytes.in_use), static_cast<int64_t>(bytes.waiting)};
}

void release_blocks() { BlockPool::instance().release(); }

}  // namespace

// Before torch 2.11 all memory is torch's own.
Tensor allocate(const Tensor& like, Sizes sizes, ScalarType dtype, size_t num_bytes) {
  static FromBlob* const from_blob = find_from_blob();
  if (from_blob != nullptr && num_bytes >= BlockPool::kWorthIt) {
    if (void* const block = BlockPool::instance().take(num_bytes); block != nullptr) {
      return in_block(from_blob, block, sizes, dtype);
    }
  }
  try {
    return torch::stable::new_empty(like, sizes, dtype);
  } catch (const std::runtime_error&) {  // says neither that memory is short nor how much was asked for
    fail("output: tried to allocate ", num_bytes, " bytes, which there are not");
  }
}

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CompositeExplicitAutograd, m) {
  m.impl("block_bytes", TORCH_BOX(&block_bytes));
  m.impl("release_blocks", TORCH_BOX(&release_blocks));
}

}  // namespace pyg_dist::cpu
