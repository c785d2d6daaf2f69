#include "cpu/crossing_edges.h"

#include <algorithm>

namespace pyg_dist {
namespace {

// Calls visit(source) with the list of sources as what it is.
template <class Visit>
auto with_sources(const CrossingEdges& p, const Visit& visit) {
  return p.source.is_wide ? visit(static_cast<const int64_t*>(p.source.data))
                          : visit(static_cast<const int32_t*>(p.source.data));
}

}  // namespace

BadCrossing count_crossing(const CrossingEdges& p, std::vector<NodeSlot>& begin) {
  std::vector<NodeSlot> of_place(static_cast<size_t>(p.num_nodes), NodeSlot{static_cast<int32_t>(p.rank), 0});
  for (int64_t r = 0; r < p.num_runs; ++r) {
    const NodeRun& run = p.run[r];
    const bool is_there = run.place >= 0 && run.size >= 0 && run.size <= p.num_nodes - run.place;
    if (!is_there || run.rank < 0 || run.rank >= p.num_ranks) return {.run = {r, run.place}, .source = {}};
    for (int64_t k = 0; k < run.size; ++k) {
      of_place[static_cast<size_t>(run.place + k)] = {static_cast<int32_t>(run.rank),
                                                      static_cast<int32_t>(run.slot + k)};
    }
  }
  std::fill_n(p.count, p.num_ranks, 0);
  begin.resize(static_cast<size_t>(p.num_edges));
  return with_sources(p, [&, num_nodes = p.num_nodes, count = p.count](const auto* source) -> BadCrossing {
    for (size_t e = 0; e < begin.size(); ++e) {
      const int64_t place = source[e];
      if (place < 0 || place >= num_nodes) return {.run = {}, .source = {static_cast<int64_t>(e), place}};
      begin[e] = of_place[static_cast<size_t>(place)];
      ++count[begin[e].rank];
    }
    return {};
  });
}

void split_crossing(const CrossingEdges& p, const std::vector<NodeSlot>& begin, int64_t* order, int64_t* targets,
                    int64_t* slots) {
  std::vector<int64_t> next(static_cast<size_t>(p.num_ranks));
  const int64_t num_inside = p.count[p.rank];
  for (int64_t q = 0, first = num_inside; q < p.num_ranks; ++q) {
    next[static_cast<size_t>(q)] = q == p.rank ? 0 : first;
    first += q == p.rank ? 0 : p.count[q];
  }
  for (size_t e = 0; e < begin.size(); ++e) {
    order[next[static_cast<size_t>(begin[e].rank)]++] = static_cast<int64_t>(e);
  }
  for (int64_t k = num_inside; k < p.num_edges; ++k) {
    *targets++ = p.target[order[k]];
    *slots++ = begin[static_cast<size_t>(order[k])].slot;
  }
}

}  // namespace pyg_dist
