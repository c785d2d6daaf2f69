// How many numbers of several ascending lists are less than each of some ascending values: where these stand in the
// lists' merge, without making it. Plans are made on the host, so that no other device has this.
#pragma once

#include <cstdint>

namespace pyg_dist {

// out[i] = sum over the lists of how many of their numbers are less than value[i]. Each step goes on from the last by
// doubling its length (Bentley and Yao, "An almost optimal algorithm for unbounded searching", 1976): O(k log(m / k))
// for k values and m numbers; where there are few numbers for each value, all of them are looked at. Of lists or values
// that do not ascend the counts are any.
struct CountLess {
  const int64_t* value;   // [num_values]
  const int64_t* number;  // the lists, one after another
  const int64_t* size;    // [num_lists], numbers of each
  int64_t num_values;
  int64_t num_lists;
  int64_t* out;  // [num_values]
};

void count_less(const CountLess& p);

}  // namespace pyg_dist
