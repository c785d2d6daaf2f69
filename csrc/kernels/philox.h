// Philox-4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC
// 2011), and the one place that fixes which random word belongs to which element. pyg_dist/backend/ops/reference.py
// mirrors it, and kernels for any other device must follow it.
//
//   key      = (seed mod 2^32, seed div 2^32)                      seed as an unsigned 64-bit number
//   counter  = (row_key mod 2^32, row_key div 2^32, block, stream) row_key alike; for a node, its global id
//   words    = philox4x32_10(counter, key), four 32-bit numbers for consecutive columns
//
// Column c (the caller's column plus column_offset) takes
//   one 32-bit word:    block = c / 4, word c % 4                             dropout, float32 and bfloat16 uniforms
//   two 32-bit words:   block = c / 2, words 2 (c % 2) and 2 (c % 2) + 1      float64 uniforms (low word first)
//   normals, by pairs of uniforms (Box-Muller): see keyed_normal.h
//   two bytes:          see packed_rows.h                                    rounding, with seven rounds instead of ten
//
// So a value depends on (seed, row_key, column, stream) only: not on ranks, threads, the order or number of rows, or
// the instruction set.
#pragma once

#include <cstdint>

namespace pyg_dist {

// The last counter word: one stream per use, so that a mask and a noise drawn with one seed are independent.
enum class Stream : uint32_t { dropout = 0, uniform = 1, normal = 2, rounding = 3 };

struct Philox {
  static constexpr int kRounds = 10;
  static constexpr int kRoundingRounds = 7;  // packed_rows.h
  static constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  static constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
};

}  // namespace pyg_dist
