#include "cpu/id_lists.h"

#include <bit>

namespace pyg_dist {
namespace {

constexpr int kBits = 7, kMostBytes = 10;
constexpr uint8_t kMore = 1 << kBits;

// Calls visit(number) for what stands for each id of a list.
template <class Visit>
void for_each_number(const IdLists& p, const int64_t* rows, int64_t count, const Visit& visit) {
  uint64_t before = 0;
  for (int64_t i = 0; i < count; ++i, rows += p.num_columns) {
    for (int64_t c = 0; c < p.num_columns; ++c) {
      const auto id = static_cast<uint64_t>(rows[c]);
      visit(c == 0 ? id - before : id);
    }
    if (p.is_ascending) before = static_cast<uint64_t>(rows[0]);
  }
}

}  // namespace

int64_t count_id_bytes(const IdLists& p, const int64_t* rows, const int64_t* count, int64_t* num_bytes) {
  int64_t total = 0;
  for (int64_t list = 0; list < p.num_lists; rows += count[list++] * p.num_columns) {
    int64_t here = 0;
    for_each_number(p, rows, count[list],
                    [&](uint64_t number) { here += (std::bit_width(number | 1) + kBits - 1) / kBits; });
    num_bytes[list] = here;
    total += here;
  }
  return total;
}

void encode_ids(const IdLists& p, const int64_t* rows, const int64_t* count, uint8_t* content) {
  for (int64_t list = 0; list < p.num_lists; rows += count[list++] * p.num_columns) {
    for_each_number(p, rows, count[list], [&](uint64_t number) {
      for (; number >= kMore; number >>= kBits) *content++ = static_cast<uint8_t>(number) | kMore;
      *content++ = static_cast<uint8_t>(number);
    });
  }
}

int64_t count_ids(const IdLists& p, const uint8_t* content, const int64_t* num_bytes, int64_t* count) {
  for (int64_t list = 0; list < p.num_lists; content += num_bytes[list++]) {
    int64_t numbers = 0, length = 0;
    for (int64_t k = 0; k < num_bytes[list]; ++k) {
      if (++length > kMostBytes) return list;
      if (content[k] < kMore) {
        ++numbers;
        length = 0;
      }
    }
    if (length > 0 || numbers % p.num_columns != 0) return list;
    count[list] = numbers / p.num_columns;
  }
  return -1;
}

void decode_ids(const IdLists& p, const uint8_t* content, const int64_t* count, int64_t* rows) {
  for (int64_t list = 0; list < p.num_lists; ++list) {
    uint64_t before = 0;
    for (int64_t i = 0; i < count[list]; ++i, rows += p.num_columns) {
      for (int64_t c = 0; c < p.num_columns; ++c) {
        uint64_t number = 0;
        for (int shift = 0;; shift += kBits) {
          const uint8_t byte = *content++;
          number |= static_cast<uint64_t>(byte & (kMore - 1)) << shift;
          if (byte < kMore) break;
        }
        rows[c] = static_cast<int64_t>(c == 0 ? before + number : number);
      }
      if (p.is_ascending) before = static_cast<uint64_t>(rows[0]);
    }
  }
}

}  // namespace pyg_dist
