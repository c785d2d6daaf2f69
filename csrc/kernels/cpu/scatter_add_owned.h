// scatter_add_rows by several threads: each row of `out` has one of num_owners owners, by a hash of its number; a call
// does the rows of some owners and passes over the others. The result does not depend on num_owners.
#pragma once

#include "kernels/scatter_add_rows.h"

namespace pyg_dist {

struct ScatterAddOwned {
  ScatterAddRows rows;
  int64_t num_owners;
};

}  // namespace pyg_dist
