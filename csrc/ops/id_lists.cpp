#include "cpu/id_lists.h"

#include <tuple>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

constexpr const char* kOnCpu = ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()";

std::tuple<Tensor, Tensor> encode_ids_op(Tensor rows, Tensor count, bool is_ascending) {
  const char* op = "encode_ids";
  device_of(op, rows, count);
  PYG_DIST_CHECK(rows.device().type() == DeviceType::CPU, op, kOnCpu);
  check_rows(op, "rows", rows);
  PYG_DIST_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.size(1) > 0, op,
                 ": expected 'rows' to be contiguous, of dtype Long and with columns, got shape ", shape_of(rows),
                 ", dtype ", toString(rows.scalar_type()));
  check_vector(op, "count", count, ScalarType::Long);
  const auto* const counts = static_cast<const int64_t*>(count.const_data_ptr());
  int64_t sum = 0;
  for (int64_t list = 0; list < count.size(0) && sum >= 0; ++list) sum = counts[list] < 0 ? -1 : sum + counts[list];
  PYG_DIST_CHECK(sum == rows.size(0), op, ": expected 'count' to sum up to the ", rows.size(0), " rows, got ", sum);
  const IdLists lists{.num_lists = count.size(0), .num_columns = rows.size(1), .is_ascending = is_ascending};
  const auto* const ids = static_cast<const int64_t*>(rows.const_data_ptr());
  const Tensor num_bytes = new_output_like(count);
  const int64_t size = count_id_bytes(lists, ids, counts, static_cast<int64_t*>(num_bytes.mutable_data_ptr()));
  const Tensor content = new_output(count, {size}, ScalarType::Byte);
  encode_ids(lists, ids, counts, static_cast<uint8_t*>(content.mutable_data_ptr()), size);
  return {content, num_bytes};
}

std::tuple<Tensor, Tensor> decode_ids_op(Tensor content, Tensor num_bytes, int64_t num_columns, bool is_ascending) {
  const char* op = "decode_ids";
  device_of(op, content, num_bytes);
  PYG_DIST_CHECK(content.device().type() == DeviceType::CPU, op, kOnCpu);
  check_vector(op, "content", content, ScalarType::Byte);
  check_vector(op, "num_bytes", num_bytes, ScalarType::Long);
  PYG_DIST_CHECK(num_columns > 0, op, ": expected columns, got ", num_columns);
  const auto* const sizes = static_cast<const int64_t*>(num_bytes.const_data_ptr());
  int64_t sum = 0;
  for (int64_t list = 0; list < num_bytes.size(0) && sum >= 0; ++list) sum = sizes[list] < 0 ? -1 : sum + sizes[list];
  PYG_DIST_CHECK(sum == content.size(0), op, ": expected 'num_bytes' to sum up to the ", content.size(0),
                 " bytes, got ", sum);
  const IdLists lists{.num_lists = num_bytes.size(0), .num_columns = num_columns, .is_ascending = is_ascending};
  const auto* const bytes = static_cast<const uint8_t*>(content.const_data_ptr());
  const Tensor count = new_output_like(num_bytes);
  auto* const counts = static_cast<int64_t*>(count.mutable_data_ptr());
  const int64_t bad = count_ids(lists, bytes, sizes, counts);
  PYG_DIST_CHECK(bad < 0, op, ": expected the bytes of whole rows of ", num_columns, " ids, got others in list ", bad);
  int64_t num_rows = 0;
  for (int64_t list = 0; list < lists.num_lists; ++list) num_rows += counts[list];
  const Tensor rows = new_output(num_bytes, {num_rows, num_columns});
  decode_ids(lists, bytes, sum, counts, static_cast<int64_t*>(rows.mutable_data_ptr()));
  return {rows, count};
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("encode_ids", TORCH_BOX(&encode_ids_op));
  m.impl("decode_ids", TORCH_BOX(&decode_ids_op));
}

}  // namespace pyg_dist
