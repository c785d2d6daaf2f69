#include <algorithm>
#include <atomic>

#include "kernels/cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

BadIndex first_bad(const int64_t* index, int64_t size, int64_t num_rows) {
  const int64_t* end = index + size;
  const int64_t* bad = std::find_if(index, end, [&](int64_t i) { return i < 0 || i >= num_rows; });
  return bad == end ? BadIndex{} : BadIndex{bad - index, *bad};
}

}  // namespace

BadIndex gather_rows(const GatherRows& problem) {
  constexpr int64_t kBytesPerChunk = 1 << 18;
  std::atomic<bool> in_range{true};
  for_each_range(problem.num_rows, kBytesPerChunk / std::max<int64_t>(problem.row_bytes, 16),
                 [&](int64_t begin, int64_t end) {
                   if (!pyg_dist::gather_rows(problem, begin, end)) in_range.store(false, std::memory_order_relaxed);
                 });
  return in_range ? BadIndex{} : first_bad(problem.index, problem.num_rows, problem.num_source_rows);
}

BadIndex scatter_add_rows(const ScatterAddRows& problem) {
  constexpr int64_t kWorkPerOwner = 1 << 15;  // with fewer additions, starting threads costs more than they save
  const BadIndex bad = first_bad(problem.index, problem.num_rows, problem.num_out_rows);
  if (bad.position >= 0) return bad;
  const int64_t num_threads = torch::stable::get_num_threads();
  const ScatterAddOwned owned{
      problem, std::clamp<int64_t>(problem.num_rows * problem.num_features / kWorkPerOwner, 1, num_threads)};
  for_each_chunk(owned.num_owners, [&](int64_t owner) { kernels().scatter_add_owners(owned, owner, owner + 1); });
  return bad;
}

BadIndex keyed_permutation(const KeyedPermutation& problem) {
  constexpr int64_t kPlacesPerChunk = 1 << 12;
  std::atomic<bool> in_range{true};
  for_each_range(problem.num_places, kPlacesPerChunk, [&](int64_t begin, int64_t end) {
    if (!permute_places(problem, begin, end)) in_range.store(false, std::memory_order_relaxed);
  });
  return in_range ? BadIndex{} : first_bad(problem.place, problem.num_places, problem.size);
}

}  // namespace pyg_dist::cpu
