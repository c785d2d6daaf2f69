// The memory of outputs.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>

#include "ops/check.h"

namespace pyg_dist {

// As torch::stable::new_empty, for a CPU tensor `like`. A large one lies in huge pages that are used again
// (ops/cpu/block_pool.h), since fresh pages cost more than most kernels that fill them: its storage cannot be resized.
// Before torch 2.11 it is torch's own.
Tensor new_output(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                  std::optional<ScalarType> dtype = std::nullopt);

// With x's sizes, and without gaps.
inline Tensor new_output_like(const Tensor& x) { return new_output(x, x.sizes()); }

}  // namespace pyg_dist
