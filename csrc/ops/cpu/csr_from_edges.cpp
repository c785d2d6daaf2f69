#include "ops/allocate.h"
#include "ops/cpu/counting_sort.h"
#include "ops/cpu/device.h"

namespace pyg_dist::cpu {

void csr_from_edges(const CsrFromEdges& problem, bool is_sorted, const Tensor& like) {
  if (is_sorted) return copy_sorted(problem);
  const Tensor scratch = new_output(like, {sort_scratch(problem)}, ScalarType::Byte);
  sort_entries(problem, scratch.mutable_data_ptr());
}

}  // namespace pyg_dist::cpu
