// What samples neighbours: drawn rows, distinct values and the bytes of ids, on random input.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "cpu/add_places.h"
#include "cpu/distinct.h"
#include "cpu/find_numbers.h"
#include "cpu/id_lists.h"
#include "cpu/sample_rows.h"
#include "kernels_trial.h"

namespace pyg_dist {

// Rows of every way to draw: those drawn ascend, are within their row, and with replacement alone repeat.
inline int64_t try_sample_rows() {
  int64_t wrong = 0;
  std::vector<int64_t> rowptr = {0};
  for (const int64_t degree : {0, 1, 5, 40, 64, 65, 256, 257, 700}) rowptr.push_back(rowptr.back() + degree);
  const auto num_rows = static_cast<int64_t>(rowptr.size()) - 1;
  std::vector<int32_t> col, place;
  for (int64_t entry = 0; entry < rowptr.back(); ++entry) {
    col.push_back(draw(1000));
    place.push_back(draw(1000));
  }
  std::vector<int64_t> row, key;
  for (int64_t i = 0; i < 60; ++i) {
    row.push_back(draw(static_cast<int>(num_rows)));
    key.push_back(draw(1000));
  }
  for (const bool replace : {false, true}) {
    for (const int64_t count : {0, 1, 5, 32, 33, 300}) {
      for (const void* places : {static_cast<const void*>(place.data()), static_cast<const void*>(nullptr)}) {
        std::vector<int64_t> starts(row.size() + 1);
        SampleRows p{.rowptr = rowptr.data(),
                     .col = col.data(),
                     .place = {places, false},
                     .row = row.data(),
                     .key = key.data(),
                     .num_all_rows = num_rows,
                     .num_entries = rowptr.back(),
                     .num_rows = static_cast<int64_t>(row.size()),
                     .count = count,
                     .replace = replace,
                     .seed = 7,
                     .out_rowptr = starts.data()};
        wrong += count_sampled(p).position >= 0;
        std::vector<int32_t> out_col(static_cast<size_t>(starts.back()));
        std::vector<int64_t> out_place(out_col.size());
        sample_rows(p, out_col.data(), out_place.data(), 0, p.num_rows);
        for (size_t i = 0; i < row.size(); ++i) {
          const int64_t first = rowptr[static_cast<size_t>(row[i])], last = rowptr[static_cast<size_t>(row[i]) + 1];
          for (auto k = static_cast<size_t>(starts[i]); places == nullptr && k < static_cast<size_t>(starts[i + 1]);
               ++k) {
            const int64_t before = k == static_cast<size_t>(starts[i]) ? first - 1 + replace : out_place[k - 1];
            wrong += out_place[k] < before + !replace || out_place[k] >= last;
            wrong += out_col[k] != col[static_cast<size_t>(out_place[k])];
          }
        }
      }
    }
  }
  return wrong;
}

// Against sets of the standard library; values of few bits and of many.
inline int64_t try_distinct() {
  int64_t wrong = 0;
  for (const int64_t step : {int64_t{1}, int64_t{-3}, int64_t{1} << 40}) {
    for (const int size : {0, 1, 40, 3000}) {
      std::set<int64_t> some, new_values;
      for (int k = 0; k < size / 4; ++k) some.insert(step * draw(1000));
      std::vector<int64_t> known(some.begin(), some.end()), value, place(static_cast<size_t>(size)), first;
      std::reverse(known.begin(), known.end());
      for (int k = 0; k < size; ++k) {
        value.push_back(step * draw(1000));
        if (some.count(value.back()) == 0) new_values.insert(value.back());
      }
      const BadIndex bad = distinct({.known = known.data(),
                                     .value = {value.data(), true},
                                     .num_known = static_cast<int64_t>(known.size()),
                                     .num_values = size,
                                     .place = place.data()},
                                    first);
      wrong += bad.position >= 0;
      std::vector<int64_t> found;
      for (const int64_t k : first) found.push_back(value[static_cast<size_t>(k)]);
      wrong += found != std::vector<int64_t>(new_values.begin(), new_values.end());
      known.insert(known.end(), found.begin(), found.end());
      for (size_t k = 0; k < value.size(); ++k) wrong += known[static_cast<size_t>(place[k])] != value[k];
    }
  }
  return wrong;
}

// Against sets of the standard library; few values among many numbers, and many. What was added last gets new places.
inline int64_t try_add_places() {
  int64_t wrong = 0;
  std::vector<int32_t> place_of(100000, -1);
  std::vector<int32_t> added;
  int64_t next = 0;
  for (const int size : {0, 1, 30, 3000, 40}) {
    std::vector<int64_t> value;
    std::set<int32_t> expected;
    for (int k = 0; k < size; ++k) {
      value.push_back(draw(size == 3000 ? 5000 : 100000));
      if (place_of[static_cast<size_t>(value.back())] < 0) expected.insert(static_cast<int32_t>(value.back()));
    }
    const std::vector<int64_t> again(added.begin(), added.end());
    expected.insert(added.begin(), added.end());
    const auto num_again = static_cast<int64_t>(again.size());
    const AddPlaces p = {place_of.data(), {value.data(), true}, 100000, size, next, again.data(), num_again};
    wrong += add_places(p, added).position >= 0;
    wrong += added != std::vector<int32_t>(expected.begin(), expected.end());
    for (const int32_t number : added) wrong += place_of[static_cast<size_t>(number)] != next++;
  }
  const std::vector<int32_t> bad = {7, 100000};
  wrong += add_places({place_of.data(), {bad.data(), false}, 100000, 2, next, nullptr, 0}, added).position != 1;
  return wrong;
}

// Against a map of the standard library: ids of two ranks and two groups, close together and far apart.
inline int64_t try_find_numbers() {
  int64_t wrong = 0;
  for (const int64_t step : {int64_t{1}, int64_t{-3}, int64_t{1} << 40}) {
    for (const int size : {0, 1, 40, 3000}) {
      std::set<int64_t> some;
      for (int k = 0; k < size; ++k) some.insert(step * draw(2 * size));
      std::vector<int64_t> id, given, given_number, value;
      const std::vector<int64_t> first = {size, 10 * size};
      std::vector<int64_t> count(4);
      std::map<int64_t, int64_t> expected;
      std::vector<std::set<int64_t>> of_list(4);
      for (const int64_t each : some) {
        const auto list = static_cast<size_t>(draw(5));
        value.insert(value.end(), {each, each + 1});
        if (list < 4) of_list[list].insert(each);
        if (list < 4) continue;
        expected[each] = static_cast<int64_t>(given.size());
        given_number.push_back(expected[each]);
        given.push_back(each);
      }
      for (size_t list = 0; list < 4; ++list) {
        count[list] = static_cast<int64_t>(of_list[list].size());
        id.insert(id.end(), of_list[list].begin(), of_list[list].end());
      }
      for (size_t group = 0; group < 2; ++group) {
        std::set<int64_t> whole(of_list[group]);
        whole.insert(of_list[group + 2].begin(), of_list[group + 2].end());
        int64_t next = first[group];
        for (const int64_t each : whole) expected[each] = next++;
      }
      std::vector<int64_t> number(value.size());
      find_numbers({.id = id.data(),
                    .count = count.data(),
                    .first = first.data(),
                    .given = given.data(),
                    .given_number = given_number.data(),
                    .value = value.data(),
                    .num_lists = 4,
                    .num_groups = 2,
                    .num_given = static_cast<int64_t>(given.size()),
                    .num_values = static_cast<int64_t>(value.size()),
                    .number = number.data()});
      for (size_t k = 0; k < value.size(); ++k) {
        const auto found = expected.find(value[k]);
        wrong += number[k] != (found == expected.end() ? -1 : found->second);
      }
    }
  }
  return wrong;
}

// There and back; and bytes that end too early are found.
inline int64_t try_id_lists() {
  int64_t wrong = 0;
  for (const bool is_ascending : {false, true}) {
    const IdLists lists{.num_lists = 3, .num_columns = 2, .is_ascending = is_ascending};
    const std::vector<int64_t> count = {5, 0, 40};
    std::vector<int64_t> rows, num_bytes(3), found_count(3);
    for (int k = 0; k < 90; ++k) rows.push_back((int64_t{1} << draw(62)) + draw(100));
    std::vector<uint8_t> content(
        static_cast<size_t>(count_id_bytes(lists, rows.data(), count.data(), num_bytes.data())));
    const auto size = static_cast<int64_t>(content.size());
    encode_ids(lists, rows.data(), count.data(), content.data(), size);
    wrong += count_ids(lists, content.data(), num_bytes.data(), found_count.data()) >= 0;
    std::vector<int64_t> found(rows.size());
    decode_ids(lists, content.data(), size, found_count.data(), found.data());
    wrong += found != rows || found_count != count;
    num_bytes[2] -= 1;
    wrong += count_ids(lists, content.data(), num_bytes.data(), found_count.data()) != 2;
  }
  return wrong;
}

}  // namespace pyg_dist
