#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "kernels/cpu/table.h"
#include "ops/cpu/parallel.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

// As in spmm_csr: about 2^18 multiplications a chunk.
constexpr int64_t kWorkPerChunk = 1 << 18;

Tensor sddmm_csr(Tensor rowptr, Tensor col, Tensor a, Tensor b) {
  check_csr("sddmm_csr", rowptr, col);
  check_rows("sddmm_csr", "a", a);
  check_rows("sddmm_csr", "b", b);
  check_same_dtype("sddmm_csr", "b", b, "a", a);
  const Element element = element_of("sddmm_csr", "a", a.scalar_type());
  PYG_DIST_CHECK(a.size(0) == rowptr.size(0) - 1, "sddmm_csr: expected 'a' to have the ", rowptr.size(0) - 1,
                 " rows of the pattern, got ", a.size(0));
  PYG_DIST_CHECK(a.size(1) == b.size(1), "sddmm_csr: expected 'a' and 'b' to have as many columns, got ", a.size(1),
                 " and ", b.size(1));
  PYG_DIST_CHECK(b.size(0) > 0 || col.size(0) == 0, "sddmm_csr: expected 'b' to have rows for ", col.size(0),
                 " edges, got none");
  const Tensor out = torch::stable::new_empty(a, {col.size(0)}, accumulator_dtype(element));
  const SddmmCsr problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .a = a.const_data_ptr(),
      .b = b.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_rows = a.size(0),
      .num_edges = col.size(0),
      .num_features = a.size(1),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .element = element,
  };
  for_each_range(problem.num_edges, kWorkPerChunk / std::max<int64_t>(problem.num_features, 16),
                 [&](int64_t begin, int64_t end) { kernels().sddmm_edges(problem, begin, end); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) { m.impl("sddmm_csr", TORCH_BOX(&sddmm_csr)); }

}  // namespace pyg_dist
