// What shares work and memory among threads above the kernels, under `make sanitize`: hubs that are cut, the counting
// sort of edges, and the pool of blocks.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "ops/cpu/block_pool.h"
#include "ops/cpu/counting_sort.h"
#include "ops/cpu/hub_rows.h"

namespace pyg_dist::cpu {
namespace {

int64_t failures = 0;

void expect(bool is_right, const char* what, int64_t at) {
  if (is_right) return;
  if (++failures <= 20) std::printf("%s: wrong at %lld\n", what, static_cast<long long>(at));
}

int64_t draw(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Degrees of which some are several chunks' work, at the beginning, in the middle and at the end.
std::vector<int64_t> rowptr_with_hubs(std::mt19937_64& random, int64_t num_rows, int64_t work) {
  std::vector<int64_t> rowptr{0};
  for (int64_t row = 0; row < num_rows; ++row) {
    const bool is_hub = row == 0 || row == num_rows - 1 || draw(random, 0, 19) == 0;
    rowptr.push_back(rowptr.back() + (is_hub ? draw(random, work, 5 * work) : draw(random, 0, 7)));
  }
  return rowptr;
}

// Each row's sums of whole numbers, by every way that rows are cut: each edge and each row counts once.
void try_hubs(std::mt19937_64& random, int64_t num_rows, int64_t num_columns, int64_t work) {
  const std::vector<int64_t> rowptr = rowptr_with_hubs(random, num_rows, work);
  const auto value = [](int64_t edge, int64_t column) { return static_cast<double>(edge % 1000 + column); };
  const auto add = [&](int64_t begin, int64_t end, double* sums) {
    std::fill_n(sums, num_columns, 0.0);
    for (int64_t e = begin; e < end; ++e) {
      for (int64_t c = 0; c < num_columns; ++c) sums[c] += value(e, c);
    }
  };
  const auto size = static_cast<size_t>(num_rows * num_columns);
  std::vector<double> got(size, -1), want(size);
  std::vector<int> written(static_cast<size_t>(num_rows));
  for_each_row_by_work<double>(
      rowptr.data(), num_rows, num_columns, work,
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          ++written[static_cast<size_t>(row)];
          add(rowptr[static_cast<size_t>(row)], rowptr[static_cast<size_t>(row) + 1], got.data() + row * num_columns);
        }
      },
      add,
      [&](int64_t row, const double* sums) {
        ++written[static_cast<size_t>(row)];
        std::copy_n(sums, num_columns, got.data() + row * num_columns);
      });
  for (int64_t row = 0; row < num_rows; ++row) {
    add(rowptr[static_cast<size_t>(row)], rowptr[static_cast<size_t>(row) + 1], want.data() + row * num_columns);
    expect(written[static_cast<size_t>(row)] == 1, "rows of hubs, written once", row);
  }
  for (size_t k = 0; k < size; ++k) expect(got[k] == want[k], "sums of hubs", static_cast<int64_t>(k));
}

template <class Number>
void try_sort(std::mt19937_64& random, int64_t num_entries, int64_t num_rows, bool has_edge, bool is_sorted) {
  const auto size = static_cast<size_t>(num_entries);
  std::vector<Number> row(size), col(size), edge(size);
  for (size_t k = 0; k < size; ++k) {
    row[k] = static_cast<Number>(draw(random, 0, 1) == 0 ? num_rows / 2 : draw(random, 0, num_rows - 1));
    col[k] = static_cast<Number>(draw(random, 0, 99));
    edge[k] = static_cast<Number>(3 * k);
  }
  if (is_sorted) std::sort(row.begin(), row.end());
  std::vector<int64_t> rowptr(static_cast<size_t>(num_rows + 1), -1);
  std::vector<int32_t> sorted_col(size, -1);
  std::vector<Number> sorted_edge(size, -1);
  constexpr bool kIsWide = sizeof(Number) == 8;
  CsrFromEdges problem{
      .row = {row.data(), kIsWide},
      .col = {col.data(), kIsWide},
      .edge = {has_edge ? edge.data() : nullptr, kIsWide},
      .rowptr = rowptr.data(),
      .sorted_col = sorted_col.data(),
      .sorted_edge = {sorted_edge.data(), kIsWide},
      .num_rows = num_rows,
      .num_cols = 100,
      .num_entries = num_entries,
  };
  const EntriesScan scan = scan_entries(problem);
  expect(scan.bad < 0, "entries inside", scan.bad);
  expect(scan.is_sorted == std::is_sorted(row.begin(), row.end()), "whether entries are in order", num_entries);
  if (is_sorted) {
    if (!has_edge) problem.sorted_edge.data = nullptr;
    copy_sorted(problem);
  } else {
    std::vector<int64_t> scratch(static_cast<size_t>(sort_scratch(problem) + 7) / 8);
    sort_entries(problem, scratch.data());
  }
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return row[a] < row[b]; });
  for (size_t k = 0; k < size; ++k) {
    const auto at = static_cast<int64_t>(k);
    expect(sorted_col[k] == static_cast<int32_t>(col[order[k]]), "sorted columns", at);
    const auto number = has_edge ? edge[order[k]] : static_cast<Number>(order[k]);
    if (has_edge || !is_sorted) expect(sorted_edge[k] == number, "places of sorted entries", at);
    const auto its_row = static_cast<size_t>(row[order[k]]);
    expect(rowptr[its_row] <= at && at < rowptr[its_row + 1], "first entries of rows", at);
  }
  expect(rowptr[0] == 0 && rowptr.back() == num_entries, "the first and the last entry", num_entries);
  if (num_entries > 2) {
    row[size / 2] = static_cast<Number>(num_rows);
    row[size - 1] = -1;
    expect(scan_entries(problem).bad == num_entries / 2, "the first entry outside", num_entries / 2);
  }
}

