// What an op says of an index that is out of range.
#pragma once

#include <cstdint>

namespace pyg_dist {

struct BadIndex {
  int64_t position = -1;  // the first one, or -1
  int64_t value = 0;
};

}  // namespace pyg_dist
