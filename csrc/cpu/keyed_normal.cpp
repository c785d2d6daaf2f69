#include <type_traits>

#include "cpu/table.h"
#include "formats/keyed.h"
#include "formats/narrow.h"

namespace pyg_dist {
namespace {

template <class T>
T round_to(double value) {
  if constexpr (kIsNarrow<T>) {
    return narrow<T>(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
void rows_of_type(const KeyedNumbers& p, int64_t row_begin, int64_t row_end) {
  constexpr int64_t kPairsPerBlock = std::is_same_v<T, double> ? 1 : 2;
  const int64_t begin = p.keyed.column_offset, end = begin + p.keyed.num_columns;
  for (int64_t row = row_begin; row < row_end; ++row) {
    T* y = static_cast<T*>(p.y) + row * p.keyed.num_columns;
    const auto key = static_cast<uint64_t>(p.keyed.key[row]);
    Words words{};
    for (int64_t pair = begin / 2; 2 * pair < end; ++pair) {
      if (pair == begin / 2 || pair % kPairsPerBlock == 0) {
        words = philox(p.keyed.seed, key, static_cast<uint32_t>(pair / kPairsPerBlock), Stream::normal);
      }
      const auto [even, odd] = normal_pair<T>(words, static_cast<int>(pair % kPairsPerBlock));
      if (2 * pair >= begin) y[2 * pair - begin] = round_to<T>(even);
      if (2 * pair + 1 < end) y[2 * pair + 1 - begin] = round_to<T>(odd);
    }
  }
}

}  // namespace

void normal_rows(const KeyedNumbers& p, int64_t row_begin, int64_t row_end) {
  return for_element(p.element, [&]<class T>() { return rows_of_type<T>(p, row_begin, row_end); });
}

}  // namespace pyg_dist
