// How rows lie in a message of 2, 4, 8 or 16 bits a value: what quantize_rows writes and dequantize_csr reads.
//
//   bits = 16    F bfloat16 values, rounded to nearest even
//   bits < 16    zero point Z and scale S, two bfloat16; then F numbers q of `bits` bits, column c in the bits
//                (c bits) mod 8 ... of byte (c bits) div 8; unused bits of the last byte are zero
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
// with r = 32768 for nearest, else 16 random bits: the mean is low by less than 2^-16 S. No product is added to
// anything, so that fused multiply-adds change nothing.
//
// Random bits are half of the cost, so a column has only the upper byte of r to itself: byte (c + 4) mod 16 of block
// (c + 4) div 16 (bytes from the lowest of word 0 on; row_key and seed as in philox.h; stream `rounding`). The lower
// one is byte 0 of block 0 for all columns of a row: each r is uniform in [0, 2^16), two are correlated by 2^-16.
#pragma once

#include <cstdint>

namespace pyg_dist {

constexpr int64_t kParameterBytes = 4;

constexpr int64_t packed_row_bytes(int64_t num_columns, int bits) {
  return bits == 16 ? 2 * num_columns : kParameterBytes + (num_columns * bits + 7) / 8;
}

}  // namespace pyg_dist
