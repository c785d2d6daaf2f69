// The distinct values of a list, and where each value stands among them. Plans are made on the host, so that no other
// device has this.
#pragma once

#include <cstdint>
#include <vector>

#include "problems/bad_index.h"
#include "problems/csr_from_edges.h"

namespace pyg_dist {

// place[k] = i where known[i] = value[k]; else num_known + its number among the values that are not known, ascending.
// O(num_known + num_values) time by a hash table, and a radix sort of those that are not known.
struct Distinct {
  const int64_t* known;  // [num_known], distinct
  Integers value;        // [num_values]
  int64_t num_known;
  int64_t num_values;  // num_known + num_values < 2^31
  int64_t* place;      // [num_values]
};

// Fills place, and `first` with where each value that is not known comes first. The first known value that another one
// before it equals, by its position.
BadIndex distinct(const Distinct& p, std::vector<int64_t>& first);

}  // namespace pyg_dist
