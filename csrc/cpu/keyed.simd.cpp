#include <type_traits>

#include "cpu/keyed_words.h"
#include "cpu/table.h"

namespace pyg_dist::PYG_DIST_LEVEL {
namespace {

template <class T>
void dropout_of_type(const KeyedDropout& p, int64_t row_begin, int64_t row_end) {
  using A = accumulator_t<T>;
  using Mask = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  constexpr int L = kLanes<A>;
  const A scale = static_cast<A>(p.scale);
  const auto use = [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    const auto* x = static_cast<const T*>(p.x) + row * p.keyed.num_columns + column;
    auto* y = static_cast<T*>(p.y) + row * p.keyed.num_columns + column;
    int64_t c = 0;
    for (; c + L <= count; c += L) {
      const auto keep = convert<Mask, L, int32_t>(load<L>(words + c) >= p.threshold);
      store<L>(y + c, load<L>(x + c) * (keep ? Vec<A, L>{} + scale : Vec<A, L>{}));
    }
    for (; c < count; ++c) store<1>(y + c, load<1>(x + c) * (words[c] >= p.threshold ? scale : A{0}));
  };
  for_each_run(p.keyed, Stream::dropout, 1, row_begin, row_end, use);
}

// The uppermost bits of a word, as many as T holds exactly.
template <class T, int L>
PYG_DIST_INLINE Vec<accumulator_t<T>, L> fraction(const uint32_t* words) {
  if constexpr (sizeof(T) == 8) {
    const auto pairs = load<L>(reinterpret_cast<const uint64_t*>(words));
    return convert<double, L, int64_t>(bit_cast<Vec<int64_t, L>>(pairs >> 11)) * 0x1p-53;
  } else {
    constexpr int kBits = UniformBits<T>::value;
    const auto upper = bit_cast<Vec<int32_t, L>>(load<L>(words) >> (32 - kBits));
    return convert<float, L, int32_t>(upper) * (1.0f / (1 << kBits));
  }
}

template <class T>
void uniform_of_type(const KeyedNumbers& p, int64_t row_begin, int64_t row_end) {
  constexpr int kWords = sizeof(T) == 8 ? 2 : 1;
  constexpr int L = kLanes<accumulator_t<T>>;
  const auto use = [&](int64_t row, int64_t column, int64_t count, const uint32_t* words) {
    auto* y = static_cast<T*>(p.y) + row * p.keyed.num_columns + column;
    int64_t c = 0;
    for (; c + L <= count; c += L) store<L>(y + c, fraction<T, L>(words + c * kWords));
    for (; c < count; ++c) store<1>(y + c, fraction<T, 1>(words + c * kWords));
  };
  for_each_run(p.keyed, Stream::uniform, kWords, row_begin, row_end, use);
}

}  // namespace

void dropout_rows(const KeyedDropout& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return dropout_of_type<T>(problem, row_begin, row_end); });
}

void uniform_rows(const KeyedNumbers& problem, int64_t row_begin, int64_t row_end) {
  return for_element(problem.element, [&]<class T>() { return uniform_of_type<T>(problem, row_begin, row_end); });
}

}  // namespace pyg_dist::PYG_DIST_LEVEL
