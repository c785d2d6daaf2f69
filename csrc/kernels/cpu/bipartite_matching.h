// The work of csrc/kernels/bipartite_matching.h on a CPU, by one thread.
#pragma once

#include "kernels/bad_index.h"
#include "kernels/bipartite_matching.h"

namespace pyg_dist {

// The first entry whose column is out of range; where there is one, nothing is written.
BadIndex bipartite_matching(const BipartiteMatching& p);

}  // namespace pyg_dist
