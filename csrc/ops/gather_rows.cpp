#include "kernels/gather_rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "ops/allocate.h"
#include "ops/cpu/parallel.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

constexpr int64_t kBytesPerChunk = 1 << 18;

void gather(const Tensor& x, const Tensor& index, const Tensor& out) {
  const auto element_bytes = static_cast<int64_t>(x.element_size());
  const GatherRows problem{
      .x = static_cast<const char*>(x.const_data_ptr()),
      .index = static_cast<const int64_t*>(index.const_data_ptr()),
      .out = static_cast<char*>(out.mutable_data_ptr()),
      .num_source_rows = x.size(0),
      .num_rows = index.size(0),
      .row_bytes = x.size(1) * element_bytes,
      .x_stride = x.stride(0) * element_bytes,
      .out_stride = out.stride(0) * element_bytes,
  };
  std::atomic<bool> in_range{true};
  for_each_range(problem.num_rows, kBytesPerChunk / std::max<int64_t>(problem.row_bytes, 16),
                 [&](int64_t begin, int64_t end) {
                   if (!gather_rows(problem, begin, end)) in_range.store(false, std::memory_order_relaxed);
                 });
  if (!in_range) fail_out_of_range("gather_rows", index, x.size(0));
}

Tensor gather_rows_new(Tensor x, Tensor index) {
  check_rows("gather_rows", "x", x);
  check_vector("gather_rows", "index", index, ScalarType::Long);
  const Tensor out = new_output(x, {index.size(0), x.size(1)});
  gather(x, index, out);
  return out;
}

void gather_rows_into(Tensor out, Tensor x, Tensor index) {
  check_rows("gather_rows", "x", x);
  check_vector("gather_rows", "index", index, ScalarType::Long);
  check_written_rows("gather_rows", "out", out);
  check_same_dtype("gather_rows", "out", out, "x", x);
  PYG_DIST_CHECK(out.size(0) == index.size(0) && out.size(1) == x.size(1),
                 "gather_rows: expected 'out' to have shape [", index.size(0), ", ", x.size(1), "], got ",
                 shape_of(out));
  check_apart("gather_rows", "out", out, "x", x);
  check_apart("gather_rows", "out", out, "index", index);
  gather(x, index, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows_new));
  m.impl("gather_rows_into", TORCH_BOX(&gather_rows_into));
}

}  // namespace pyg_dist
