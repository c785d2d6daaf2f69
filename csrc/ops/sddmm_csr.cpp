#include "ops/allocate.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

Tensor sddmm_csr(Tensor rowptr, Tensor col, Tensor a, Tensor b) {
  const char* op = "sddmm_csr";
  const auto device = device_of(op, a, rowptr, col, b);
  check_csr(op, device, rowptr, col);
  check_rows(op, "a", a);
  check_rows(op, "b", b);
  check_same_dtype(op, "b", b, "a", a);
  const Element element = element_of(op, "a", a.scalar_type());
  PYG_DIST_CHECK(a.size(0) == rowptr.size(0) - 1, op, ": expected 'a' to have the ", rowptr.size(0) - 1,
                 " rows of the pattern, got ", a.size(0));
  PYG_DIST_CHECK(a.size(1) == b.size(1), op, ": expected 'a' and 'b' to have as many columns, got ", a.size(1), " and ",
                 b.size(1));
  check_gathered(op, "b", b, col);
  const Tensor out = new_output(a, {col.size(0)}, accumulator_dtype(element));
  device->sddmm_csr({
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
  });
  return out;
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("sddmm_csr", TORCH_BOX(&sddmm_csr)); }

}  // namespace pyg_dist
