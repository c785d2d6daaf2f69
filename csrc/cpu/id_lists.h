// Lists of rows of ids as bytes: LEB128, seven bits of a number in a byte, the lowest first; the eighth bit says that
// another byte follows. In an ascending list the first column has differences to the row before, modulo 2^64.
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

// Their bytes, list after list.
void encode_ids(const IdLists& p, const int64_t* rows, const int64_t* count, uint8_t* content);

// count[l] of the rows in the num_bytes[l] bytes of each list; returns the first list whose bytes are no rows, or -1.
int64_t count_ids(const IdLists& p, const uint8_t* content, const int64_t* num_bytes, int64_t* count);

// The rows of bytes that count_ids has found well-formed.
void decode_ids(const IdLists& p, const uint8_t* content, const int64_t* count, int64_t* rows);

}  // namespace pyg_dist
