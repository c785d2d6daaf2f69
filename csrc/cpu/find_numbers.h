// The numbers of ids, given lists of those that have some. Plans are made on the host, so that no other device has
// this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/patterns.h"

namespace pyg_dist {

// List i is of group i % num_groups. The ids of a group, ascending, have the numbers first[g], first[g] + 1 and so on;
// those of `given` have `given_number`. All are distinct. number[k] is that of value[k], or -1.
//
// By a map of bits for each group, in O(ids + values) time; where these would be mostly zeros, by a radix sort and a
// hash table.
struct FindNumbers {
  const int64_t* id;     // list after list
  const int64_t* count;  // [num_lists], of each list
  const int64_t* first;  // [num_groups]
  const int64_t* given;  // [num_given]
  const int64_t* given_number;
  const int64_t* value;  // [num_values]
  int64_t num_lists;
  int64_t num_groups;
  int64_t num_given;
  int64_t num_values;
  int64_t* number;  // [num_values]
};

void find_numbers(const FindNumbers& p);

// The ids of a group as bits, from the least one on.
struct IdWindow {
  int64_t least;
  uint64_t span;
  ColumnBits bits;
  int64_t first;          // the number of the least one
  const int64_t* number;  // of each, ascending; null: they follow `first`
};

// Values and the windows where they may be.
struct FindInWindows {
  const int64_t* value;
  const IdWindow* window;
  std::size_t num_windows;
  int64_t* number;
};

}  // namespace pyg_dist
