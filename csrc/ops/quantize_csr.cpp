#include "formats/packed_rows.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

// Whole rows, one after another.
void check_packed(const char* op, const Tensor& packed, int64_t num_columns, int64_t bits) {
  PYG_DIST_CHECK(bits == 2 || bits == 4 || bits == 8 || bits == 16, op, ": expected 'bits' to be 2, 4, 8 or 16, got ",
                 bits);
  const int64_t row_bytes = num_columns == 0 ? 0 : packed_row_bytes(num_columns, static_cast<int>(bits));
  PYG_DIST_CHECK(packed.dim() == 2 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                     packed.size(1) == row_bytes,
                 op, ": expected 'packed' to be contiguous uint8 rows of ", row_bytes, " bytes, got shape ",
                 shape_of(packed), ", dtype ", toString(packed.scalar_type()));
}

void quantize_csr_into(Tensor packed, Tensor bad_row, Tensor rowptr, Tensor col, Tensor x, MaybeTensor weight,
                       MaybeTensor col_scale, int64_t bits, MaybeTensor key, int64_t seed) {
  const char* op = "quantize_csr";
  const auto device = device_of(op, x, packed, bad_row, rowptr, col, weight, col_scale, key);
  check_csr(op, device, rowptr, col);
  check_rows(op, "x", x);
  check_packed(op, packed, x.size(1), bits);
  check_vector(op, "bad_row", bad_row, ScalarType::Long, 1);
  check_gathered(op, "x", x, col);
  const int64_t num_rows = rowptr.size(0) - 1;
  PYG_DIST_CHECK(packed.size(0) == num_rows, op, ": expected 'packed' to have ", num_rows, " rows, got ",
                 packed.size(0));
  if (key) check_vector(op, "key", *key, ScalarType::Long, num_rows);
  check_apart(op, "packed", packed, "rowptr", rowptr);
  check_apart(op, "packed", packed, "col", col);
  check_apart(op, "packed", packed, "x", x);
  check_apart(op, "packed", packed, "weight", weight);
  check_apart(op, "packed", packed, "col_scale", col_scale);
  check_apart(op, "packed", packed, "key", key);
  const Element element = element_of(op, "x", x.scalar_type());
  const SpmmCsr sums{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .weight = vector_data(op, "weight", weight, element, col.size(0)),
      .row_scale = nullptr,
      .col_scale = vector_data(op, "col_scale", col_scale, element, x.size(0)),
      .out = nullptr,
      .num_rows = num_rows,
      .num_source_rows = x.size(0),
      .num_edges = col.size(0),
      .num_features = x.size(1),
      .x_stride = x.stride(0),
      .out_stride = x.size(1),
      .x_element = element,
      .out_element = accumulator_of(element),
      .accumulate = false,
      .divide = false,
  };
  device->quantize_csr({
      .sums = sums,
      .key = key ? static_cast<const int64_t*>(key->const_data_ptr()) : nullptr,
      .packed = static_cast<uint8_t*>(packed.mutable_data_ptr()),
      .bad_row = static_cast<int64_t*>(bad_row.mutable_data_ptr()),
      .seed = static_cast<uint64_t>(seed),
      .bits = static_cast<int>(bits),
  });
}

void dequantize_csr_add(Tensor out, Tensor rowptr, Tensor col, Tensor packed, MaybeTensor weight, MaybeTensor row_scale,
                        int64_t bits) {
  const char* op = "dequantize_csr_add";
  const auto device = device_of(op, out, rowptr, col, packed, weight, row_scale);
  check_csr(op, device, rowptr, col);
  check_written_rows(op, "out", out);
  check_packed(op, packed, out.size(1), bits);
  const int64_t num_rows = rowptr.size(0) - 1;
  PYG_DIST_CHECK(out.size(0) == num_rows, op, ": expected 'out' to have ", num_rows, " rows, got ", out.size(0));
  check_gathered(op, "packed", packed, col);
  check_apart(op, "out", out, "rowptr", rowptr);
  check_apart(op, "out", out, "col", col);
  check_apart(op, "out", out, "packed", packed);
  check_apart(op, "out", out, "weight", weight);
  check_apart(op, "out", out, "row_scale", row_scale);
  const Element element = element_of(op, "out", out.scalar_type());
  const DequantizeCsr problem{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .packed = static_cast<const uint8_t*>(packed.const_data_ptr()),
      .packed_end = static_cast<const uint8_t*>(packed.const_data_ptr()) + packed.numel(),
      .weight = vector_data(op, "weight", weight, element, col.size(0)),
      .row_scale = vector_data(op, "row_scale", row_scale, element, num_rows),
      .out = out.mutable_data_ptr(),
      .num_rows = num_rows,
      .num_edges = col.size(0),
      .num_columns = out.size(1),
      .out_stride = out.stride(0),
      .bits = static_cast<int>(bits),
      .element = element,
  };
  if (num_rows > 0 && problem.num_columns > 0) device->dequantize_csr_add(problem);
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("quantize_csr_into", TORCH_BOX(&quantize_csr_into));
  m.impl("dequantize_csr_add", TORCH_BOX(&dequantize_csr_add));
}

}  // namespace pyg_dist
