#include <algorithm>

#include "cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {

void sddmm_csr(const SddmmCsr& problem) {
  constexpr int64_t kWorkPerChunk = 1 << 18;  // about as many multiplications, as in spmm_csr
  for_each_range(problem.num_edges, kWorkPerChunk / std::max<int64_t>(problem.num_features, 16),
                 [&](int64_t begin, int64_t end) { kernels().sddmm_edges(problem, begin, end); });
}

}  // namespace pyg_dist::cpu
