#include "cuda/ascending.cuh"
#include "cuda/bad_index.cuh"
#include "cuda/for_each.cuh"
#include "cuda/kernels.h"
#include "cuda/sort.h"
#include "cuda/warp.cuh"
#include "formats/permutation.h"
#include "problems/row_chunks.h"

namespace pyg_dist::gpu {
namespace {

struct Permute {
  KeyedPermutation p;
  Permutation permutation;
  IndexCheck check;

  PYG_DIST_DEVICE void operator()(int64_t k) const {
    // What is made of a bad place is a bad index again.
    const bool is_good = is_in_range(p.place[k], p.size, k, check);
    p.y[k] = is_good ? static_cast<int64_t>(permutation.at(static_cast<uint64_t>(p.place[k]))) : -1;
  }
};

struct Find {
  FindSorted p;

  PYG_DIST_DEVICE void operator()(int64_t k) const {
    const int64_t at = count_less(p.sorted, p.size, p.value[k]);
    p.place[k] = at < p.size && p.sorted[at] == p.value[k] ? at : -1;
  }
};

struct ColumnKeys {
  TransposeCsr p;
  uint32_t* key;
  IndexCheck check;

  PYG_DIST_DEVICE void operator()(int64_t e) const {
    const bool is_good = is_in_range(p.col[e], p.num_cols, e, check);
    key[e] = static_cast<uint32_t>(is_good ? p.col[e] : p.num_cols);
  }
};

struct ColumnStarts {
  TransposeCsr p;
  Sorted sorted;

  PYG_DIST_DEVICE void operator()(int64_t column) const {
    p.out_rowptr[column] = count_less(sorted.key, p.num_entries, static_cast<uint32_t>(column));
  }
};

struct TurnEntries {
  TransposeCsr p;
  Sorted sorted;

  PYG_DIST_DEVICE void operator()(int64_t k) const {
    const int64_t e = sorted.place[k];
    p.out_entry[k] = e;
    p.out_col[k] = static_cast<int32_t>(row_of_edge(p.rowptr, p.num_rows, e));
  }
};

}  // namespace

void keyed_permutation(const KeyedPermutation& p, const IndexCheck& check, const Queue& queue) {
  for_each(Permute{p, Permutation(static_cast<uint64_t>(p.size), p.seed), check}, p.num_places, queue);
}

void find_sorted(const FindSorted& p, const Queue& queue) { for_each(Find{p}, p.num_values, queue); }

void transpose_csr(const TransposeCsr& p, const IndexCheck& check, const Queue& queue) {
  auto* const key = scratch<uint32_t>(queue, p.num_entries);
  for_each(ColumnKeys{p, key, check}, p.num_entries, queue);
  int num_bits = 0;
  while (p.num_cols >> num_bits > 0) ++num_bits;
  const Sorted sorted = sort_keys(key, p.num_entries, num_bits, queue);
  for_each(ColumnStarts{p, sorted}, p.num_cols + 1, queue);
  for_each(TurnEntries{p, sorted}, p.num_entries, queue);
}

}  // namespace pyg_dist::gpu
