#include "ops/allocate.h"
#include "ops/csr.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

constexpr const char* kOp = "spmm_csr";

// The factors of a product.
struct Factors {
  const MaybeTensor &weight, &row_scale, &col_scale;
  bool divide;
};

// How to go about a product: see problems/spmm_csr.h.
struct Way {
  SpmmForm form;
  int64_t prefetch_edges;

  Way(int64_t form_number, int64_t edges) : form(static_cast<SpmmForm>(form_number)), prefetch_edges(edges) {
    PYG_DIST_CHECK(form_number >= 0 && form_number <= 2, kOp,
                   ": expected 'form' to be 0 (any), 1 (plain) or 2 (blocks), got ", form_number);
    PYG_DIST_CHECK(edges >= 0 && edges <= kMaxPrefetchEdges, kOp, ": expected 'prefetch_edges' to be in [0, ",
                   kMaxPrefetchEdges, "], got ", edges);
  }

 private:
  static constexpr int64_t kMaxPrefetchEdges = 1 << 20;  // added to the number of an edge
};

OnDevice check(const Tensor& rowptr, const Tensor& col, const Tensor& x, const Factors& f) {
  OnDevice device = device_of(kOp, x, rowptr, col, f.weight, f.row_scale, f.col_scale);
  check_csr(kOp, device, rowptr, col);
  check_rows(kOp, "x", x);
  check_gathered(kOp, "x", x, col);
  return device;
}

void multiply(const OnDevice& device, const Tensor& out, bool accumulate, const Tensor& rowptr, const Tensor& col,
              const Tensor& x, const Factors& f, const Way& way) {
  const Element element = element_of(kOp, "x", x.scalar_type());
  const int64_t num_rows = rowptr.size(0) - 1;
  const SpmmCsr problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .weight = vector_data(kOp, "weight", f.weight, element, col.size(0)),
      .row_scale = vector_data(kOp, "row_scale", f.row_scale, element, num_rows),
      .col_scale = vector_data(kOp, "col_scale", f.col_scale, element, x.size(0)),
      .out = out.mutable_data_ptr(),
      .num_rows = num_rows,
      .num_source_rows = x.size(0),
      .num_edges = col.size(0),
      .num_features = x.size(1),
      .x_stride = x.stride(0),
      .out_stride = out.stride(0),
      .x_element = element,
      .out_element = element,
      .accumulate = accumulate,
      .divide = f.divide,
      .prefetch_edges = way.prefetch_edges,
  };
  if (num_rows > 0 && problem.num_features > 0) device->spmm_csr(problem, x, way.form);
}

Tensor spmm_csr(Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale, MaybeTensor col_scale,
                bool divide, int64_t form, int64_t prefetch_edges) {
  const Factors factors{weight, row_scale, col_scale, divide};
  const auto device = check(rowptr, col, x, factors);
  const Tensor out = new_output(x, {rowptr.size(0) - 1, x.size(1)});
  multiply(device, out, false, rowptr, col, x, factors, {form, prefetch_edges});
  return out;
}

void multiply_into(const Tensor& out, bool accumulate, const Tensor& rowptr, const Tensor& col, const Tensor& x,
                   const Factors& f, const Way& way) {
  device_of(kOp, x, out);
  const auto device = check(rowptr, col, x, f);
  check_written_rows(kOp, "out", out);
  check_same_dtype(kOp, "out", out, "x", x);
  check_shape(kOp, "out", out, rowptr.size(0) - 1, x.size(1));
  check_apart(kOp, "out", out, "rowptr", rowptr);
  check_apart(kOp, "out", out, "col", col);
  check_apart(kOp, "out", out, "x", x);
  check_apart(kOp, "out", out, "weight", f.weight);
  check_apart(kOp, "out", out, "row_scale", f.row_scale);
  check_apart(kOp, "out", out, "col_scale", f.col_scale);
  multiply(device, out, accumulate, rowptr, col, x, f, way);
}

void spmm_csr_into(Tensor out, Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale,
                   MaybeTensor col_scale, bool divide, int64_t form, int64_t prefetch_edges) {
  multiply_into(out, false, rowptr, col, x, {weight, row_scale, col_scale, divide}, {form, prefetch_edges});
}

void spmm_csr_add(Tensor out, Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight, MaybeTensor row_scale,
                  MaybeTensor col_scale, bool divide, int64_t form, int64_t prefetch_edges) {
  multiply_into(out, true, rowptr, col, x, {weight, row_scale, col_scale, divide}, {form, prefetch_edges});
}

int64_t spmm_csr_guess(Tensor rowptr, Tensor col, Tensor x) {
  const auto device = device_of(kOp, x, rowptr, col);
  check_rows(kOp, "x", x);
  return static_cast<int64_t>(device->spmm_csr_guess(rowptr.numel() - 1, col.numel(), x));
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("spmm_csr", TORCH_BOX(&spmm_csr));
  m.impl("spmm_csr_guess", TORCH_BOX(&spmm_csr_guess));
  m.impl("spmm_csr_into", TORCH_BOX(&spmm_csr_into));
  m.impl("spmm_csr_add", TORCH_BOX(&spmm_csr_add));
}

}  // namespace pyg_dist
