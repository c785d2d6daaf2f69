#include "cpu/patterns.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "ops/cpu/device.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist::cpu {
namespace {

constexpr int64_t kEntriesPerChunk = 1 << 19;  // a batch of thousands of rows is one thread's: others train meanwhile
constexpr int64_t kValuesPerChunk = 1 << 16;

struct Chunk {
  int64_t begin, end;               // rows
  int64_t num_entries;              // of these rows
  std::unique_ptr<int64_t[]> kept;  // what no entry is written to, the system never makes
  std::unique_ptr<int32_t[]> col;
  int64_t num_kept = 0;
};

// Checks the rows on the way.
BadIndex cut(const RestrictCsr& p, std::vector<Chunk>& chunks) {
  Chunk chunk{.begin = 0, .end = 0, .num_entries = 0, .kept = nullptr, .col = nullptr};
  for (int64_t i = 0; i < p.num_rows; ++i) {
    if (i + 16 < p.num_rows && p.row[i + 16] >= 0) __builtin_prefetch(p.rowptr + p.row[i + 16]);
    const int64_t row = p.row[i];
    if (row < 0 || row >= p.num_all_rows) return {i, row};
    const int64_t first = p.rowptr[row], last = p.rowptr[row + 1];
    if (first < 0 || last < first || last > p.num_all_entries) return {i, row};
    chunk.num_entries += last - first;
    if (chunk.num_entries >= kEntriesPerChunk || i + 1 == p.num_rows) {
      chunk.end = i + 1;
      chunks.push_back(std::move(chunk));
      chunk = {.begin = i + 1, .end = i + 1, .num_entries = 0, .kept = nullptr, .col = nullptr};
    }
  }
  return {};
}

}  // namespace

BadRestriction restrict_csr(const RestrictCsr& p, const MakeEntries& make_entries) {
  std::vector<Chunk> chunks;
  const BadIndex bad_row = cut(p, chunks);
  if (bad_row.position >= 0) return {.row = bad_row, .column = {}};
  ColumnSet columns(p.num_all_cols);
  const int64_t bad = columns.assign(p.column, p.num_cols, p.num_all_cols);
  if (bad >= 0) return {.row = {}, .column = {bad, p.column[bad]}};

  const auto num_chunks = static_cast<int64_t>(chunks.size());
  for_each_chunk(num_chunks, [&](int64_t k) {
    Chunk& chunk = chunks[static_cast<size_t>(k)];
    chunk.kept.reset(new int64_t[static_cast<size_t>(chunk.num_entries)]);
    chunk.col.reset(new int32_t[static_cast<size_t>(chunk.num_entries)]);
    chunk.num_kept =
        kernels().filter_rows({p, columns.bits(), chunk.kept.get(), chunk.col.get()}, chunk.begin, chunk.end);
  });
  p.out_rowptr[0] = 0;
  for (int64_t i = 0; i < p.num_rows; ++i) p.out_rowptr[i + 1] += p.out_rowptr[i];

  const RestrictedEntries out = make_entries(p.out_rowptr[p.num_rows]);
  for_each_chunk(num_chunks, [&](int64_t k) {
    const Chunk& chunk = chunks[static_cast<size_t>(k)];
    const int64_t first = p.out_rowptr[chunk.begin];
    std::copy_n(chunk.kept.get(), chunk.num_kept, out.entry + first);
    kernels().remap_entries({chunk.col.get(), columns.bits(), out.col + first}, 0, chunk.num_kept);
  });
  pyg_dist::transpose_csr({
      .rowptr = p.out_rowptr,
      .col = out.col,
      .num_rows = p.num_rows,
      .num_cols = p.num_cols,
      .num_entries = p.out_rowptr[p.num_rows],
      .out_rowptr = p.turned_rowptr,
      .out_col = out.turned_col,
      .out_entry = out.turned_entry,
  });
  return {};
}

BadIndex transpose_csr(const TransposeCsr& p) {
  const int64_t bad = pyg_dist::transpose_csr(p);
  return bad < 0 ? BadIndex{} : BadIndex{bad, p.col[bad]};
}

bool equals_transpose_csr(const int64_t* rowptr, const int32_t* col, int64_t num_rows) {
  return equals_transpose(rowptr, col, num_rows);
}

BadIndex bipartite_matching(const BipartiteMatching& problem) { return pyg_dist::bipartite_matching(problem); }

void find_sorted(const FindSorted& problem) {
  for_each_range(problem.num_values, kValuesPerChunk,
                 [&](int64_t begin, int64_t end) { pyg_dist::find_sorted(problem, begin, end); });
}

}  // namespace pyg_dist::cpu
