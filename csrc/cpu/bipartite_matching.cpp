// csrc/problems/bipartite_matching.h on a CPU.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/table.h"

namespace pyg_dist {
namespace {

// Hopcroft and Karp (1973): each phase finds the length of the shortest augmenting paths, and flips as many disjoint
// ones of that length as there are. There are O(sqrt(rows + columns)) phases, and a phase looks at each entry at most
// twice, and at no row that it does not reach.
class Matching {
 public:
  explicit Matching(const BipartiteMatching& p)
      : p_(p),
        row_of_(static_cast<size_t>(p.num_cols), -1),
        level_(static_cast<size_t>(p.num_rows), -1),
        next_(static_cast<size_t>(p.num_rows)) {
    std::fill_n(p.col_of, p.num_rows, -1);
  }

  // Each row takes its first free column.
  void start() {
    for (int32_t r = 0; r < p_.num_rows; ++r) {
      for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1] && p_.col_of[r] < 0; ++e) {
        if (row_of(p_.col[e]) < 0) match(r, p_.col[e]);
      }
      if (p_.col_of[r] < 0) free_.push_back(r);
    }
  }

  // False: there was no augmenting path, and the matching is a maximum one.
  bool improve() {
    if (!find_levels()) return false;
    for (const int32_t r : free_) augment(r);
    std::erase_if(free_, [&](int32_t r) { return p_.col_of[r] >= 0; });
    return true;
  }

  // Which rows are reached from those without a column: the levels of the last search, which has found no free column.
  void reach_rows() {
    for (int64_t r = 0; r < p_.num_rows; ++r) p_.row_reached[r] = level_[static_cast<size_t>(r)] >= 0;
  }

  // Which columns are reached from those without a row: these, and the partners of the rows that lead to one of these.
  void reach_cols() {
    const auto num_rows = static_cast<size_t>(p_.num_rows);
    std::vector<char> leads(num_rows);
    std::vector<int32_t> queue, others;  // rows that lead there, and those that may do so by way of others
    for (int32_t c = 0; c < p_.num_cols; ++c) p_.col_reached[c] = row_of(c) < 0;
    for (int32_t r = 0; r < p_.num_rows; ++r) {
      const auto is_free = [&](int32_t col) { return row_of(col) < 0; };
      const bool has_free = std::any_of(p_.col + p_.rowptr[r], p_.col + p_.rowptr[r + 1], is_free);
      leads[static_cast<size_t>(r)] = has_free;
      (has_free ? queue : others).push_back(r);
    }
    std::vector<int64_t> end(num_rows + 1);  // of the rows next to a row's partner, in turn
    const auto for_each = [&](const auto& use) {
      for (const int32_t r : others) {
        for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1]; ++e) use(static_cast<size_t>(row_of(p_.col[e])), r);
      }
    };
    for_each([&](size_t partner, int32_t) { ++end[partner + 1]; });
    std::partial_sum(end.begin(), end.end(), end.begin());
    std::vector<int32_t> before(static_cast<size_t>(end[num_rows]));
    for_each([&](size_t partner, int32_t r) { before[static_cast<size_t>(end[partner]++)] = r; });
    for (size_t at = 0; at < queue.size(); ++at) {  // a row's list now ends where it began, and the next one's begins
      const auto r = static_cast<size_t>(queue[at]);
      p_.col_reached[p_.col_of[r]] = true;
      for (int64_t k = r == 0 ? 0 : end[r - 1]; k < end[r]; ++k) {
        const int32_t row = before[static_cast<size_t>(k)];
        if (leads[static_cast<size_t>(row)]) continue;
        leads[static_cast<size_t>(row)] = true;
        queue.push_back(row);
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

  void reach(int32_t row, int32_t level_of_row) {
    level(row) = level_of_row;
    next(row) = p_.rowptr[row];
    reached_.push_back(row);
  }

  // Breadth first from all free rows, to the first free column. False: no free column can be reached.
  bool find_levels() {
    for (const int32_t r : reached_) level(r) = -1;
    reached_.clear();
    for (const int32_t r : free_) reach(r, 0);
    for (size_t at = 0; at < reached_.size(); ++at) {
      const int32_t r = reached_[at];
      for (int64_t e = p_.rowptr[r]; e < p_.rowptr[r + 1]; ++e) {
        const int32_t partner = row_of(p_.col[e]);
        if (partner < 0) {  // all rows of this level, and of those before, have theirs
          last_level_ = level(r);
          return true;
        }
        if (level(partner) < 0) reach(partner, level(r) + 1);
      }
    }
    return false;
  }

  // Depth first from a free row, level by level. A row goes on at the entry where it last stopped, so that a dead end
  // costs one look the next time. No other path meets the rows of one that has been flipped: their columns' partners
  // have changed levels.
  void augment(int32_t root) {
    path_.assign(1, root);
    while (!path_.empty()) {
      const int32_t r = path_.back();
      if (next(r) == p_.rowptr[r + 1]) {
        path_.pop_back();
        if (!path_.empty()) ++next(path_.back());
        continue;
      }
      const int32_t partner = row_of(p_.col[next(r)]);
      if (partner < 0) return flip();
      const auto depth = static_cast<int32_t>(path_.size());
      if (depth <= last_level_ && level(partner) == depth) {
        path_.push_back(partner);
      } else {
        ++next(r);
      }
    }
  }

  void flip() {
    for (; !path_.empty(); path_.pop_back()) match(path_.back(), p_.col[next(path_.back())]);
  }

  const BipartiteMatching p_;
  std::vector<int32_t> row_of_;   // the row matched to each column, or -1
  std::vector<int32_t> level_;    // of each row: matched entries on the shortest path from a free row, or -1
  std::vector<int64_t> next_;     // where each reached row's next entry stands
  std::vector<int32_t> free_;     // rows without a column, ascending
  std::vector<int32_t> reached_;  // rows that have a level, as the last search has met them
  std::vector<int32_t> path_;     // of the search for an augmenting one
  int32_t last_level_ = 0;        // of the rows that have free columns
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
