#include "cpu/crossing_edges.h"

#include <limits>
#include <tuple>
#include <vector>

#include "ops/allocate.h"

namespace pyg_dist {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> crossing_edges_op(Tensor source, Tensor target, int64_t num_nodes,
                                                             Tensor run, int64_t rank, int64_t num_ranks) {
  const char* op = "crossing_edges";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  device_of(op, source, target, run);
  PYG_DIST_CHECK(source.device().type() == DeviceType::CPU, op,
                 ": expected tensors on cpu, where this op has its only kernel; move them with .cpu()");
  const Integers sources = integers_of(op, "source", source, source.numel());
  check_vector(op, "target", target, ScalarType::Long, source.size(0));
  check_rows(op, "run", run);
  PYG_DIST_CHECK(run.scalar_type() == ScalarType::Long && run.is_contiguous() && run.size(1) == 4, op,
                 ": expected 'run' to be contiguous, of dtype Long and with four columns, got shape ", shape_of(run),
                 ", dtype ", toString(run.scalar_type()));
  PYG_DIST_CHECK(0 <= rank && rank < num_ranks && num_ranks <= kMost, op, ": expected 'rank' to lie in [0, ", num_ranks,
                 "), got ", rank);
  PYG_DIST_CHECK(0 <= num_nodes && num_nodes <= kMost, op, ": expected fewer than 2^31 nodes, got ", num_nodes);
  const Tensor count = new_output(target, {num_ranks});
  const CrossingEdges problem{
      .source = sources,
      .target = static_cast<const int64_t*>(target.const_data_ptr()),
      .run = static_cast<const NodeRun*>(run.const_data_ptr()),
      .num_edges = source.size(0),
      .num_nodes = num_nodes,
      .num_runs = run.size(0),
      .rank = rank,
      .num_ranks = num_ranks,
      .count = static_cast<int64_t*>(count.mutable_data_ptr()),
  };
  std::vector<NodeSlot> begin;
  const BadCrossing bad = count_crossing(problem, begin);
  PYG_DIST_CHECK(bad.run.position < 0, op, ": expected nodes and ranks in 'run', got row ", bad.run.position,
                 ", which begins at place ", bad.run.value);
  PYG_DIST_CHECK(bad.source.position < 0, op, ": expected 'source' to lie in [0, ", num_nodes, "), got ",
                 bad.source.value, " at position ", bad.source.position);
  const int64_t num_crossing = problem.num_edges - problem.count[rank];
  const Tensor order = new_output(target, {problem.num_edges});
  const Tensor targets = new_output(target, {num_crossing}), slots = new_output(target, {num_crossing});
  split_crossing(problem, begin, static_cast<int64_t*>(order.mutable_data_ptr()),
                 static_cast<int64_t*>(targets.mutable_data_ptr()), static_cast<int64_t*>(slots.mutable_data_ptr()));
  return {order, targets, slots, count};
}

}  // namespace

PYG_DIST_OPS(m) { m.impl("crossing_edges", TORCH_BOX(&crossing_edges_op)); }

}  // namespace pyg_dist
