// The CPU's table: threads (parallel.h) and memory (block_pool.h) for the kernels of csrc/cpu/.
#pragma once

#include "cpu/table.h"
#include "ops/device.h"

namespace pyg_dist::cpu {

inline const char* isa() { return kernels().isa; }
Tensor allocate(const Tensor& like, Sizes sizes, ScalarType dtype, size_t num_bytes);
RowptrScan scan_rowptr(const int64_t* rowptr, int64_t num_rows);

#define PYG_DIST_FUNCTION(result, op, ...) result op(__VA_ARGS__);
PYG_DIST_FOR_EACH_OP(PYG_DIST_FUNCTION)

#define PYG_DIST_ADDRESS(result, op, ...) .op = op,
inline constexpr DeviceOps kOps = {.name = "cpu",
                                   .isa = isa,
                                   .allocate = allocate,
                                   .scan_rowptr = scan_rowptr,
                                   .raise_bad_index = nullptr,
                                   PYG_DIST_FOR_EACH_OP(PYG_DIST_ADDRESS)};

}  // namespace pyg_dist::cpu
