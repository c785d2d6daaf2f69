#include "cpu/find_numbers.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/hash_table.h"
#include "cpu/radix_sort.h"
#include "cpu/table.h"

namespace pyg_dist {
namespace {

constexpr int64_t kWordBits = 64;
constexpr uint64_t kWordsPerId = 8;  // a window is searched, not a hash table, up to so many

// Calls use(id) with those of a group; those that are given are the group behind the last one.
template <class Use>
void for_each_id(const FindNumbers& p, int64_t group, const Use& use) {
  if (group == p.num_groups) {
    std::for_each_n(p.given, p.num_given, use);
    return;
  }
  const int64_t* id = p.id;
  for (int64_t list = 0; list < p.num_lists; id += p.count[list++]) {
    if (list % p.num_groups == group) std::for_each_n(id, p.count[list], use);
  }
}

struct Group {
  int64_t number;
  uint64_t size;
  int64_t least;
  uint64_t most;  // over the least one
};

// Those that have ids.
std::vector<Group> groups_of(const FindNumbers& p) {
  std::vector<Group> found;
  for (int64_t group = 0; group <= p.num_groups; ++group) {
    uint64_t size = 0;
    int64_t least = std::numeric_limits<int64_t>::max(), most = std::numeric_limits<int64_t>::min();
    for_each_id(p, group, [&](int64_t id) {
      ++size;
      least = std::min(least, id);
      most = std::max(most, id);
    });
    if (size > 0) found.push_back({group, size, least, static_cast<uint64_t>(most) - static_cast<uint64_t>(least)});
  }
  return found;
}

void find_in_windows(const FindNumbers& p, const std::vector<Group>& groups) {
  size_t num_words = 0;
  for (const Group& group : groups) num_words += group.most / kWordBits + 1;
  std::vector<uint64_t> words(num_words);
  std::vector<int32_t> before(num_words);
  std::vector<int64_t> given_number(static_cast<size_t>(p.num_given));
  std::vector<IdWindow> windows;
  size_t begin = 0;
  for (const Group& group : groups) {
    const size_t end = begin + group.most / kWordBits + 1;
    uint64_t* const here = words.data() + begin;
    for_each_id(p, group.number, [here, low = static_cast<uint64_t>(group.least)](int64_t id) {
      const uint64_t bit = static_cast<uint64_t>(id) - low;
      here[bit / kWordBits] |= uint64_t{1} << (bit % kWordBits);
    });
    int32_t count = 0;
    for (size_t word = begin; word < end; ++word) {
      before[word] = count;
      count += std::popcount(words[word]);
    }
    const ColumnBits bits{here, before.data() + begin};
    const bool is_given = group.number == p.num_groups;
    windows.push_back({group.least, group.most + 1, bits, is_given ? 0 : p.first[group.number],
                       is_given ? given_number.data() : nullptr});
    for (int64_t k = 0; is_given && k < p.num_given; ++k) {
      const auto bit = static_cast<int32_t>(p.given[k] - group.least);
      given_number[static_cast<size_t>(bits.place(bit))] = p.given_number[k];
    }
    begin = end;
  }
  // Most values are in the largest ones.
  std::sort(windows.begin(), windows.end(), [](const IdWindow& a, const IdWindow& b) {
    const auto size = [](const IdWindow& w) {
      const auto last = static_cast<int32_t>(w.span - 1);
      return w.bits.place(last);
    };
    return size(a) > size(b);
  });
  kernels().find_in_windows({p.value, windows.data(), windows.size(), p.number}, 0, p.num_values);
}

void find_in_table(const FindNumbers& p, const std::vector<Group>& groups, uint64_t size) {
  HashTable table(static_cast<int64_t>(size));
  std::vector<int64_t> number;  // by that in the table
  number.reserve(size);
  std::vector<int64_t> ids;
  const auto add = [&](int64_t id, int64_t of_id) {
    if (table.add(id, static_cast<int32_t>(number.size())) == static_cast<int32_t>(number.size())) {
      number.push_back(of_id);
    }
  };
  for (const Group& group : groups) {
    if (group.number == p.num_groups) {
      for (int64_t k = 0; k < p.num_given; ++k) add(p.given[k], p.given_number[k]);
      continue;
    }
    ids.clear();
    for_each_id(p, group.number, [&](int64_t id) { ids.push_back(id); });
    const auto low = static_cast<uint64_t>(group.least);
    radix_sort(ids, group.most, [low](int64_t id) { return static_cast<uint64_t>(id) - low; });
    int64_t next = p.first[group.number];
    for (const int64_t id : ids) add(id, next++);
  }
  for (int64_t k = 0; k < p.num_values; ++k) {
    table.prefetch(p.value, k, p.num_values);
    const int32_t found = table.find(p.value[k]);
    p.number[k] = found < 0 ? -1 : number[static_cast<size_t>(found)];
  }
}

}  // namespace

void find_numbers(const FindNumbers& p) {
  const std::vector<Group> groups = groups_of(p);
  uint64_t size = 0, num_words = 0;
  bool is_small = true;
  for (const Group& group : groups) {
    size += group.size;
    num_words += group.most / kWordBits;
    is_small = is_small && group.most < static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
  }
  if (is_small && num_words <= kWordsPerId * size) {
    find_in_windows(p, groups);
  } else {
    find_in_table(p, groups, size);
  }
}

}  // namespace pyg_dist
