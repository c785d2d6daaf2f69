// The memory of outputs.
#pragma once

#include "ops/device.h"

namespace pyg_dist {

// As torch::stable::new_empty. On the CPU a large one lies in huge pages that are used again (ops/cpu/block_pool.h):
// its storage cannot be resized.
Tensor new_output(const Tensor& like, Sizes sizes, std::optional<ScalarType> dtype = std::nullopt);

// With x's sizes, and without gaps.
inline Tensor new_output_like(const Tensor& x) { return new_output(x, x.sizes()); }

}  // namespace pyg_dist
