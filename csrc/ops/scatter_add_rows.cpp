#include "kernels/scatter_add_rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "kernels/cpu/table.h"
#include "ops/cpu/parallel.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

// Below this many additions, starting the threads costs more than they save.
constexpr int64_t kWorkPerOwner = 1 << 15;

void scatter_add_rows(Tensor out, Tensor index, Tensor rows) {
  check_written_rows("scatter_add_rows", "out", out);
  check_vector("scatter_add_rows", "index", index, ScalarType::Long);
  check_rows("scatter_add_rows", "rows", rows);
  check_same_dtype("scatter_add_rows", "rows", rows, "out", out);
  PYG_DIST_CHECK(rows.size(0) == index.size(0) && rows.size(1) == out.size(1),
                 "scatter_add_rows: expected 'rows' to have shape [", index.size(0), ", ", out.size(1), "], got ",
                 shape_of(rows));
  check_apart("scatter_add_rows", "out", out, "index", index);
  check_apart("scatter_add_rows", "out", out, "rows", rows);
  const auto* begin = static_cast<const int64_t*>(index.const_data_ptr());
  const auto in_range = [size = out.size(0)](int64_t i) { return i >= 0 && i < size; };
  if (!std::all_of(begin, begin + index.size(0), in_range)) {
    fail_out_of_range("scatter_add_rows", index, out.size(0));
  }
  const int64_t num_threads = torch::stable::get_num_threads();
  const ScatterAddRows problem{
      .index = begin,
      .rows = rows.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .num_rows = index.size(0),
      .num_features = out.size(1),
      .rows_stride = rows.stride(0),
      .out_stride = out.stride(0),
      .num_owners = std::clamp<int64_t>(rows.numel() / kWorkPerOwner, 1, num_threads),
      .element = element_of("scatter_add_rows", "out", out.scalar_type()),
  };
  for_each_chunk(problem.num_owners, [&](int64_t owner) { kernels().scatter_add_owned(problem, owner, owner + 1); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) { m.impl("scatter_add_rows", TORCH_BOX(&scatter_add_rows)); }

}  // namespace pyg_dist
