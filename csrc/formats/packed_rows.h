// How rows lie in a message of 2, 4, 8 or 16 bits a value: what quantize_rows writes and dequantize_csr reads.
//
//   bits = 16    F bfloat16 values, rounded to nearest even
//   bits < 16    zero point Z and scale S, two bfloat16; then F numbers q of `bits` bits, in blocks of 64 columns, the
//                last one of what is left. A block of n columns takes B = ceil(n bits / 8) bytes, and its column c lies
//                in the bits (c div B) bits ... of byte c mod B; unused bits are zero
//
// So columns that lie side by side are packed, and unpacked, in the same lanes of vectors side by side.
//
//   Z <= min x, rounded down;  S >= (max x - Z) / (2^bits - 1), rounded up, 0 if max x = Z
//   q = min(2^bits - 1, floor((x - Z) / S + u)),  x ~ Z + S q
//
// u is uniform in [0, 1) (stochastic: the mean of Z + S q is x, |Z + S q - x| < S), or 1/2 (nearest). The steps, the
// same on every device, in float32 unless said otherwise:
//
//   Z = bfloat16(min x) towards -inf;  |min x| < 2^-100: 0, or -2^-100 below zero
//   d = max x - Z in float64;  S = bfloat16(d * (1 / (2^bits - 1))) towards +inf, one more if S (2^bits - 1) < d;
//   0 < S < 2^-100: 2^-100
//   t = integer part of (x - Z) * (65536 / S);  q = min(2^bits - 1, (t + r) div 65536)
//
// with r = 32768 for nearest, else 16 random bits. No product is added to anything, so that fused multiply-adds change
// nothing.
//
// Random bits: a block takes 16 words, and four of its columns share one. What goes into byte i has word 16 b + i mod
// 16 of the row, b being the block (word w mod 4 of philox.h's block w div 4; stream `rounding`, seven rounds), and r
// is its bytes 3 - k and 2 - k (mod 4, byte 0 the lowest), k = i div 16 + (c div B) (bits / 2). In whole blocks that is
// word c mod 16, k = c div 16. Each byte is the upper one of one column and the lower one of another. What follows:
//
//   bias         each r is uniform in [0, 2^16), so the mean of q is t / 65536: low by less than 2^-16 (float32's
//                rounding of (x - Z) / S adds 2^-23 (x - Z) / S). 10,000 draws have a standard error of up to 2^-7.6
//   dependence   of two columns that share a byte, whether the one is rounded up depends on it in one case of 256
//                only, so the covariance of their q is at most 2^-10, beside variances of up to 1/4; that of any other
//                two columns or rows is zero
//
// Seven rounds are the fewest with which Philox-4x32 passes all tests of BigCrush (Salmon et al., Table 2); ten take
// 1.13 times as long to round and pack.
#pragma once

#include <cstdint>

#include "formats/portable.h"

namespace pyg_dist {

constexpr int64_t kParameterBytes = 4;

constexpr int64_t kBlock = 64, kQuarter = kBlock / 4;  // columns

PYG_DIST_PORTABLE constexpr int64_t packed_row_bytes(int64_t num_columns, int bits) {
  return bits == 16 ? 2 * num_columns : kParameterBytes + (num_columns * bits + 7) / 8;
}

}  // namespace pyg_dist
