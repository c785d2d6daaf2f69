#include "cpu/table.h"
#include "cpu/vec.h"

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

template <class T>
void places_of_type(const ScatterAddRows& p, int64_t begin, int64_t end) {
  const auto* rows = static_cast<const T*>(p.rows);
  auto* out = static_cast<T*>(p.out);
  for (int64_t k = begin; k < end; ++k) {
    const int64_t r = p.order == nullptr ? k : p.order[k];
    add_row(out + p.index[r] * p.out_stride, rows + r * p.rows_stride, p.num_features);
  }
}

}  // namespace

void scatter_add_places(const ScatterAddRows& problem, int64_t begin, int64_t end) {
  return for_element(problem.element, [&]<class T>() { return places_of_type<T>(problem, begin, end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
