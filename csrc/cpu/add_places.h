// Places of values in the order in which they become known, by a table of all values. Plans are made on the host, so
// that no other device has this.
#pragma once

#include <cstdint>
#include <vector>

#include "problems/bad_index.h"
#include "problems/csr_from_edges.h"

namespace pyg_dist {

// The distinct ones of `value` that have no place, and those of `again`, which have one, get `next`, `next` + 1 and so
// on, ascending: O(num_values + num_again) time.
struct AddPlaces {
  int32_t* place_of;  // [span]: of each value, or -1
  Integers value;     // [num_values], in [0, span)
  int64_t span;
  int64_t num_values;
  int64_t next;          // next + num_values + num_again < 2^31
  const int64_t* again;  // [num_again], distinct, in [0, span)
  int64_t num_again;
};

// Fills `added` with those that got a place. The first value out of range, by its position, those of
// `again` last; nothing is added then.
BadIndex add_places(const AddPlaces& p, std::vector<int32_t>& added);

}  // namespace pyg_dist
