#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/table.h"
#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

BadIndex first_bad(const int64_t* index, int64_t size, int64_t num_rows) {
  const int64_t* end = index + size;
  const int64_t* bad = std::find_if(index, end, [&](int64_t i) { return i < 0 || i >= num_rows; });
  return bad == end ? BadIndex{} : BadIndex{bad - index, *bad};
}

// Who adds which rows: the places [begin[k], begin[k + 1]) of `order` are owner k's, each in ascending order.
struct Owners {
  std::unique_ptr<int64_t[]> order;
  std::vector<int64_t> begin;

  // Two passes over the indices, by as many ranges of them as there are owners.
  Owners(const ScatterAddRows& problem, int64_t num_owners)
      : order(std::make_unique_for_overwrite<int64_t[]>(static_cast<size_t>(problem.num_rows))),
        begin(static_cast<size_t>(num_owners + 1)) {
    const int log_group = log_group_of(problem);
    const int64_t range = (problem.num_rows + num_owners - 1) / num_owners;
    const int64_t stride = num_owners + 8;  // the ranges' numbers lie in lines of their own
    std::vector<int64_t> next(static_cast<size_t>(num_owners * stride));
    const auto visit = [&](const auto& use) {
      for_each_chunk(num_owners, [&](int64_t k) {
        int64_t* const of_owner = next.data() + k * stride;
        const int64_t end = std::min((k + 1) * range, problem.num_rows);
        for (int64_t r = k * range; r < end; ++r) {
          use(r, of_owner[owner_of(problem.index[r] >> log_group, num_owners)]);
        }
      });
    };
    visit([](int64_t, int64_t& count) { ++count; });
    int64_t total = 0;
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      begin[static_cast<size_t>(owner)] = total;
      for (int64_t k = 0; k < num_owners; ++k)
        total += std::exchange(next[static_cast<size_t>(k * stride + owner)], total);
    }
    begin.back() = total;
    visit([&](int64_t r, int64_t& place) { order[static_cast<size_t>(place++)] = r; });
  }

 private:
  // Neighbouring rows of `out` that have one owner: so many that few cache lines have two.
  static int log_group_of(const ScatterAddRows& problem) {
    constexpr int64_t kGroupBytes = 1 << 10;
    int log_group = 0;
    while (problem.out_stride * bytes_of(problem.element) << log_group < kGroupBytes && log_group < 10) ++log_group;
    return log_group;
  }

  // Fibonacci hashing: runs of neighbouring groups, hubs among them, are dealt out evenly.
  static int64_t owner_of(int64_t group, int64_t num_owners) {
    const auto hash = static_cast<uint32_t>((static_cast<uint64_t>(group) * 0x9e3779b97f4a7c15u) >> 32);
    return static_cast<int64_t>((hash * static_cast<uint64_t>(num_owners)) >> 32);
  }
};

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

// Each row of `out` has one owner, who adds what comes in its order: the result does not depend on the number of
// owners.
BadIndex scatter_add_rows(const ScatterAddRows& problem) {
  constexpr int64_t kWorkPerOwner = 1 << 15;  // with fewer additions, starting threads costs more than they save
  const BadIndex bad = first_bad(problem.index, problem.num_rows, problem.num_out_rows);
  if (bad.position >= 0) return bad;
  const int64_t num_owners =
      std::clamp<int64_t>(problem.num_rows * problem.num_features / kWorkPerOwner, 1, torch::stable::get_num_threads());
  if (num_owners == 1) {
    kernels().scatter_add_places(problem, 0, problem.num_rows);
    return bad;
  }
  const Owners owners(problem, num_owners);
  ScatterAddRows owned = problem;
  owned.order = owners.order.get();
  for_each_chunk(num_owners, [&](int64_t owner) {
    const auto k = static_cast<size_t>(owner);
    kernels().scatter_add_places(owned, owners.begin[k], owners.begin[k + 1]);
  });
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
