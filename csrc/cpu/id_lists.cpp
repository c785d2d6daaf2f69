#include "cpu/id_lists.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace pyg_dist {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers lie in messages with their lowest byte first");

constexpr int64_t kCountBytes = sizeof(int64_t), kMostBytes = sizeof(uint64_t);
constexpr int kPerByte = 4;  // lengths
constexpr std::array<int64_t, kPerByte> kLength = {1, 2, 3, kMostBytes};
constexpr std::array<uint64_t, kPerByte> kMask = {0xFF, 0xFFFF, 0xFFFFFF, ~uint64_t{0}};

// The bytes of the four numbers that a byte has the lengths of.
constexpr std::array<uint8_t, 256> kBytesOfFour = [] {
  std::array<uint8_t, 256> sum{};
  for (size_t lengths = 0; lengths < sum.size(); ++lengths) {
    for (int k = 0; k < kPerByte; ++k) sum[lengths] += static_cast<uint8_t>(kLength[(lengths >> (2 * k)) & 3]);
  }
  return sum;
}();

int64_t length_of(uint64_t number) { return (number > kMask[0]) + (number > kMask[1]) + (number > kMask[2]); }

int64_t bytes_of_lengths(int64_t num_numbers) { return (num_numbers + kPerByte - 1) / kPerByte; }

// What stands for the ids of a list, one after another.
template <bool kIsOneColumn>
class Numbers {
 public:
  Numbers(const IdLists& p, const int64_t* rows)
      : rows_(rows), num_columns_(p.num_columns), keep_(p.is_ascending ? ~uint64_t{0} : 0) {}

  uint64_t next() {
    const auto id = static_cast<uint64_t>(*rows_++);
    if (!kIsOneColumn && column_ != 0) {
      column_ = column_ + 1 == num_columns_ ? 0 : column_ + 1;
      return id;
    }
    const uint64_t number = id - before_;
    before_ = id & keep_;
    column_ = kIsOneColumn || num_columns_ == 1 ? 0 : 1;
    return number;
  }

 private:
  const int64_t* rows_;
  int64_t num_columns_, column_ = 0;
  uint64_t before_ = 0, keep_;
};

// Calls use(numbers) with those of a list.
template <class Use>
void with_numbers(const IdLists& p, const int64_t* rows, const Use& use) {
  if (p.num_columns == 1) {
    use(Numbers<true>(p, rows));
  } else {
    use(Numbers<false>(p, rows));
  }
}

// Writes a number at `to`, and what a later one overwrites behind it, but nothing from `end` on.
void put(uint64_t number, int64_t length, uint8_t* to, const uint8_t* end) {
  if (end - to >= kMostBytes) [[likely]] {
    std::memcpy(to, &number, kMostBytes);
  } else {
    std::memcpy(to, &number, static_cast<size_t>(kLength[length]));
  }
}

uint64_t take(int64_t length, const uint8_t* from, const uint8_t* end) {
  uint64_t number = 0;
  if (end - from >= kMostBytes) [[likely]] {
    std::memcpy(&number, from, kMostBytes);
  } else {
    std::memcpy(&number, from, static_cast<size_t>(kLength[length]));
  }
  return number & kMask[length];
}

}  // namespace

int64_t count_id_bytes(const IdLists& p, const int64_t* rows, const int64_t* count, int64_t* num_bytes) {
  int64_t total = 0;
  for (int64_t list = 0; list < p.num_lists; rows += count[list++] * p.num_columns) {
    const int64_t num_numbers = count[list] * p.num_columns;
    int64_t here = num_numbers == 0 ? 0 : kCountBytes + bytes_of_lengths(num_numbers) + num_numbers;
    with_numbers(p, rows, [&, num_numbers](auto numbers) {
      int64_t more = 0;
      for (int64_t k = 0; k < num_numbers; ++k) {
        const uint64_t number = numbers.next();
        more += (number > kMask[0]) + (number > kMask[1]) + (kMostBytes - 3) * (number > kMask[2]);
      }
      here += more;
    });
    num_bytes[list] = here;
    total += here;
  }
  return total;
}

void encode_ids(const IdLists& p, const int64_t* rows, const int64_t* count, uint8_t* content, int64_t size) {
  const uint8_t* const end = content + size;
  for (int64_t list = 0; list < p.num_lists; rows += count[list++] * p.num_columns) {
    const int64_t num_numbers = count[list] * p.num_columns;
    if (num_numbers == 0) continue;
    std::memcpy(content, count + list, kCountBytes);
    uint8_t* lengths = content + kCountBytes;
    content = lengths + bytes_of_lengths(num_numbers);
    with_numbers(p, rows, [&, num_numbers](auto numbers) {
      uint8_t* to = content;
      for (int64_t k = 0; k < num_numbers; k += kPerByte) {
        const int num_here = static_cast<int>(std::min<int64_t>(kPerByte, num_numbers - k));
        int64_t of_four = 0;
        for (int j = 0; j < num_here; ++j) {
          const uint64_t number = numbers.next();
          const int64_t length = length_of(number);
          put(number, length, to, end);
          to += kLength[length];
          of_four |= length << (2 * j);
        }
        *lengths++ = static_cast<uint8_t>(of_four);
      }
      content = to;
    });
  }
}

int64_t count_ids(const IdLists& p, const uint8_t* content, const int64_t* num_bytes, int64_t* count) {
  for (int64_t list = 0; list < p.num_lists; content += num_bytes[list++]) {
    count[list] = 0;
    if (num_bytes[list] == 0) continue;
    if (num_bytes[list] < kCountBytes) return list;
    int64_t rows = 0, left = num_bytes[list] - kCountBytes;
    std::memcpy(&rows, content, kCountBytes);
    if (rows <= 0 || rows > left / p.num_columns) return list;  // a number has a byte at least
    const int64_t num_numbers = rows * p.num_columns, num_lengths = bytes_of_lengths(num_numbers);
    const uint8_t* const lengths = content + kCountBytes;
    const int64_t unused = num_lengths * kPerByte - num_numbers;  // lengths of no number, which are zero
    left += unused - num_lengths;
    for (int64_t k = 0; k < num_lengths; ++k) left -= kBytesOfFour[lengths[k]];
    if (left != 0 || lengths[num_lengths - 1] >> (2 * (kPerByte - unused)) != 0) return list;
    count[list] = rows;
  }
  return -1;
}

void decode_ids(const IdLists& p, const uint8_t* content, int64_t size, const int64_t* count, int64_t* rows) {
  const uint8_t* const end = content + size;
  for (int64_t list = 0; list < p.num_lists; ++list) {
    if (count[list] == 0) continue;
    const uint8_t* const lengths = content + kCountBytes;
    const int64_t num_numbers = count[list] * p.num_columns;
    content = lengths + bytes_of_lengths(num_numbers);
    uint64_t before = 0;
    int64_t column = 0;
    for (int64_t k = 0; k < num_numbers; k += kPerByte) {
      unsigned of_four = lengths[k / kPerByte];
      const int num_here = static_cast<int>(std::min<int64_t>(kPerByte, num_numbers - k));
      for (int j = 0; j < num_here; ++j, of_four >>= 2) {
        const unsigned length = of_four & 3;
        const uint64_t number = take(length, content, end) + (column == 0 ? before : 0);
        content += kLength[length];
        before = column == 0 && p.is_ascending ? number : before;
        column = column + 1 == p.num_columns ? 0 : column + 1;
        *rows++ = static_cast<int64_t>(number);
      }
    }
  }
}

}  // namespace pyg_dist
