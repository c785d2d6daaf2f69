// Outputs in huge pages.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "ops/check.h"

#if defined(__linux__)
#  include <sys/mman.h>
#endif

namespace pyg_dist {

// Asks for huge pages behind a fresh tensor. glibc maps every block over 32 MiB anew, and a page fault for each 4 KiB
// of it costs more than most kernels that fill it: docs/performance.md. A hint; where it is refused nothing changes.
inline const Tensor& in_huge_pages(const Tensor& fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 1 << 21;
  constexpr int64_t kWorthIt = 8 << 20;
  const int64_t num_bytes = fresh.numel() * static_cast<int64_t>(fresh.element_size());
  if (num_bytes >= kWorthIt) {
    const auto address = reinterpret_cast<uintptr_t>(fresh.const_data_ptr());
    const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t end = (address + static_cast<uintptr_t>(num_bytes)) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return fresh;
}

}  // namespace pyg_dist
