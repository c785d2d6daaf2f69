#include "kernels/cpu/table.h"
#include "kernels/cpu/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

template <class T>
PYG_DIST_INLINE void add_row(T* out, const T* row, int64_t n) {
  using A = accumulator_t<T>;
  constexpr int L = kLanes<A>;
  int64_t c = 0;
  for (; c + L <= n; c += L) store<L>(out + c, load<L>(out + c) + load<L>(row + c));
  for (; c < n; ++c) store<1>(out + c, load<1>(out + c) + load<1>(row + c));
}

// Fibonacci hashing: runs of neighbouring rows, hubs among them, are dealt out evenly.
PYG_DIST_INLINE int64_t owner_of(int64_t row, int64_t num_owners) {
  const auto hash = static_cast<uint32_t>((static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u) >> 32);
  return static_cast<int64_t>((hash * static_cast<uint64_t>(num_owners)) >> 32);
}

template <class T>
void owned_of_type(const ScatterAddOwned& owned, int64_t owner_begin, int64_t owner_end) {
  const ScatterAddRows& p = owned.rows;
  const auto* rows = static_cast<const T*>(p.rows);
  auto* out = static_cast<T*>(p.out);
  const bool owns_all = owner_begin == 0 && owner_end == owned.num_owners;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int64_t to = p.index[r];
    if (!owns_all) {
      const int64_t owner = owner_of(to, owned.num_owners);
      if (owner < owner_begin || owner >= owner_end) continue;
    }
    add_row(out + to * p.out_stride, rows + r * p.rows_stride, p.num_features);
  }
}

}  // namespace

void scatter_add_owners(const ScatterAddOwned& problem, int64_t owner_begin, int64_t owner_end) {
  switch (problem.rows.element) {
    case Element::f32:
      return owned_of_type<float>(problem, owner_begin, owner_end);
    case Element::f64:
      return owned_of_type<double>(problem, owner_begin, owner_end);
    case Element::bf16:
      return owned_of_type<BFloat16>(problem, owner_begin, owner_end);
  }
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
