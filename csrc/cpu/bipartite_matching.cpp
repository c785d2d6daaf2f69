// csrc/problems/bipartite_matching.h on a CPU.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/table.h"

namespace pyg_dist {
namespace {

// Hopcroft and Karp (1973): each phase finds the length of the shortest augmenting paths, and flips as many disjoint
// ones of that length as there are. There are O(sqrt(rows + columns)) phases, and a phase looks at each entry at most
// twice.
class Matching {
 public:
  explicit Matching(const BipartiteMatching& p)
      : p_(p),
        row_of_(static_cast<size_t>(p.num_cols), -1),
        level_(static_cast<size_t>(p.num_rows)),
        rows_(static_cast<size_t>(p.num_rows)),
        next_(static_cast<size_t>(p.num_rows)) {
    std::fill_n(p.col_of, p.num_rows, -1);
  }

  // Each row takes its first free column.
  void start() {
    for (int64_t r = 0; r < p_.num_rows; ++r) {
      for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1]; ++e) {
        if (row_of(p_.col[e]) >= 0) continue;
        match(static_cast<int32_t>(r), p_.col[e]);
        break;
      }
    }
  }

  // False: there was no augmenting path, and the matching is a maximum one.
  bool improve() {
    if (!find_levels()) return false;
    std::copy_n(p_.rowptr, p_.num_rows, next_.begin());
    for (int64_t r = 0; r < p_.num_rows; ++r) {
      if (level_[static_cast<size_t>(r)] == 0) augment(static_cast<int32_t>(r));
    }
    return true;
  }

  // Which rows are reached from those without a column: the levels of the last search, which has found no free column.
  void reach_rows() {
    for (int64_t r = 0; r < p_.num_rows; ++r) p_.row_reached[r] = level_[static_cast<size_t>(r)] >= 0;
  }

  // Which columns are reached from those without a row, breadth first. The rows of a reached column all have partners,
  // or the matching could be larger.
  void reach_cols() {
    std::vector<int64_t> end(static_cast<size_t>(p_.num_cols) + 1);
    std::vector<int32_t> rows(static_cast<size_t>(p_.num_entries)), cols;
    for (int64_t e = 0; e < p_.num_entries; ++e) ++end[static_cast<size_t>(p_.col[e]) + 1];
    std::partial_sum(end.begin(), end.end(), end.begin());
    std::vector<int64_t> next(end.begin(), end.end() - 1);
    for (int64_t r = 0; r < p_.num_rows; ++r) {
      for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1]; ++e) {
        rows[static_cast<size_t>(next[static_cast<size_t>(p_.col[e])]++)] = static_cast<int32_t>(r);
      }
    }
    cols.reserve(static_cast<size_t>(p_.num_cols));
    for (int32_t c = 0; c < p_.num_cols; ++c) {
      p_.col_reached[c] = row_of(c) < 0;
      if (row_of(c) < 0) cols.push_back(c);
    }
    for (size_t at = 0; at < cols.size(); ++at) {
      const auto c = static_cast<size_t>(cols[at]);
      for (int64_t k = end[c]; k < end[c + 1]; ++k) {
        const int32_t partner = p_.col_of[rows[static_cast<size_t>(k)]];
        if (p_.col_reached[partner]) continue;
        p_.col_reached[partner] = true;
        cols.push_back(partner);
      }
    }
  }

 private:
  int32_t& row_of(int32_t col) { return row_of_[static_cast<size_t>(col)]; }
  int32_t& level(int32_t row) { return level_[static_cast<size_t>(row)]; }
  int64_t& next(int32_t row) { return next_[static_cast<size_t>(row)]; }

  void match(int32_t row, int32_t col) {
    p_.col_of[row] = col;
    row_of(col) = row;
  }

  // Breadth first from all free rows, to the first free column. False: no free column can be reached.
  bool find_levels() {
    size_t end = 0;
    for (int32_t r = 0; r < p_.num_rows; ++r) {
      level(r) = p_.col_of[r] < 0 ? 0 : -1;
      if (p_.col_of[r] < 0) rows_[end++] = r;
    }
    for (size_t at = 0; at < end; ++at) {
      const int32_t r = rows_[at];
      for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1]; ++e) {
        const int32_t partner = row_of(p_.col[e]);
        if (partner < 0) {  // all rows of this level, and of those before, have theirs
          last_level_ = level(r);
          return true;
        }
        if (level(partner) >= 0) continue;
        level(partner) = level(r) + 1;
        rows_[end++] = partner;
      }
    }
    return false;
  }

  // Depth first from a free row, level by level. A row goes on at the entry where it last stopped, so that a dead end
  // costs one look the next time. No other path meets the rows of one that has been flipped: their columns' partners
  // have changed levels.
  void augment(int32_t root) {
    int32_t depth = 0;  // rows_[0 .. depth] is the path: find_levels has done with its queue
    rows_[0] = root;
    while (depth >= 0) {
      const int32_t r = rows_[static_cast<size_t>(depth)];
      if (next(r) == p_.rowptr[r + 1]) {
        if (--depth >= 0) ++next(rows_[static_cast<size_t>(depth)]);
        continue;
      }
      const int32_t partner = row_of(p_.col[next(r)]);
      if (partner < 0) return flip(depth);
      if (depth < last_level_ && level(partner) == depth + 1) {
        rows_[static_cast<size_t>(++depth)] = partner;
      } else {
        ++next(r);
      }
    }
  }

  void flip(int32_t depth) {
    for (; depth >= 0; --depth) {
      const int32_t r = rows_[static_cast<size_t>(depth)];
      match(r, p_.col[next(r)]);
    }
  }

  const BipartiteMatching p_;
  std::vector<int32_t> row_of_;  // the row matched to each column, or -1
  std::vector<int32_t> level_;   // of each row: matched entries on the shortest path from a free row, or -1
  std::vector<int32_t> rows_;    // the queue of a search, then the path of the other
  std::vector<int64_t> next_;    // where each row's next entry stands
  int32_t last_level_ = 0;       // of the rows that have free columns
};

}  // namespace

BadIndex bipartite_matching(const BipartiteMatching& p) {
  for (int64_t e = 0; e < p.num_entries; ++e) {
    if (p.col[e] < 0 || p.col[e] >= p.num_cols) return {e, p.col[e]};
  }
  Matching matching(p);
  matching.start();
  while (matching.improve()) {
  }
  matching.reach_rows();
  matching.reach_cols();
  return {};
}

}  // namespace pyg_dist
