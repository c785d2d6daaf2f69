#include "ops/cpu/counting_sort.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>
#include <vector>

#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

constexpr int64_t kEntriesPerChunk = 1 << 16;

// Rows by buckets of 2^log_rows neighbours: few enough that all of them are written to at once, a cache line each, and
// that an entry's place within one is found in a cache.
constexpr int kLogBuckets = 11;

struct Entry {
  uint32_t row;
  int32_t col;
};

// A counting sort in two steps, by bucket and within each, both stable. Position: of an entry in the input.
template <class Position>
void sort(const CsrFromEdges& p, void* scratch) {
  const int log_rows = std::max(static_cast<int>(std::bit_width(static_cast<uint64_t>(p.num_rows))) - kLogBuckets, 0);
  const int64_t num_buckets = (p.num_rows >> log_rows) + 1;
  const int64_t num_chunks =
      std::clamp<int64_t>(p.num_entries / kEntriesPerChunk, 1, 4 * torch::stable::get_num_threads());
  const int64_t chunk_size = (p.num_entries + num_chunks - 1) / num_chunks;
  auto* const entries = static_cast<Entry*>(scratch);
  auto* const positions = reinterpret_cast<Position*>(entries + p.num_entries);
  std::vector<int64_t> next(
      static_cast<size_t>(num_chunks * num_buckets));  // where a chunk's next entry of a bucket goes
  const auto visit = [&](const auto& use) {
    for_each_chunk(num_chunks, [&](int64_t chunk) {
      int64_t* const of_bucket = next.data() + chunk * num_buckets;
      const int64_t end = std::min((chunk + 1) * chunk_size, p.num_entries);
      for (int64_t k = chunk * chunk_size; k < end; ++k) {
        const int64_t row = p.row[k];
        use(k, row, of_bucket[row >> log_rows]);
      }
    });
  };
  visit([](int64_t, int64_t, int64_t& count) { ++count; });
  std::vector<int64_t> begin(static_cast<size_t>(num_buckets + 1));
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    begin[static_cast<size_t>(bucket)] = total;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      total += std::exchange(next[static_cast<size_t>(chunk * num_buckets + bucket)], total);
    }
  }
  begin.back() = total;
  visit([&](int64_t k, int64_t row, int64_t& place) {
    const int64_t to = place++;
    entries[to] = {static_cast<uint32_t>(row), static_cast<int32_t>(p.col[k])};
    positions[to] = static_cast<Position>(k);
  });
  for_each_chunk(num_buckets, [&](int64_t bucket) {
    const int64_t first_row = bucket << log_rows, last_row = std::min((bucket + 1) << log_rows, p.num_rows);
    const int64_t first = begin[static_cast<size_t>(bucket)], last = begin[static_cast<size_t>(bucket + 1)];
    std::vector<int64_t> place(static_cast<size_t>(last_row - first_row));
    for (int64_t k = first; k < last; ++k) ++place[static_cast<size_t>(entries[k].row - first_row)];
    int64_t at = first;
    for (int64_t row = first_row; row < last_row; ++row) {
      p.rowptr[row] = at;
      at += std::exchange(place[static_cast<size_t>(row - first_row)], at);
    }
    for (int64_t k = first; k < last; ++k) {
      const Entry entry = entries[k];
      const int64_t to = place[static_cast<size_t>(entry.row - first_row)]++;
      const auto position = static_cast<int64_t>(positions[k]);
      p.sorted_col[to] = entry.col;
      p.sorted_edge.set(to, p.edge.data == nullptr ? position : p.edge[position]);
    }
  });
  p.rowptr[p.num_rows] = p.num_entries;
}

bool is_short(const CsrFromEdges& p) { return p.num_entries <= UINT32_MAX; }

}  // namespace

EntriesScan scan_entries(const CsrFromEdges& p) {
  std::atomic<bool> is_inside{true}, is_sorted{true};
  const auto is_bad = [&](int64_t row, int64_t col) {
    return row < 0 || row >= p.num_rows || col < 0 || col >= p.num_cols;
  };
  for_each_range(p.num_entries, kEntriesPerChunk, [&](int64_t begin, int64_t end) {
    bool bad = false, falls = false;
    int64_t before = begin == 0 ? 0 : p.row[begin - 1];
    for (int64_t k = begin; k < end; ++k) {
      const int64_t row = p.row[k];
      bad |= is_bad(row, p.col[k]);
      falls |= row < before;
      before = row;
    }
    if (bad) is_inside.store(false, std::memory_order_relaxed);
    if (falls) is_sorted.store(false, std::memory_order_relaxed);
  });
  EntriesScan scan{.is_sorted = is_sorted};
  if (!is_inside) {
    for (scan.bad = 0; !is_bad(p.row[scan.bad], p.col[scan.bad]); ++scan.bad) {
    }
  }
  return scan;
}

void copy_sorted(const CsrFromEdges& p) {
  for_each_range(p.num_entries, kEntriesPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t row = k == 0 ? -1 : p.row[k - 1]; row < p.row[k];) p.rowptr[++row] = k;
      p.sorted_col[k] = static_cast<int32_t>(p.col[k]);
      if (p.sorted_edge.data != nullptr) p.sorted_edge.set(k, p.edge[k]);
    }
  });
  const int64_t last = p.num_entries == 0 ? -1 : p.row[p.num_entries - 1];
  std::fill(p.rowptr + last + 1, p.rowptr + p.num_rows + 1, p.num_entries);
}

int64_t sort_scratch(const CsrFromEdges& p) {
  return p.num_entries * static_cast<int64_t>(sizeof(Entry) + (is_short(p) ? sizeof(uint32_t) : sizeof(int64_t)));
}

void sort_entries(const CsrFromEdges& problem, void* scratch) {
  if (is_short(problem)) {
    sort<uint32_t>(problem, scratch);
  } else {
    sort<int64_t>(problem, scratch);
  }
}

}  // namespace pyg_dist::cpu
