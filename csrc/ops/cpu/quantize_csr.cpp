#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "formats/packed_rows.h"
#include "kernels/cpu/table.h"
#include "ops/cpu/parallel.h"
#include "ops/csr.h"

namespace pyg_dist {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Values read per chunk of rows, as for spmm_csr.
constexpr int64_t kValuesPerChunk = 1 << 18;

// Sums that wait in the first-level cache to be quantized.
constexpr int64_t kSumBytes = 1 << 14;

int64_t rows_per_chunk(int64_t num_rows, int64_t num_edges, int64_t num_columns) {
  const int64_t values_per_row = (num_edges / std::max<int64_t>(num_rows, 1) + 1) * std::max<int64_t>(num_columns, 1);
  return std::max<int64_t>(kValuesPerChunk / values_per_row, 1);
}

// Rows [row_begin, row_end): those that are a row of x as it is are quantized where they lie, the others are summed
// into a small buffer and quantized there. Each kind comes in long runs.
int64_t quantize(const SpmmCsr& sums, const QuantizeRows& rows, int64_t row_begin, int64_t row_end) {
  const int64_t n = rows.num_columns, row_bytes = packed_row_bytes(n, rows.bits);
  const bool has_factors = sums.weight != nullptr || sums.col_scale != nullptr;
  const auto is_sum = [&](int64_t row) { return has_factors || sums.rowptr[row + 1] - sums.rowptr[row] != 1; };
  const int64_t sum_bytes = rows.element == Element::f64 ? 8 : 4;
  const int64_t sums_at_once = std::max<int64_t>(kSumBytes / (n * sum_bytes), 1);
  std::unique_ptr<char[]> buffer;
  int64_t first_bad = kAllFinite;
  for (int64_t begin = row_begin, end = row_begin; begin < row_end; begin = end) {
    const bool summed = is_sum(begin);
    const int64_t limit = summed ? std::min(begin + sums_at_once, row_end) : row_end;
    while (end < limit && is_sum(end) == summed) ++end;
    QuantizeRows run = rows;
    run.key = rows.key == nullptr ? nullptr : rows.key + begin;
    run.packed = rows.packed + begin * row_bytes;
    if (summed) {
      if (buffer == nullptr) {
        buffer = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(sums_at_once * n * sum_bytes));
      }
      SpmmCsr block = sums;
      block.rowptr = sums.rowptr + begin;
      block.out = buffer.get();
      kernels().spmm_rows(block, 0, end - begin);
      run.index = nullptr;
      run.x = buffer.get();
      run.x_stride = n;
      run.element = sums.out_element;
    } else {
      run.index = sums.col + sums.rowptr[begin];
    }
    const int64_t bad = kernels().quantize_rows(run, 0, end - begin);
    if (bad != kAllFinite && first_bad == kAllFinite) first_bad = begin + bad;
  }
  return first_bad;
}

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
  check_csr(op, rowptr, col);
  check_rows(op, "x", x);
  check_packed(op, packed, x.size(1), bits);
  check_vector(op, "bad_row", bad_row, ScalarType::Long, 1);
  auto* first_bad = static_cast<int64_t*>(bad_row.mutable_data_ptr());
  *first_bad = kAllFinite;
  PYG_DIST_CHECK(x.size(0) > 0 || col.size(0) == 0, op, ": expected 'x' to have rows for ", col.size(0),
                 " edges, got none");
  const int64_t num_rows = rowptr.size(0) - 1, num_columns = x.size(1);
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
  if (num_rows == 0 || num_columns == 0) return;
  const SpmmCsr sums{
      .rowptr = static_cast<const int64_t*>(rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(col.const_data_ptr()),
      .x = x.const_data_ptr(),
      .weight = vector_data(op, "weight", weight, element, col.size(0)),
      .row_scale = nullptr,
      .col_scale = vector_data(op, "col_scale", col_scale, element, x.size(0)),
      .out = nullptr,
      .num_edges = col.size(0),
      .num_features = num_columns,
      .x_stride = x.stride(0),
      .out_stride = num_columns,
      .x_element = element,
      .out_element = element == Element::f64 ? Element::f64 : Element::f32,
      .accumulate = false,
      .divide = false,
  };
  const QuantizeRows rows{
      .key = key ? static_cast<const int64_t*>(key->const_data_ptr()) : nullptr,
      .index = nullptr,
      .x = x.const_data_ptr(),
      .packed = static_cast<uint8_t*>(packed.mutable_data_ptr()),
      .num_columns = num_columns,
      .x_stride = x.stride(0),
      .seed = static_cast<uint64_t>(seed),
      .bits = static_cast<int>(bits),
      .stochastic = key.has_value(),
      .element = element,
  };
  std::atomic<int64_t> found{kAllFinite};
  for_each_range(num_rows, rows_per_chunk(num_rows, col.size(0), num_columns), [&](int64_t begin, int64_t end) {
    const int64_t bad = quantize(sums, rows, begin, end);
    if (bad == kAllFinite) return;
    int64_t first = found.load();
    while ((first == kAllFinite || bad < first) && !found.compare_exchange_weak(first, bad)) {
    }
  });
  *first_bad = found;
}

void dequantize_csr_add(Tensor out, Tensor rowptr, Tensor col, Tensor packed, MaybeTensor weight, MaybeTensor row_scale,
                        int64_t bits) {
  const char* op = "dequantize_csr_add";
  check_csr(op, rowptr, col);
  check_written_rows(op, "out", out);
  check_packed(op, packed, out.size(1), bits);
  const int64_t num_rows = rowptr.size(0) - 1, num_columns = out.size(1);
  PYG_DIST_CHECK(out.size(0) == num_rows, op, ": expected 'out' to have ", num_rows, " rows, got ", out.size(0));
  PYG_DIST_CHECK(packed.size(0) > 0 || col.size(0) == 0, op, ": expected 'packed' to have rows for ", col.size(0),
                 " edges, got none");
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
      .num_edges = col.size(0),
      .num_columns = num_columns,
      .out_stride = out.stride(0),
      .bits = static_cast<int>(bits),
      .element = element,
  };
  if (num_rows == 0 || num_columns == 0) return;
  for_each_range(num_rows, rows_per_chunk(num_rows, col.size(0), num_columns),
                 [&](int64_t begin, int64_t end) { kernels().dequantize_add_rows(problem, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("quantize_csr_into", TORCH_BOX(&quantize_csr_into));
  m.impl("dequantize_csr_add", TORCH_BOX(&dequantize_csr_add));
}

}  // namespace pyg_dist