// Blocks of many sizes, taken and given back in any order, while other threads do the same: each holds what was
// written into it.
void use_blocks(uint64_t seed, int64_t* num_wrong) {
  constexpr size_t kStep = 4096;
  struct Block {
    char* address;
    size_t size;
    char tag;
  };
  std::mt19937_64 random(seed);
  std::vector<Block> blocks;
  const auto give_back = [&](size_t k) {
    const Block block = blocks[k];
    for (size_t at = 0; at < block.size; at += kStep) *num_wrong += block.address[at] != block.tag;
    *num_wrong += block.address[block.size - 1] != block.tag;
    BlockPool::instance().give_back(block.address);
    BlockPool::instance().give_back(&random);  // none of the pool's
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(k));
  };
  for (int round = 0; round < 600; ++round) {  // with all threads, more than the requests that the pool remembers
    const auto size = static_cast<size_t>(draw(random, 1 << 20, 9 << 20));
    auto* const address = static_cast<char*>(BlockPool::instance().take(size));
    if (address == nullptr) continue;
    const auto tag = static_cast<char>(draw(random, 1, 127));
    for (size_t at = 0; at < size; at += kStep) address[at] = tag;
    address[size - 1] = tag;
    blocks.push_back({address, size, tag});
    while (blocks.size() > 3 || (!blocks.empty() && draw(random, 0, 2) == 0)) {
      give_back(static_cast<size_t>(draw(random, 0, static_cast<int64_t>(blocks.size()) - 1)));
    }
    if (round % 200 == 199) BlockPool::instance().release();
  }
  while (!blocks.empty()) give_back(0);
}

void try_blocks() {
  constexpr size_t kThreads = 4;
  int64_t num_wrong[kThreads] = {};
  std::vector<std::thread> threads;
  for (size_t k = 0; k < kThreads; ++k) threads.emplace_back(use_blocks, k + 1, num_wrong + k);
  for (std::thread& thread : threads) thread.join();
  for (size_t k = 0; k < kThreads; ++k) expect(num_wrong[k] == 0, "bytes of blocks", static_cast<int64_t>(k));
  expect(BlockPool::instance().bytes().in_use == 0, "bytes in use after all", 0);
  BlockPool::instance().release();
  expect(BlockPool::instance().bytes().waiting == 0, "bytes that wait after all", 0);
}

}  // namespace
}  // namespace pyg_dist::cpu

int main() {
  using namespace pyg_dist::cpu;
  std::mt19937_64 random(1);
  for (const int64_t num_rows : {1, 2, 50, 400}) {
    for (const int64_t num_columns : {1, 9}) try_hubs(random, num_rows, num_columns, 64);
  }
  for (const int64_t num_entries : {0, 1, 1000, 400'000}) {
    for (const int64_t num_rows : {1, 7, 4096, 5000}) {
      for (const bool is_sorted : {false, true}) {
        try_sort<int32_t>(random, num_entries, num_rows, is_sorted, is_sorted);
        try_sort<int64_t>(random, num_entries, num_rows, !is_sorted, is_sorted);
      }
    }
  }
  try_blocks();
  std::printf("hubs, sorts and blocks: %lld wrong values\n", static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}
