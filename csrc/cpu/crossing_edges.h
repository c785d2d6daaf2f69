// The edges of a rank's nodes whose sources other ranks have, by these ranks. Plans are made on the host, so that no
// other device has this.
#pragma once

#include <cstdint>
#include <vector>

#include "problems/bad_index.h"
#include "problems/csr_from_edges.h"

namespace pyg_dist {

// Consecutive places of nodes of another rank, which knows them as slots from `slot` on.
struct NodeRun {
  int64_t rank;
  int64_t place;
  int64_t slot;
  int64_t size;
};

// What is in no run is of `rank` itself.
struct CrossingEdges {
  Integers source;        // [num_edges]: places, in [0, num_nodes)
  const int64_t* target;  // [num_edges]: whatever stands for them
  const NodeRun* run;     // [num_runs]
  int64_t num_edges;
  int64_t num_nodes;
  int64_t num_runs;
  int64_t rank;
  int64_t num_ranks;
  int64_t* count;  // [num_ranks]
};

// Where an edge begins: which rank has the node, and what it knows it as.
struct NodeSlot {
  int32_t rank;
  int32_t slot;
};

struct BadCrossing {
  BadIndex run, source;
};

// Fills count with how many edges begin on each rank, and `begin` with where each does.
BadCrossing count_crossing(const CrossingEdges& p, std::vector<NodeSlot>& begin);

// order: which edges begin at the rank's own nodes, [count[rank]], then which do not, those of a rank together; the
// targets and the slots of the sources of these. Edges keep their order.
void split_crossing(const CrossingEdges& p, const std::vector<NodeSlot>& begin, int64_t* order, int64_t* targets,
                    int64_t* slots);

}  // namespace pyg_dist
