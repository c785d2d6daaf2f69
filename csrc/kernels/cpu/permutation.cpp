#include "formats/permutation.h"

#include "kernels/cpu/table.h"

namespace pyg_dist {

bool permute_places(const KeyedPermutation& p, int64_t begin, int64_t end) {
  const Permutation permutation(static_cast<uint64_t>(p.size), p.seed);
  for (int64_t i = begin; i < end; ++i) {
    if (p.place[i] < 0 || p.place[i] >= p.size) return false;
    p.y[i] = static_cast<int64_t>(permutation.at(static_cast<uint64_t>(p.place[i])));
  }
  return true;
}

}  // namespace pyg_dist
