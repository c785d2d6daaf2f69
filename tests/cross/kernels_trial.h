// Every kernel of a device against plain loops over doubles. `Device` has a function for each op, which does all of a
// problem, and
//   kHub     so many edges has one row of a pattern more than the others
//
// Inputs are small integers and scales powers of two, so that sums are exact in every order and in every type, and a
// kernel must equal its loop to the last bit. Norms, which divide, may be off by rounding.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "formats/keyed.h"
#include "formats/narrow.h"
#include "formats/packed_rows.h"
#include "problems/attention.h"
#include "problems/dequantize_csr.h"
#include "problems/extreme_csr.h"
#include "problems/gather_rows.h"
#include "problems/keyed.h"
#include "problems/norm_relu_dropout.h"
#include "problems/patterns.h"
#include "problems/quantize_csr.h"
#include "problems/relu.h"
#include "problems/scatter_add_rows.h"
#include "problems/sddmm_csr.h"
#include "problems/spmm_csr.h"

namespace pyg_dist {
namespace {

template <class T>
constexpr Element kElement = std::is_same_v<T, double>     ? Element::f64
                             : std::is_same_v<T, float>    ? Element::f32
                             : std::is_same_v<T, BFloat16> ? Element::bf16
                                                           : Element::f16;

template <class T>
T from_double(double value) {
  if constexpr (sizeof(T) == 2) {
    return narrow<T>(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
double to_double(T value) {
  if constexpr (sizeof(T) == 2) {
    return widen(value);
  } else {
    return value;
  }
}

uint32_t state = 1;
int draw(int count) {  // of [0, count)
  state = state * 1664525 + 1013904223;
  return static_cast<int>((static_cast<uint64_t>(state >> 8) * static_cast<uint64_t>(count)) >> 24);
}

template <class T>
std::vector<T> integers(size_t size) {
  std::vector<T> values(size);
  for (T& value : values) value = from_double<T>(draw(7) - 3);
  return values;
}

int64_t failures = 0;
uint64_t digest = 0;  // of all results

template <class T>
void expect(const char* kernel, int64_t width, const std::vector<T>& got, const std::vector<double>& want,
            double tolerance = 0) {
  for (size_t i = 0; i < sizeof(T) * got.size(); ++i) {
    digest = (digest ^ reinterpret_cast<const uint8_t*>(got.data())[i]) * 0x100000001b3u;
  }
  for (size_t i = 0; i < want.size(); ++i) {
    // What the kernel's own type makes of the exact result.
    const double rounded = to_double(from_double<T>(want[i])), found = to_double(got[i]);
    if (std::abs(found - rounded) <= tolerance * (1 + std::abs(rounded)) ||
        (std::isnan(found) && std::isnan(rounded)) || found == rounded) {
      continue;
    }
    if (++failures <= 20) {
      std::printf("%s, width %lld, %zu bytes: entry %zu: expected %g, got %g\n", kernel, static_cast<long long>(width),
                  sizeof(T), i, rounded, found);
    }
  }
}

// Dense rows as a slice of larger ones: with a gap, `gap` elements before the first row and between two, none behind
// the last. An odd gap leaves no vector of a row aligned.
template <class T>
class Slice {
 public:
  Slice(const std::vector<T>& dense, size_t num_columns, size_t gap)
      : num_columns_(num_columns),
        stride_(num_columns + gap),
        gap_(gap),
        num_rows_(num_columns == 0 ? 0 : dense.size() / num_columns),
        memory_(num_rows_ * stride_, from_double<T>(kGap)) {
    for (size_t r = 0; r < num_rows_; ++r) {
      std::copy_n(dense.begin() + static_cast<int64_t>(r * num_columns_), num_columns_, memory_.data() + begin(r));
    }
  }

  T* data() { return memory_.empty() ? nullptr : memory_.data() + gap_; }
  int64_t stride() const { return static_cast<int64_t>(stride_); }

  // The rows, and whether what lies between them is as it was.
  std::vector<T> dense() const {
    std::vector<T> rows;
    for (size_t r = 0; r < num_rows_; ++r) {
      const T* const row = memory_.data() + begin(r);
      for (const T* gap = row - gap_; gap < row; ++gap) failures += to_double(*gap) != kGap;
      rows.insert(rows.end(), row, row + num_columns_);
    }
    return rows;
  }

 private:
  static constexpr double kGap = 77;

  size_t begin(size_t r) const { return r * stride_ + gap_; }

  size_t num_columns_, stride_, gap_, num_rows_;
  std::vector<T> memory_;
};

constexpr int64_t kRows = 23, kSources = 17;

// Word `column` of a row: formats/keyed.h, as plainly as can be.
uint32_t philox_word(uint64_t seed, uint64_t key, int64_t column, Stream stream) {
  uint32_t c[4] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(column / 4),
                   static_cast<uint32_t>(stream)};
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < Philox::kRounds; ++round) {
    const uint64_t p0 = uint64_t{Philox::kMultiplier0} * c[0], p1 = uint64_t{Philox::kMultiplier1} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    std::memcpy(c, next, sizeof(c));
    k0 += Philox::kWeyl0;
    k1 += Philox::kWeyl1;
  }
  return c[column % 4];
}

struct Pattern {
  std::vector<int64_t> rowptr{0};
  std::vector<int32_t> col;
  std::vector<int64_t> row;  // of each edge

  Pattern(int64_t num_rows, int64_t num_sources, int hub) {
    for (int64_t r = 0; r < num_rows; ++r) {
      const int degree = r % 5 == 0 ? 0 : draw(12) + (r == 7 ? hub : 0);
      for (int e = 0; e < degree; ++e) {
        col.push_back(draw(static_cast<int>(num_sources)));
        row.push_back(r);
      }
      rowptr.push_back(static_cast<int64_t>(col.size()));
    }
  }
};

template <class T, class Device>
void try_width(const Device& device, int64_t width, size_t gap = 0) {
  using A = accumulator_t<T>;
  const auto F = static_cast<size_t>(width);
  const Pattern p(kRows, kSources, Device::kHub), transposed(kSources, kRows, Device::kHub);
  const auto num_edges = static_cast<int64_t>(p.col.size());
  const auto x = integers<T>(kSources * F), a = integers<T>(kRows * F);
  const auto weight = integers<A>(p.col.size()), row_scale = integers<A>(kRows), col_scale = integers<A>(kSources);

  Slice x_rows(x, F, gap), a_rows(a, F, gap);

  auto out = integers<T>(kRows * F);
  Slice out_rows(out, F, gap);
  std::vector<double> want(out.size());
  for (size_t i = 0; i < want.size(); ++i) want[i] = to_double(out[i]);
  for (size_t e = 0; e < p.col.size(); ++e) {
    for (size_t c = 0; c < F; ++c) {
      const auto source = static_cast<size_t>(p.col[e]), row = static_cast<size_t>(p.row[e]);
      want[row * F + c] +=
          double(row_scale[row]) * double(weight[e]) * double(col_scale[source]) * to_double(x[source * F + c]);
    }
  }
  device.spmm_csr({.rowptr = p.rowptr.data(),
                   .col = p.col.data(),
                   .x = x_rows.data(),
                   .weight = weight.data(),
                   .row_scale = row_scale.data(),
                   .col_scale = col_scale.data(),
                   .out = out_rows.data(),
                   .num_rows = kRows,
                   .num_source_rows = kSources,
                   .num_edges = num_edges,
                   .num_features = width,
                   .x_stride = x_rows.stride(),
                   .out_stride = out_rows.stride(),
                   .x_element = kElement<T>,
                   .out_element = kElement<T>,
                   .accumulate = true,
                   .divide = false});
  out = out_rows.dense();
  expect("spmm_csr", width, out, want);

  std::vector<A> dots(p.col.size());
  std::vector<double> want_dots(p.col.size());
  for (size_t e = 0; e < p.col.size(); ++e) {
    for (size_t c = 0; c < F; ++c) {
      want_dots[e] +=
          to_double(a[static_cast<size_t>(p.row[e]) * F + c]) * to_double(x[static_cast<size_t>(p.col[e]) * F + c]);
    }
  }
  device.sddmm_csr({p.rowptr.data(), p.col.data(), a_rows.data(), x_rows.data(), dots.data(), kRows, num_edges, width,
                    a_rows.stride(), x_rows.stride(), kElement<T>});
  expect("sddmm_csr", width, dots, want_dots);

  std::vector<int64_t> index(kSources);
  for (int64_t& i : index) i = draw(kRows);
  auto added = integers<T>(kRows * F);
  Slice added_rows(added, F, gap);
  std::vector<double> want_added(added.size());
  for (size_t i = 0; i < added.size(); ++i) want_added[i] = to_double(added[i]);
  for (size_t r = 0; r < kSources; ++r) {
    for (size_t c = 0; c < F; ++c) want_added[static_cast<size_t>(index[r]) * F + c] += to_double(x[r * F + c]);
  }
  device.scatter_add_rows({index.data(), nullptr, x_rows.data(), added_rows.data(), kSources, kRows, width,
                           x_rows.stride(), added_rows.stride(), kElement<T>});
  expect("scatter_add_rows", width, added_rows.dense(), want_added);

  // Rows picked; indices out of range are noticed, however large.
  const auto bytes = width * static_cast<int64_t>(sizeof(T));
  const std::vector<T> picked(kSources * F);
  Slice picked_rows(picked, F, gap);
  std::vector<double> want_picked(picked.size());
  for (size_t i = 0; i < picked.size(); ++i)
    want_picked[i] = to_double(a[static_cast<size_t>(index[i / F]) * F + i % F]);
  GatherRows gathering{reinterpret_cast<const char*>(a_rows.data()),
                       index.data(),
                       reinterpret_cast<char*>(picked_rows.data()),
                       kRows,
                       kSources,
                       bytes,
                       a_rows.stride() * static_cast<int64_t>(sizeof(T)),
                       picked_rows.stride() * static_cast<int64_t>(sizeof(T))};
  if (!device.gather_rows(gathering)) ++failures;
  expect("gather_rows", width, picked_rows.dense(), want_picked);
  for (const int64_t bad :
       {int64_t{kRows}, int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    index[5] = index[kSources - 1] = bad;  // the memory of the rows ends with the last one
    if (device.gather_rows(gathering)) ++failures;
    picked_rows.dense();
  }

  // ReLU and its derivative by the bits that it keeps.
  std::vector<T> positive(a.size()), by_a(a.size());
  std::vector<double> want_positive(a.size()), want_by_a(a.size());
  std::vector<uint8_t> passed((a.size() + 7) / 8);
  for (size_t i = 0; i < a.size(); ++i) {
    want_positive[i] = std::max(to_double(a[i]), 0.0);
    want_by_a[i] = to_double(a[i]) > 0 ? to_double(out[i]) : 0;
  }
  const auto num_elements = static_cast<int64_t>(a.size());
  if constexpr (requires { &Device::relu; }) {  // a CPU's alone
    device.relu({a.data(), positive.data(), passed.data(), num_elements, kElement<T>});
    expect("relu", width, positive, want_positive);
    device.relu_grad({out.data(), passed.data(), by_a.data(), num_elements, kElement<T>});
    expect("relu_grad", width, by_a, want_by_a);
  }

  std::vector<T> extreme(kRows * F);
  std::vector<double> want_extreme(extreme.size()), ties(extreme.size());
  for (size_t e = 0; e < p.col.size(); ++e) {
    for (size_t c = 0; c < F; ++c) {
      const double value = to_double(x[static_cast<size_t>(p.col[e]) * F + c]);
      double& best = want_extreme[static_cast<size_t>(p.row[e]) * F + c];
      if (e == static_cast<size_t>(p.rowptr[static_cast<size_t>(p.row[e])]) || value > best) best = value;
    }
  }
  ExtremeCsr problem{p.rowptr.data(), p.col.data(), x_rows.data(), nullptr, nullptr,
                     extreme.data(),  kRows,        num_edges,     width,   x_rows.stride(),
                     width,           kElement<T>,  true};
  device.extreme_csr(problem);
  expect("extreme_csr", width, extreme, want_extreme);
  for (size_t i = 0; i < ties.size(); ++i) ties[i] = want_extreme[i] == 0;
  for (size_t e = 0; e < p.col.size(); ++e) {
    for (size_t c = 0; c < F; ++c) {
      const size_t i = static_cast<size_t>(p.row[e]) * F + c;
      ties[i] += to_double(x[static_cast<size_t>(p.col[e]) * F + c]) == want_extreme[i];
    }
  }
  std::vector<A> share(extreme.size());
  std::vector<double> want_share(extreme.size());
  for (size_t i = 0; i < ties.size(); ++i) want_share[i] = to_double(a[i]) / ties[i];
  problem.y = extreme.data();
  problem.g = a.data();
  problem.out = share.data();
  device.extreme_csr_shares(problem);
  expect("extreme_csr_shares", width, share, want_share, 1e-6);
  const auto shares = integers<A>(kRows * F);
  std::vector<T> by_x(kSources * F);
  std::vector<double> want_by_x(by_x.size());
  for (size_t e = 0; e < transposed.col.size(); ++e) {
    for (size_t c = 0; c < F; ++c) {
      const size_t to = static_cast<size_t>(transposed.row[e]) * F + c;
      const size_t from = static_cast<size_t>(transposed.col[e]) * F + c;
      if (to_double(x[to]) == want_extreme[from]) want_by_x[to] += double(shares[from]);
    }
  }
  device.extreme_csr_grad({transposed.rowptr.data(), transposed.col.data(), x_rows.data(), extreme.data(),
                           shares.data(), by_x.data(), kSources, static_cast<int64_t>(transposed.col.size()), width,
                           x_rows.stride(), width, kElement<T>, true});
  expect("extreme_csr_grad", width, by_x, want_by_x);

  std::vector<int64_t> key(kRows);
  for (size_t r = 0; r < kRows; ++r) key[r] = static_cast<int64_t>(r * r) << (r % 3 * 20);
  const Keyed keyed{key.data(), kRows, width, width % 4 == 0 ? 8 : 5, 0x123456789abcdefu};
  const std::vector<T> ones(kRows * F, from_double<T>(1));
  std::vector<T> mask(kRows * F), uniform(kRows * F);
  device.keyed_dropout({keyed, ones.data(), mask.data(), 1u << 30, 2, kElement<T>});
  std::vector<double> want_mask(mask.size());
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < F; ++c) {
      const auto column = static_cast<int64_t>(c) + keyed.column_offset;
      const uint32_t word = philox_word(keyed.seed, static_cast<uint64_t>(key[r]), column, Stream::dropout);
      want_mask[r * F + c] = word >= 1u << 30 ? 2 : 0;
    }
  }
  expect("keyed_dropout", width, mask, want_mask);
  std::vector<T> normal(kRows * F);
  device.keyed_normal({keyed, normal.data(), kElement<T>});
  for (const T& value : normal) failures += !(std::abs(to_double(value)) < 8);
  device.keyed_uniform({keyed, uniform.data(), kElement<T>});
  if constexpr (sizeof(T) == 4) {
    std::vector<double> want_uniform(uniform.size());
    for (size_t i = 0; i < uniform.size(); ++i) {
      const auto row = static_cast<uint64_t>(key[i / F]);
      const auto column = static_cast<int64_t>(i % F) + keyed.column_offset;
      want_uniform[i] = (philox_word(keyed.seed, row, column, Stream::uniform) >> 8) * 0x1p-24;
    }
    expect("keyed_uniform", width, uniform, want_uniform);
  }

  // Packed rows, at random and to nearest, brought back: within a step of what they were, which bfloat16 holds exactly.
  const auto twice = integers<T>(kSources * F);
  Slice twice_rows(twice, F, gap);
  std::vector<int32_t> from(kRows);
  std::vector<int64_t> each(kRows + 1);
  for (size_t r = 0; r < kRows; ++r) {
    from[r] = draw(kSources);
    each[r + 1] = static_cast<int64_t>(r + 1);
  }
  std::vector<int32_t> own(kRows);
  for (size_t r = 0; r < kRows; ++r) own[r] = static_cast<int32_t>(r);
  for (const int bits : {2, 4, 8, 16}) {
    for (const bool stochastic : {false, true}) {
      std::vector<uint8_t> packed(static_cast<size_t>(kRows * packed_row_bytes(width, bits)));
      int64_t bad_row = 0;
      device.quantize_csr({.sums = {.rowptr = each.data(),
                                    .col = from.data(),
                                    .x = twice_rows.data(),
                                    .weight = nullptr,
                                    .row_scale = nullptr,
                                    .col_scale = nullptr,
                                    .out = nullptr,
                                    .num_rows = kRows,
                                    .num_source_rows = kSources,
                                    .num_edges = kRows,
                                    .num_features = width,
                                    .x_stride = twice_rows.stride(),
                                    .out_stride = width,
                                    .x_element = kElement<T>,
                                    .out_element = accumulator_of(kElement<T>),
                                    .accumulate = false,
                                    .divide = false},
                           .key = stochastic ? key.data() : nullptr,
                           .packed = packed.data(),
                           .bad_row = &bad_row,
                           .seed = 0x123456789abcdefu,
                           .bits = bits});
      if (bad_row != kAllFinite) ++failures;
      Slice back_rows(std::vector<T>(kRows * F), F, gap);
      device.dequantize_csr_add({each.data(), own.data(), packed.data(), packed.data() + packed.size(), nullptr,
                                 nullptr, back_rows.data(), kRows, kRows, width, back_rows.stride(), bits,
                                 kElement<T>});
      const std::vector<T> back = back_rows.dense();
      const double step = bits == 16 ? 0 : 6.1 / ((1 << bits) - 1);  // the largest range is 6
      for (size_t i = 0; i < back.size(); ++i) {
        const double want = to_double(twice[static_cast<size_t>(from[i / F]) * F + i % F]);
        if (!(std::abs(to_double(back[i]) - want) <= step) && ++failures <= 20) {
          std::printf("quantize_csr, width %lld, %d bits: entry %zu: expected %g, got %g\n",
                      static_cast<long long>(width), bits, i, want, to_double(back[i]));
        }
      }
    }
  }

  // Norm, ReLU and dropout with the mask above.
  const auto scale = integers<A>(F), shift = integers<A>(F);
  std::vector<A> mean(kRows), rstd(kRows);
  std::vector<T> y(kRows * F);
  std::vector<double> want_y(y.size());
  for (size_t r = 0; r < kRows; ++r) {
    double m = 0, v = 0;
    for (size_t c = 0; c < F; ++c) m += to_double(a[r * F + c]) / static_cast<double>(F);
    for (size_t c = 0; c < F; ++c) v += std::pow(to_double(a[r * F + c]) - m, 2) / static_cast<double>(F);
    for (size_t c = 0; c < F; ++c) {
      const double z = (to_double(a[r * F + c]) - m) / std::sqrt(v + 1) * double(scale[c]) + double(shift[c]);
      want_y[r * F + c] = (z > 0 ? z : 0) * to_double(mask[r * F + c]);
    }
  }
  NormReLUDropout epilogue{.keyed = keyed,
                           .x = a.data(),
                           .weight = scale.data(),
                           .bias = shift.data(),
                           .mean = mean.data(),
                           .rstd = rstd.data(),
                           .y = y.data(),
                           .eps = 1,
                           .scale = 2,
                           .threshold = 1u << 30,
                           .norm = RowNorm::layer,
                           .relu = true,
                           .element = kElement<T>};
  device.norm_relu_dropout(epilogue);
  expect("norm_relu_dropout", width, y, want_y, sizeof(T) == 2 ? 0.01 : 1e-4);

  // The same with moments that are given, from the moments alone; and the derivative in one pass and in two.
  std::vector<A> squares(kRows);
  std::vector<double> want_squares(kRows);
  for (size_t r = 0; r < kRows; ++r) want_squares[r] = 1 / (to_double(rstd[r]) * to_double(rstd[r])) - 1;
  NormReLUDropout alone = epilogue;
  alone.moments = RowMoments::alone;
  alone.rstd = squares.data();
  device.norm_relu_dropout(alone);
  expect("norm_relu_dropout, moments", width, squares, want_squares, 1e-4);
  epilogue.moments = RowMoments::given;
  std::fill(y.begin(), y.end(), T{});
  device.norm_relu_dropout(epilogue);
  expect("norm_relu_dropout, given moments", width, y, want_y, sizeof(T) == 2 ? 0.01 : 1e-4);
  std::vector<T> whole(kRows * F), twice_passed(kRows * F);
  std::vector<A> whole_sums(3 * F), sums_of_first(3 * F), by_row(2 * kRows);
  NormReLUDropoutGrad pass{
      .forward = epilogue, .grad = ones.data(), .grad_x = whole.data(), .sums = whole_sums.data(), .num_groups = 1};
  device.norm_relu_dropout_grad(pass);
  pass.pass = RowGrad::first;
  pass.grad_x = twice_passed.data();
  pass.sums = sums_of_first.data();
  pass.by_row = by_row.data();
  device.norm_relu_dropout_grad(pass);
  for (A& sum : by_row) sum /= static_cast<A>(width);
  pass.pass = RowGrad::second;
  device.norm_relu_dropout_grad(pass);
  std::vector<double> want_whole(whole.size()), want_sums_of_first(2 * F);
  for (size_t i = 0; i < whole.size(); ++i) want_whole[i] = to_double(whole[i]);
  for (size_t i = 0; i < 2 * F; ++i) want_sums_of_first[i] = double(whole_sums[i]);
  sums_of_first.resize(2 * F);
  expect("norm_relu_dropout_grad, two passes", width, twice_passed, want_whole, sizeof(T) == 2 ? 0.05 : 1e-4);
  expect("norm_relu_dropout_grad, sums of the first pass", width, sums_of_first, want_sums_of_first, 1e-4);

  // Its derivative, without a norm: exact.
  constexpr int64_t kGroups = 3;
  std::vector<T> grad_x(kRows * F);
  std::vector<A> sums(static_cast<size_t>(kGroups) * 3 * F);
  std::vector<double> want_by_row(grad_x.size()), want_sums(2 * F);
  for (size_t i = 0; i < grad_x.size(); ++i) {
    const size_t c = i % F;
    const double value = to_double(a[i]), passes = value * double(scale[c]) + double(shift[c]) > 0;
    const double by_z = passes * to_double(mask[i]) * to_double(ones[i]);
    want_by_row[i] = by_z * double(scale[c]);
    want_sums[c] += by_z * value;
    want_sums[F + c] += by_z;
  }
  NormReLUDropoutGrad normless{.forward = {.keyed = keyed,
                                           .x = a.data(),
                                           .weight = scale.data(),
                                           .bias = shift.data(),
                                           .mean = nullptr,
                                           .rstd = nullptr,
                                           .y = nullptr,
                                           .eps = 0,
                                           .scale = 2,
                                           .threshold = 1u << 30,
                                           .norm = RowNorm::none,
                                           .relu = true,
                                           .element = kElement<T>},
                               .grad = ones.data(),
                               .grad_x = grad_x.data(),
                               .sums = sums.data(),
                               .num_groups = kGroups};
  device.norm_relu_dropout_grad(normless);
  expect("norm_relu_dropout_grad", width, grad_x, want_by_row);
  std::vector<A> added_sums(2 * F);
  for (size_t g = 0; g < kGroups; ++g) {
    for (size_t c = 0; c < 2 * F; ++c) added_sums[c] += sums[3 * g * F + c];
  }
  expect("norm_relu_dropout_grad, sums", width, added_sums, want_sums);

  // Sums are made without a weight and a bias, too: a caller may have seen by the output what ReLU let through.
  normless.forward.weight = normless.forward.bias = nullptr;
  std::fill(sums.begin(), sums.end(), A{0});
  device.norm_relu_dropout_grad(normless);
  std::vector<double> want_bias(F);
  for (size_t i = 0; i < grad_x.size(); ++i) want_bias[i % F] += to_double(a[i]) > 0 ? to_double(mask[i]) : 0;
  std::vector<A> by_bias(F);
  for (size_t g = 0; g < kGroups; ++g) {
    for (size_t c = 0; c < F; ++c) by_bias[c] += sums[(3 * g + 1) * F + c];
  }
  expect("norm_relu_dropout_grad, sums without a bias", width, by_bias, want_bias);
}

// Attention of three heads, with dropout, and with edge attributes or without: the sums, and the gradients of their
// products with small integers. Logits are small, so that no exponential loses what the others have.
template <class T, class Device>
void try_attention(const Device& device, AttentionForm form, int64_t columns, int64_t edge_columns, size_t gap = 0) {
  using A = accumulator_t<T>;
  constexpr size_t kHeads = 3;
  constexpr double kSlope = 0.25, kScale = 0.5, kKept = 4.0 / 3;
  const bool is_additive = form == AttentionForm::additive, is_dynamic = form == AttentionForm::dynamic;
  const bool is_dot = form == AttentionForm::dot, has_edges = edge_columns > 0;
  const auto C = static_cast<size_t>(columns), F = kHeads * C, D = static_cast<size_t>(edge_columns);
  const size_t L = is_additive ? kHeads : F;  // columns of queries and keys
  const Pattern p(kRows, kSources, Device::kHub);
  const size_t num_edges = p.col.size();
  // A power of two: where a logit is zero, so is the kernel's, and the slope is the same one.
  const double small = std::exp2(-std::ceil(std::log2(static_cast<double>(C + D + 1))));
  const auto drawn = [&]<class U>(U, size_t size, double scale) {
    std::vector<U> values(size);
    for (U& value : values) value = from_double<U>((draw(7) - 3) * scale);
    return values;
  };
  const auto value = integers<T>(kSources * F), grad = integers<T>(kRows * F), attr = drawn(T{}, num_edges * D, small);
  const auto key = drawn(T{}, kSources * L, small), query = drawn(T{}, kRows * L, small);
  const auto grad_z = integers<T>(is_dot ? kRows * kHeads * D : 0);
  const auto edge_weight = integers<T>(is_dynamic ? 0 : kRows * kHeads * D);
  const auto att = drawn(A{}, F, small), edge_rows = integers<A>(is_dynamic ? D * F : 0);
  std::vector<int32_t> place(num_edges);
  std::vector<int64_t> edge_key(num_edges);
  for (size_t e = 0; e < num_edges; ++e) {
    place[e] = static_cast<int32_t>(num_edges - 1 - e);
    edge_key[e] = static_cast<int64_t>(e * e);
  }

  struct Edge {
    size_t e, i, j, t, h;      // number, target, source, place; head
    double s, keep, by_logit;  // the latter once deltas are known
  };
  std::vector<Edge> edges;
  const auto ends = [&](const Edge& edge, size_t c) {  // dynamic
    double u = to_double(value[edge.j * F + edge.h * C + c]) + to_double(query[edge.i * F + edge.h * C + c]);
    for (size_t d = 0; d < D; ++d) {
      u += to_double(attr[edge.t * D + d]) * double(edge_rows[d * F + edge.h * C + c]);
    }
    return u;
  };
  const auto leaky = [&](double u) { return u > 0 ? u : kSlope * u; };
  for (size_t e = 0; e < num_edges; ++e) {
    for (size_t h = 0; h < kHeads; ++h) {
      const auto i = static_cast<size_t>(p.row[e]), j = static_cast<size_t>(p.col[e]);
      const auto t = static_cast<size_t>(place[e]);
      const auto row_key = static_cast<uint64_t>(edge_key[t]);
      const bool is_kept = philox_word(7, row_key, static_cast<int64_t>(h), Stream::dropout) >= 1u << 30;
      Edge edge{e, i, j, t, h, 0, is_kept ? kKept : 0, 0};
      if (is_additive) edge.s = to_double(key[j * L + h]) + to_double(query[i * L + h]);
      for (size_t c = 0; c < C; ++c) {
        if (is_dot) edge.s += to_double(key[j * L + h * C + c]) * to_double(query[i * L + h * C + c]);
        if (is_dynamic) edge.s += double(att[h * C + c]) * leaky(ends(edge, c));
      }
      for (size_t d = 0; d < D && !is_dynamic; ++d) {
        edge.s += to_double(edge_weight[(i * kHeads + h) * D + d]) * to_double(attr[t * D + d]);
      }
      edge.s = is_additive ? leaky(edge.s) : is_dot ? kScale * edge.s : edge.s;
      edges.push_back(edge);
    }
  }
  std::vector<double> lse(kRows * kHeads, -std::numeric_limits<double>::infinity()), delta(kRows * kHeads);
  std::vector<double> y(kRows * F), z(is_dot ? kRows * kHeads * D : 0);
  for (const Edge& edge : edges) {
    double& to = lse[edge.i * kHeads + edge.h];
    to = edge.s > to ? edge.s + std::log1p(std::exp(to - edge.s)) : to + std::log1p(std::exp(edge.s - to));
  }
  for (const Edge& edge : edges) {
    const size_t of_head = edge.i * kHeads + edge.h;
    const double weight = std::exp(edge.s - lse[of_head]) * edge.keep;
    for (size_t c = 0; c < C; ++c) y[of_head * C + c] += weight * to_double(value[edge.j * F + edge.h * C + c]);
    for (size_t d = 0; d < D && is_dot; ++d) z[of_head * D + d] += weight * to_double(attr[edge.t * D + d]);
  }
  for (size_t k = 0; k < y.size(); ++k) delta[k / C] += y[k] * to_double(grad[k]);
  for (size_t k = 0; k < z.size(); ++k) delta[k / D] += z[k] * to_double(grad_z[k]);

  std::vector<double> by_query(kRows * L), by_key(is_dynamic ? 0 : kSources * L), by_value(kSources * F);
  std::vector<double> by_weight(is_dynamic ? 0 : kRows * kHeads * D), by_attr(num_edges * D);
  std::vector<double> by_parameters(is_dynamic ? (1 + D) * F : 0);
  for (const Edge& edge : edges) {
    const size_t of_head = edge.i * kHeads + edge.h, row = edge.j * F + edge.h * C, own = edge.i * F + edge.h * C;
    const double probability = std::exp(edge.s - lse[of_head]), weight = probability * edge.keep;
    double product = 0;
    for (size_t c = 0; c < C; ++c) product += to_double(grad[own + c]) * to_double(value[row + c]);
    for (size_t d = 0; d < D && is_dot; ++d) {
      product += to_double(grad_z[of_head * D + d]) * to_double(attr[edge.t * D + d]);
      by_attr[edge.t * D + d] += weight * to_double(grad_z[of_head * D + d]);
    }
    double by_logit = probability * (edge.keep * product - delta[of_head]);
    if (is_additive) by_logit *= edge.s > 0 ? 1 : kSlope;
    if (is_dot) by_logit *= kScale;
    if (is_additive) by_query[of_head] += by_logit;
    if (is_additive) by_key[edge.j * L + edge.h] += by_logit;
    for (size_t c = 0; c < C; ++c) {
      by_value[row + c] += weight * to_double(grad[own + c]);
      if (is_dot) by_query[own + c] += by_logit * to_double(key[row + c]);
      if (is_dot) by_key[row + c] += by_logit * to_double(query[own + c]);
      if (!is_dynamic) continue;
      const double u = ends(edge, c), a = double(att[edge.h * C + c]), by_u = by_logit * a * (u > 0 ? 1 : kSlope);
      by_query[own + c] += by_u;
      by_value[row + c] += by_u;
      by_parameters[edge.h * C + c] += by_logit * leaky(u);
      for (size_t d = 0; d < D; ++d) {
        by_parameters[(1 + d) * F + edge.h * C + c] += by_u * to_double(attr[edge.t * D + d]);
        by_attr[edge.t * D + d] += by_u * double(edge_rows[d * F + edge.h * C + c]);
      }
    }
    for (size_t d = 0; d < D && !is_dynamic; ++d) {
      by_weight[of_head * D + d] += by_logit * to_double(attr[edge.t * D + d]);
      by_attr[edge.t * D + d] += by_logit * to_double(edge_weight[of_head * D + d]);
    }
  }

  const auto of = [](const auto& rows) -> const void* { return rows.empty() ? nullptr : rows.data(); };
  Slice value_rows(value, F, gap), key_rows(key, L, gap), query_rows(query, L, gap), attr_rows(attr, D, gap);
  constexpr int64_t kNear = 11;  // the other sources lie apart
  const auto far = [&](const auto& rows, size_t width) {
    return std::vector(rows.begin() + static_cast<int64_t>(std::min(rows.size(), kNear * width)), rows.end());
  };
  Slice far_values(far(value, F), F, 2 * gap), far_keys(far(key, L), L, gap);
  Slice weight_rows(edge_weight, kHeads * D, gap);
  Attention attention{.rowptr = p.rowptr.data(),
                      .col = p.col.data(),
                      .edge = place.data(),
                      .num_rows = kRows,
                      .num_edges = static_cast<int64_t>(num_edges),
                      .first_row = 0,
                      .value = value_rows.data(),
                      .key = is_dynamic ? nullptr : key_rows.data(),
                      .query = query_rows.data(),
                      .edge_attr = attr_rows.data(),
                      .edge_weight = is_dynamic ? of(edge_rows) : weight_rows.data(),
                      .att = is_dynamic ? att.data() : nullptr,
                      .value_stride = value_rows.stride(),
                      .key_stride = key_rows.stride(),
                      .query_stride = query_rows.stride(),
                      .edge_attr_stride = attr_rows.stride(),
                      .edge_weight_stride = weight_rows.stride(),
                      .far_value = far_values.data(),
                      .far_key = is_dynamic ? nullptr : far_keys.data(),
                      .far_value_stride = far_values.stride(),
                      .far_key_stride = far_keys.stride(),
                      .num_near = kNear,
                      .edge_key = edge_key.data(),
                      .seed = 7,
                      .threshold = 1u << 30,
                      .num_heads = kHeads,
                      .num_columns = columns,
                      .num_edge_columns = edge_columns,
                      .slope = kSlope,
                      .scale = kScale,
                      .dropout_scale = kKept,
                      .form = form,
                      .element = kElement<T>,
                      .scratch = nullptr};
  const double tolerance = sizeof(T) == 2 ? 0.05 : sizeof(T) == 4 ? 1e-4 : 1e-11;
  const double range = tolerance * static_cast<double>(C + D);
  std::vector<T> got_y(y.size()), got_z(z.size()), got_by_query(by_query.size()), got_by_key(by_key.size());
  std::vector<T> got_by_value(by_value.size()), got_by_weight(by_weight.size()), got_by_attr(by_attr.size());
  std::vector<A> got_lse(lse.size()), given_delta(delta.begin(), delta.end()), got_by_parameters(by_parameters.size());
  const auto to = [](auto& rows) -> void* { return rows.empty() ? nullptr : rows.data(); };
  device.attention({attention, got_y.data(), to(got_z), got_lse.data(), false, false});
  expect("attention", columns, got_y, y, tolerance);
  expect("attention, z", columns, got_z, z, tolerance);
  expect("attention, lse", columns, got_lse, lse, tolerance);

  AttentionGrad gradient{.attention = attention,
                         .lse = got_lse.data(),
                         .delta = given_delta.data(),
                         .grad_y = grad.data(),
                         .grad_z = of(grad_z),
                         .by_query = got_by_query.data(),
                         .by_edge_weight = to(got_by_weight),
                         .by_edge_attr = to(got_by_attr),
                         .by_parameters = to(got_by_parameters),
                         .by_value = got_by_value.data(),
                         .by_key = to(got_by_key),
                         .wide = false};
  device.attention_by_target(gradient);
  expect("attention_by_target, query", columns, got_by_query, by_query, range);
  expect("attention_by_target, edge_weight", columns, got_by_weight, by_weight, range);
  expect("attention_by_target, edge_attr", columns, got_by_attr, by_attr, range);
  expect("attention_by_target, parameters", columns, got_by_parameters, by_parameters, has_edges ? 9 * range : range);

  std::vector<int64_t> rowptr{0};
  std::vector<int32_t> col, back_place;
  for (int32_t j = 0; j < kSources; ++j) {
    for (size_t e = 0; e < num_edges; ++e) {
      if (p.col[e] != j) continue;
      col.push_back(static_cast<int32_t>(p.row[e]));
      back_place.push_back(place[e]);
    }
    rowptr.push_back(static_cast<int64_t>(col.size()));
  }
  gradient.attention.rowptr = rowptr.data();
  gradient.attention.col = col.data();
  gradient.attention.edge = back_place.data();
  gradient.attention.num_rows = gradient.attention.num_near = kSources;
  device.attention_by_source(gradient);
  expect("attention_by_source, value", columns, got_by_value, by_value, range);
  expect("attention_by_source, key", columns, got_by_key, by_key, range);
}

// Source 0 has logits of -infinity, all others have zeros: they alone count, and where there are none, sums are NaN in
// rows with all edges of their targets and zeros in parts of them.
template <class T, class Device>
void try_masked_attention(const Device& device, AttentionForm form) {
  using A = accumulator_t<T>;
  constexpr int64_t kColumns = 33, kNumSources = 5;
  constexpr size_t C = kColumns, kMany = 40;  // more than a batch
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Row {
    size_t before, others, behind;  // masked edges, then others, then masked ones
  };
  const size_t hub = kMany + Device::kHub;
  const std::vector<Row> rows{{0, 0, 0},   {1, 0, 0},   {kMany, 3, 0}, {2, 4, kMany}, {hub, 5, 0},
                              {3, 2, hub}, {hub, 0, 0}, {0, 6, 0},     {kMany, 0, 0}, {0, 0, 0},
                              {hub, 0, 0}, {hub, 3, 1}, {kMany, 0, 0}};
  std::vector<int64_t> rowptr{0}, target;
  std::vector<int32_t> col, place;
  for (const Row& row : rows) {
    for (size_t e = 0; e < row.before + row.others + row.behind; ++e) {
      const bool is_masked = e < row.before || e >= row.before + row.others;
      col.push_back(is_masked ? 0 : static_cast<int32_t>(1 + (e - row.before) % (kNumSources - 1)));
      place.push_back(static_cast<int32_t>(place.size()));
      target.push_back(static_cast<int64_t>(rowptr.size()) - 1);
    }
    rowptr.push_back(static_cast<int64_t>(col.size()));
  }
  const size_t num_rows = rows.size(), num_edges = col.size(), L = form == AttentionForm::dot ? C : 1;
  const auto value = integers<T>(kNumSources * C), grad = integers<T>(num_rows * C);
  std::vector<T> key(kNumSources * L, from_double<T>(0)), query(num_rows * L, from_double<T>(1));
  std::fill_n(key.data(), L, from_double<T>(-kInfinity));
  if (form == AttentionForm::additive) std::fill(query.begin(), query.end(), from_double<T>(0));

  const auto is_alone = [&](size_t i) { return rows[i].others == 0 && rowptr[i] < rowptr[i + 1]; };
  std::vector<double> y(num_rows * C), lse(num_rows), delta(num_rows), by_value(kNumSources * C);
  std::vector<double> by_query(num_rows * L), by_key(kNumSources * L);
  for (size_t i = 0; i < num_rows; ++i) {
    lse[i] = std::log(static_cast<double>(rows[i].others));
    if (is_alone(i) || (form == AttentionForm::dot && rows[i].before + rows[i].behind > 0)) {
      std::fill_n(&by_query[i * L], L, std::nan(""));
    }
  }
  const auto share = [&](size_t i) { return 1 / static_cast<double>(rows[i].others); };
  for (size_t e = 0; e < num_edges; ++e) {
    const auto i = static_cast<size_t>(target[e]), j = static_cast<size_t>(col[e]);
    for (size_t c = 0; c < C && j > 0; ++c) y[i * C + c] += share(i) * to_double(value[j * C + c]);
  }
  for (size_t k = 0; k < y.size(); ++k) delta[k / C] += y[k] * to_double(grad[k]);
  std::fill_n(by_value.data(), C, std::nan(""));  // of rows where source 0 is alone
  std::fill_n(by_key.data(), L, std::nan(""));
  for (size_t e = 0; e < num_edges; ++e) {
    const auto i = static_cast<size_t>(target[e]), j = static_cast<size_t>(col[e]);
    if (j == 0) continue;
    double product = 0;
    for (size_t c = 0; c < C; ++c) {
      product += to_double(grad[i * C + c]) * to_double(value[j * C + c]);
      by_value[j * C + c] += share(i) * to_double(grad[i * C + c]);
    }
    for (size_t c = 0; c < L; ++c) by_key[j * L + c] += share(i) * (product - delta[i]);
  }

  Attention attention{};
  attention.rowptr = rowptr.data();
  attention.col = col.data();
  attention.edge = place.data();
  attention.num_rows = static_cast<int64_t>(num_rows);
  attention.num_edges = static_cast<int64_t>(num_edges);
  attention.value = value.data();
  attention.key = key.data();
  attention.query = query.data();
  attention.value_stride = kColumns;
  attention.num_near = kNumSources;
  attention.key_stride = attention.query_stride = static_cast<int64_t>(L);
  attention.num_heads = 1;
  attention.num_columns = kColumns;
  attention.slope = attention.scale = attention.dropout_scale = 1;
  attention.form = form;
  attention.element = kElement<T>;
  std::vector<T> got_y(y.size()), got_by_query(by_query.size()), got_by_value(by_value.size()),
      got_by_key(by_key.size());
  std::vector<A> got_lse(lse.size()), given_delta(delta.begin(), delta.end());
  const double tolerance = sizeof(T) == 4 ? 1e-4 : 1e-11;
  device.attention({attention, got_y.data(), nullptr, got_lse.data(), true, false});
  expect("attention, masked, in parts", kColumns, got_y, y, tolerance);
  for (size_t i = 0; i < num_rows; ++i) {
    if (is_alone(i)) std::fill_n(&y[i * C], C, std::nan(""));
  }
  device.attention({attention, got_y.data(), nullptr, got_lse.data(), false, false});
  expect("attention, masked", kColumns, got_y, y, tolerance);
  expect("attention, masked, lse", kColumns, got_lse, lse, tolerance);

  AttentionGrad gradient{};
  gradient.attention = attention;
  gradient.lse = got_lse.data();
  gradient.delta = given_delta.data();
  gradient.grad_y = grad.data();
  gradient.by_query = got_by_query.data();
  gradient.by_value = got_by_value.data();
  gradient.by_key = got_by_key.data();
  device.attention_by_target(gradient);
  expect("attention_by_target, masked", kColumns, got_by_query, by_query, tolerance * kColumns);

  std::vector<int64_t> back_rowptr{0};
  std::vector<int32_t> back_col, back_place;
  for (int32_t j = 0; j < kNumSources; ++j) {
    for (size_t e = 0; e < num_edges; ++e) {
      if (col[e] != j) continue;
      back_col.push_back(static_cast<int32_t>(target[e]));
      back_place.push_back(place[e]);
    }
    back_rowptr.push_back(static_cast<int64_t>(back_col.size()));
  }
  gradient.attention.rowptr = back_rowptr.data();
  gradient.attention.col = back_col.data();
  gradient.attention.edge = back_place.data();
  gradient.attention.num_rows = kNumSources;
  device.attention_by_source(gradient);
  expect("attention_by_source, masked, value", kColumns, got_by_value, by_value, tolerance * kColumns);
  expect("attention_by_source, masked, key", kColumns, got_by_key, by_key, tolerance * kColumns);
}

// Rows that are added to few targets, most of them to one.
template <class T, class Device>
void try_hub_of_rows(const Device& device, int64_t width, size_t num_rows) {
  const auto F = static_cast<size_t>(width);
  const auto rows = integers<T>(num_rows * F);
  auto added = integers<T>(kRows * F);
  std::vector<double> want(added.size());
  for (size_t i = 0; i < added.size(); ++i) want[i] = to_double(added[i]);
  std::vector<int64_t> index(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    index[r] = r % 3 == 0 ? draw(kRows) : 7;
    for (size_t c = 0; c < F; ++c) want[static_cast<size_t>(index[r]) * F + c] += to_double(rows[r * F + c]);
  }
  device.scatter_add_rows({index.data(), nullptr, rows.data(), added.data(), static_cast<int64_t>(num_rows), kRows,
                           width, width, width, kElement<T>});
  expect("scatter_add_rows, a hub", width, added, want);
}

// Entries enough for several tiles of a sort, and columns for two of its steps.
template <class Device>
void try_transpose(const Device& device) {
  constexpr int kColumns = 300;
  const Pattern p(kRows, kColumns, 12000);
  const size_t num_edges = p.col.size();
  std::vector<int64_t> rowptr(kColumns + 1), entry(num_edges);
  std::vector<int32_t> col(num_edges);
  device.transpose_csr({.rowptr = p.rowptr.data(),
                        .col = p.col.data(),
                        .num_rows = kRows,
                        .num_cols = kColumns,
                        .num_entries = static_cast<int64_t>(num_edges),
                        .out_rowptr = rowptr.data(),
                        .out_col = col.data(),
                        .out_entry = entry.data()});
  size_t k = 0;
  for (int32_t column = 0; column < kColumns; ++column) {
    failures += rowptr[static_cast<size_t>(column)] != static_cast<int64_t>(k);
    for (size_t e = 0; e < num_edges; ++e) {
      if (p.col[e] != column) continue;
      failures += entry[k] != static_cast<int64_t>(e) || col[k] != p.row[e];
      ++k;
    }
  }
  failures += rowptr[kColumns] != static_cast<int64_t>(num_edges);
}

// Rows in any order, a hub and empty ones among them, and every third column left out.
template <class Device>
void try_restrict(const Device& device) {
  constexpr int kColumns = 90;
  const Pattern p(kRows, kColumns, 500);
  std::vector<int64_t> row, column, place(kColumns, -1);
  for (int64_t r = 0; r < kRows; r += 2) row.push_back(kRows - 1 - r);
  row.push_back(7);
  for (int64_t c = 0; c < kColumns; ++c) {
    if (c % 3 == 0) continue;
    place[static_cast<size_t>(c)] = static_cast<int64_t>(column.size());
    column.push_back(c);
  }
  std::vector<int64_t> rowptr(row.size() + 1, -1), turned_rowptr(column.size() + 1, -1), entry, turned_entry;
  std::vector<int32_t> col, turned_col;
  const BadRestriction bad =
      device.restrict_csr({.rowptr = p.rowptr.data(),
                           .col = p.col.data(),
                           .row = row.data(),
                           .column = column.data(),
                           .num_all_rows = kRows,
                           .num_all_entries = static_cast<int64_t>(p.col.size()),
                           .num_all_cols = kColumns,
                           .num_rows = static_cast<int64_t>(row.size()),
                           .num_cols = static_cast<int64_t>(column.size()),
                           .out_rowptr = rowptr.data(),
                           .turned_rowptr = turned_rowptr.data()},
                          [&](int64_t size) -> RestrictedEntries {
                            const auto count = static_cast<size_t>(size);
                            for (auto* entries : {&entry, &turned_entry}) entries->assign(count, -1);
                            for (auto* columns : {&col, &turned_col}) columns->assign(count, -1);
                            return {col.data(), entry.data(), turned_col.data(), turned_entry.data()};
                          });
  failures += bad.row.position >= 0 || bad.column.position >= 0;
  size_t k = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    failures += rowptr[i] != static_cast<int64_t>(k);
    const auto r = static_cast<size_t>(row[i]);
    for (int64_t e = p.rowptr[r]; e < p.rowptr[r + 1]; ++e) {
      const int64_t there = place[static_cast<size_t>(p.col[static_cast<size_t>(e)])];
      if (there < 0) continue;
      failures += k >= entry.size() || entry[k] != e || col[k] != there;
      ++k;
    }
  }
  failures += rowptr[row.size()] != static_cast<int64_t>(k) || k != entry.size();
  std::vector<int64_t> order;
  for (size_t c = 0; c < column.size(); ++c) {
    failures += turned_rowptr[c] != static_cast<int64_t>(order.size());
    for (size_t e = 0; e < col.size(); ++e) {
      if (col[e] == static_cast<int32_t>(c)) order.push_back(static_cast<int64_t>(e));
    }
  }
  failures += turned_entry != order;
}

// All of it; the number of wrong values so far.
template <class Device>
int64_t try_all(const Device& device) {
  state = 1;
  std::vector<int64_t> place(100), there(100);
  for (size_t i = 0; i < place.size(); ++i) place[i] = static_cast<int64_t>(i);
  device.keyed_permutation({place.data(), there.data(), 100, 100, 7});
  std::sort(there.begin(), there.end());
  failures += there != place;
  try_transpose(device);
  if constexpr (requires { &Device::restrict_csr; }) try_restrict(device);
  try_hub_of_rows<float>(device, 16, 700);
  try_hub_of_rows<double>(device, 33, 700);
  try_hub_of_rows<BFloat16>(device, 8, 40);
  for (int64_t width : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 47, 64, 100, 129, 256, 528, 602}) {
    try_width<float>(device, width);
  }
  for (int64_t width : {1, 3, 8, 15, 33, 64, 129, 384, 602}) {
    try_width<double>(device, width);
    try_width<BFloat16>(device, width);
    try_width<Float16>(device, width);
  }
  // Slices of larger rows.
  for (const size_t gap : {1, 2}) {
    for (int64_t width : {1, 16, 64, 129}) try_width<float>(device, width, gap);
    try_width<double>(device, 16, gap);
    try_width<BFloat16>(device, 64, gap);
    try_width<Float16>(device, 33, 2 * gap);
  }
  for (const AttentionForm form : {AttentionForm::additive, AttentionForm::dynamic, AttentionForm::dot}) {
    for (int64_t width : {1, 7, 8, 64, 129}) {
      const int64_t edge_columns = width % 2 == 0 ? 0 : width == 7 ? 9 : 2;
      try_attention<float>(device, form, width, edge_columns);
    }
    try_attention<double>(device, form, 7, 2);
    try_attention<double>(device, form, 33, 0);
    try_attention<BFloat16>(device, form, 64, 2);
    try_attention<Float16>(device, form, 8, 1);
    try_attention<float>(device, form, 8, 2, 1);
    try_attention<BFloat16>(device, form, 64, 2, 2);
  }
  for (const AttentionForm form : {AttentionForm::additive, AttentionForm::dot}) {
    try_masked_attention<float>(device, form);
    try_masked_attention<double>(device, form);
  }
  return failures;
}

}  // namespace
}  // namespace pyg_dist
