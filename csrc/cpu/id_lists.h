// Lists of rows of ids as bytes: Stream VByte (Lemire, Kurz and Rupp, 2018), whose numbers take 1, 2, 3 or 8 bytes
// here. No branch depends on an id. In an ascending list the first column has differences to the row before, modulo
// 2^64.
//
// A list without rows has no bytes. Another one begins with how many rows it has, in 8 bytes; then come the lengths of
// its numbers, two bits each, four in a byte from the lowest on, and the numbers, lowest byte first.
#pragma once

#include <cstdint>

namespace pyg_dist {

struct IdLists {
  int64_t num_lists;
  int64_t num_columns;
  bool is_ascending;
};

// num_bytes[l] of the count[l] rows of each list; returns their sum.
int64_t count_id_bytes(const IdLists& p, const int64_t* rows, const int64_t* count, int64_t* num_bytes);

// Their bytes, list after list, `size` in all.
void encode_ids(const IdLists& p, const int64_t* rows, const int64_t* count, uint8_t* content, int64_t size);

// count[l] of the rows in the num_bytes[l] bytes of each list; returns the first list whose bytes are no rows, or -1.
int64_t count_ids(const IdLists& p, const uint8_t* content, const int64_t* num_bytes, int64_t* count);

// The rows of `size` bytes that count_ids has found well-formed.
void decode_ids(const IdLists& p, const uint8_t* content, int64_t size, const int64_t* count, int64_t* rows);

}  // namespace pyg_dist
