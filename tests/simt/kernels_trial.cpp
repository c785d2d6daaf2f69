// Every kernel for GPUs in the emulator, by three orders of blocks and threads, whose results have the same bits:
// `make simt` runs it under sanitizers.

#include "cross/kernels_trial.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "fibers.h"

namespace pyg_dist {
namespace {

// Scratch memory in blocks of their own, so that AddressSanitizer knows their ends, and full of NaNs.
class Simulated {
 public:
  static constexpr int kHub = 300;  // several chunks

  void spmm_csr(const SpmmCsr& p) const { gpu::spmm_csr(p, queue()); }
  void sddmm_csr(const SddmmCsr& p) const { gpu::sddmm_csr(p, queue()); }
  // Of an odd number of rows with one more, which goes nowhere.
  void scatter_add_rows(ScatterAddRows p) const {
    if (p.num_rows % 2 == 0) return gpu::scatter_add_rows(p, check_, queue(), p.num_rows / 2 + 1);  // two pieces
    std::vector<int64_t> index(p.index, p.index + p.num_rows);
    index.push_back(p.num_out_rows);
    p.index = index.data();
    ++p.num_rows;
    gpu::scatter_add_rows(p, check_, queue());
    if (!takes_bad()) throw std::runtime_error("scatter_add_rows: expected an index out of range to be found");
  }
  // Rows with an index out of range become NaN.
  bool gather_rows(const GatherRows& p) const {
    gpu::gather_rows(p, check_, queue());
    for (int64_t r = 0; r < p.num_rows; ++r) {
      if (p.index[r] >= 0 && p.index[r] < p.num_source_rows) continue;
      const char* const row = p.out + r * p.out_stride;
      if (std::count(row, row + p.row_bytes, '\xff') != p.row_bytes) {
        throw std::runtime_error("gather_rows: expected NaN where an index is out of range");
      }
    }
    return !takes_bad();
  }
  void extreme_csr(const ExtremeCsr& p) const { gpu::extreme_csr(p, queue()); }
  void extreme_csr_shares(const ExtremeCsr& p) const { gpu::extreme_csr_shares(p, queue()); }
  void extreme_csr_grad(const ExtremeCsr& p) const { gpu::extreme_csr_grad(p, queue()); }
  void attention(const AttentionForward& p) const { gpu::attention(p, queue()); }
  void attention_by_target(const AttentionGrad& p) const { gpu::attention_by_target(p, queue()); }
  void attention_by_source(const AttentionGrad& p) const { gpu::attention_by_source(p, queue()); }
  void keyed_dropout(const KeyedDropout& p) const { gpu::keyed_dropout(p, queue()); }
  void keyed_uniform(const KeyedNumbers& p) const { gpu::keyed_uniform(p, queue()); }
  void keyed_normal(const KeyedNumbers& p) const { gpu::keyed_normal(p, queue()); }
  // With one place more, which is none.
  void keyed_permutation(KeyedPermutation p) const {
    std::vector<int64_t> place(p.place, p.place + p.num_places), y(place.size() + 1);
    place.push_back(p.size);
    const KeyedPermutation longer{place.data(), y.data(), p.num_places + 1, p.size, p.seed};
    gpu::keyed_permutation(longer, check_, queue());
    if (!takes_bad() || y.back() != -1) {
      throw std::runtime_error("keyed_permutation: expected -1 where a place is out of range");
    }
    std::copy_n(y.data(), p.num_places, p.y);
  }
  void norm_relu_dropout(const NormReLUDropout& p) const { gpu::norm_relu_dropout(p, queue()); }
  void norm_relu_dropout_grad(const NormReLUDropoutGrad& p) const { gpu::norm_relu_dropout_grad(p, queue()); }
  void transpose_csr(const TransposeCsr& p) const { gpu::transpose_csr(p, check_, queue()); }
  BadRestriction restrict_csr(const RestrictCsr& p, const MakeEntries& make_entries) const {
    return gpu::restrict_csr(p, make_entries, queue());
  }
  void quantize_csr(const QuantizeCsr& p) const { gpu::quantize_csr(p, queue()); }
  void dequantize_csr_add(const DequantizeCsr& p) const { gpu::dequantize_csr_add(p, queue()); }

  size_t num_scratch() const { return scratch_.size(); }  // of the last op

 private:
  // Whether an index out of range has been found since.
  bool takes_bad() const { return gpu::take_bad_index(check_.found, nullptr).has_value(); }

  gpu::Queue queue() const {
    scratch_.clear();
    return {nullptr, [this](int64_t num_bytes) {
              scratch_.push_back(std::make_unique_for_overwrite<char[]>(static_cast<size_t>(num_bytes)));
              std::memset(scratch_.back().get(), 0xff, static_cast<size_t>(num_bytes));
              return static_cast<void*>(scratch_.back().get());
            }};
  }

  mutable std::vector<std::unique_ptr<char[]>> scratch_;
  gpu::IndexCheck check_{"trial", "index", gpu::new_bad_indexes()};
};

// A row that cannot be packed is told of, and is NaN where it arrives; with 16 bits, its values are that cannot.
int64_t try_unpackable(const Simulated& device) {
  constexpr int64_t kColumns = 70;
  const std::vector<int64_t> rowptr{0, 1, 2}, key{5, 6};
  const std::vector<int32_t> col{0, 1};
  std::vector<float> x(2 * kColumns, 1);
  x[kColumns + 66] = std::numeric_limits<float>::infinity();
  int64_t wrong = 0;
  for (const int bits : {2, 4, 8, 16}) {
    const int64_t row_bytes = packed_row_bytes(kColumns, bits);
    std::vector<uint8_t> packed(static_cast<size_t>(2 * row_bytes));
    std::vector<float> out(2 * kColumns);
    int64_t bad_row = 0;
    QuantizeCsr problem{};
    problem.sums = {.rowptr = rowptr.data(),
                    .col = col.data(),
                    .x = x.data(),
                    .weight = nullptr,
                    .row_scale = nullptr,
                    .col_scale = nullptr,
                    .out = nullptr,
                    .num_rows = 2,
                    .num_source_rows = 2,
                    .num_edges = 2,
                    .num_features = kColumns,
                    .x_stride = kColumns,
                    .out_stride = kColumns,
                    .x_element = Element::f32,
                    .out_element = Element::f32,
                    .accumulate = false,
                    .divide = false};
    problem.key = key.data();
    problem.packed = packed.data();
    problem.bad_row = &bad_row;
    problem.bits = bits;
    device.quantize_csr(problem);
    wrong += device.num_scratch() != 0;  // no row is a sum
    device.dequantize_csr_add({rowptr.data(), col.data(), packed.data(), packed.data() + packed.size(), nullptr,
                               nullptr, out.data(), 2, 2, kColumns, kColumns, bits, Element::f32});
    wrong += bad_row != 1;
    for (size_t c = 0; c < kColumns; ++c) {
      wrong += out[c] != 1;
      wrong += std::isnan(out[kColumns + c]) != (bits < 16 || c == 66);
    }
  }
  return wrong;
}

// Rows of no edges, one and two, as many as edges, are packed as beside one row more, where they are summed beforehand.
int64_t try_as_many_edges(const Simulated& device) {
  constexpr int64_t kColumns = 70, kRows = 3;
  const std::vector<int64_t> rowptr{0, 1, 1, 3, 3}, key{5, 6, 7, 8};
  const std::vector<int32_t> col{1, 0, 1};
  const std::vector<float> weight{2, 1, 3}, scale{1, 2};
  const auto x = integers<float>(2 * kColumns);
  int64_t wrong = 0;
  for (const int bits : {2, 4, 8, 16}) {
    const auto row_bytes = static_cast<size_t>(packed_row_bytes(kColumns, bits));
    std::vector<uint8_t> packed[2];
    for (const int64_t more : {0, 1}) {
      packed[more].resize(static_cast<size_t>(kRows + more) * row_bytes);
      int64_t bad_row = 0;
      QuantizeCsr problem{};
      problem.sums.rowptr = rowptr.data(), problem.sums.col = col.data(), problem.sums.x = x.data();
      problem.sums.weight = weight.data(), problem.sums.col_scale = scale.data();
      problem.sums.num_rows = kRows + more, problem.sums.num_source_rows = 2, problem.sums.num_edges = kRows;
      problem.sums.num_features = problem.sums.x_stride = problem.sums.out_stride = kColumns;
      problem.sums.x_element = problem.sums.out_element = Element::f32;
      problem.key = key.data(), problem.packed = packed[more].data(), problem.bad_row = &bad_row, problem.bits = bits;
      device.quantize_csr(problem);
      wrong += bad_row != kAllFinite;
      wrong += (device.num_scratch() == 0) != (more == 0);
    }
    wrong += !std::equal(packed[0].begin(), packed[0].end(), packed[1].begin());
  }
  return wrong;
}

// Lanes that read what their neighbours have written, without a barrier of the warp or of the block between: errors,
// of which make racecheck must hear.
template <bool kOfBlock>
struct Race {
  static constexpr int kThreads = 64;
  struct Shared {
    int32_t number[kThreads];
  };

  int32_t* to;

  PYG_DIST_DEVICE void operator()(Shared& shared) const {
    shared.number[gpu::thread_id()] = gpu::thread_id();
    if (kOfBlock) {
      gpu::warp_sync(gpu::kAllLanes);
    } else {
      gpu::ballot(gpu::kAllLanes, true);  // which all lanes reach, and which orders nothing
    }
    to[gpu::thread_id()] = shared.number[gpu::thread_id() ^ (kOfBlock ? gpu::kWarp : 1)];
  }
};

template <bool kOfBlock>
int64_t try_race() {
  std::vector<int32_t> to(Race<kOfBlock>::kThreads);
  gpu::launch(Race<kOfBlock>{to.data()}, 1, nullptr);
  return 0;
}

// Each kernel in a case or two, for make racecheck.
int64_t try_few(const Simulated& device) {
  state = 1;
  try_transpose(device);
  try_restrict(device);
  try_hub_of_rows<float>(device, 16, 700);
  try_hub_of_rows<BFloat16>(device, 8, 40);
  try_width<float>(device, 33);
  try_width<BFloat16>(device, 64);
  try_width<Float16>(device, 256);  // a lane holds two vectors of a row
  for (const AttentionForm form : {AttentionForm::additive, AttentionForm::dynamic, AttentionForm::dot}) {
    try_attention<float>(device, form, 7, 9);
  }
  return failures + try_unpackable(device) + try_as_many_edges(device);
}

// Rows that lie more than 2^32 bytes apart, in address space that takes no memory.
int64_t try_far_rows(const Simulated& device) {
  constexpr int64_t kColumns = 3, kStride = (int64_t{1} << 30) + 8;
  constexpr size_t kBytes = (2 * kStride + kColumns) * sizeof(float);
  void* const mapped =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("trial: no address space for rows that lie far apart");
  auto* const x = static_cast<float*>(mapped);
  const float last[] = {3, 5, 7};
  std::copy_n(last, kColumns, x + 2 * kStride);
  const int64_t rowptr[] = {0, 1}, index[] = {2};
  const int32_t col[] = {2}, edge[] = {0};
  int64_t wrong = 0;
  float row[kColumns] = {};
  const auto expect_last = [&](float* got) {
    wrong += !std::equal(got, got + kColumns, last);
    std::fill_n(got, kColumns, 0.0f);
  };

  SpmmCsr spmm{};
  spmm.rowptr = rowptr, spmm.col = col, spmm.x = x, spmm.out = row;
  spmm.num_rows = spmm.num_edges = 1, spmm.num_source_rows = 3, spmm.num_features = spmm.out_stride = kColumns;
  spmm.x_stride = kStride, spmm.x_element = spmm.out_element = Element::f32;
  device.spmm_csr(spmm);
  expect_last(row);
  float dot = 0;
  device.sddmm_csr({rowptr, col, last, x, &dot, 1, 1, kColumns, kColumns, kStride, Element::f32});
  wrong += dot != 83;
  wrong += !device.gather_rows({reinterpret_cast<const char*>(x), index, reinterpret_cast<char*>(row), 3, 1,
                                sizeof(row), kStride * int64_t{sizeof(float)}, sizeof(row)});
  expect_last(row);
  device.extreme_csr({rowptr, col, x, nullptr, nullptr, row, 1, 1, kColumns, kStride, 0, Element::f32, true});
  expect_last(row);
  float lse = 0;
  Attention attention{};
  attention.rowptr = rowptr, attention.col = col, attention.edge = edge, attention.value = attention.key = x;
  attention.num_rows = attention.num_edges = attention.num_heads = 1, attention.num_columns = kColumns;
  attention.value_stride = attention.key_stride = kStride, attention.element = Element::f32, attention.num_near = 3;
  device.attention({attention, row, nullptr, &lse, false, false});
  wrong += lse != last[0];
  expect_last(row);

  uint8_t packed[2 * kColumns];
  int64_t bad_row = 0;
  QuantizeCsr quantize{};
  quantize.sums = spmm, quantize.packed = packed, quantize.bad_row = &bad_row, quantize.bits = 16;
  device.quantize_csr(quantize);
  auto* const packed_rows = static_cast<uint8_t*>(mapped);
  const int32_t far[] = {1 << 30};  // of six bytes each
  std::copy_n(packed, sizeof(packed), packed_rows + int64_t{far[0]} * int64_t{sizeof(packed)});
  device.dequantize_csr_add({rowptr, far, packed_rows, packed_rows + kBytes, nullptr, nullptr, row, 1, 1, kColumns,
                             kColumns, 16, Element::f32});
  expect_last(row);

  const int64_t to_one[] = {0, 0, 0};
  device.scatter_add_rows({to_one, nullptr, x, row, 3, 1, kColumns, kStride, kColumns, Element::f32});
  expect_last(row);
  expect_last(x + 2 * kStride);
  device.scatter_add_rows({index, nullptr, last, x, 1, 3, kColumns, kColumns, kStride, Element::f32});
  expect_last(x + 2 * kStride);
  munmap(mapped, kBytes);
  return wrong;
}

// A grid that no GPU has is refused before it is launched.
int64_t try_large_grids() {
  int64_t wrong = 2;
  for (const auto& [num_blocks, num_slices] : {std::pair{int64_t{1} << 31, int64_t{1}}, {1, 1 << 16}}) {
    try {
      gpu::check_grid(num_blocks, num_slices);
    } catch (const std::runtime_error&) {
      --wrong;
    }
  }
  gpu::check_grid((int64_t{1} << 31) - 1, (1 << 16) - 1);
  return wrong;
}

}  // namespace
}  // namespace pyg_dist

// With an argument: a few cases in one order, or a race.
int main(int count, char** arguments) {
  using namespace pyg_dist;
  try {
    static const Simulated device;
    if (count > 1) {
      const std::string what = arguments[1];
      const int64_t wrong = what == "few" ? try_few(device) : what == "warp" ? try_race<false>() : try_race<true>();
      std::printf("simt, a few cases: %lld wrong values\n", static_cast<long long>(wrong));
      return wrong != 0;
    }
    uint64_t first = 0;
    for (const uint64_t seed : {1, 2, 3}) {
      digest = 0;
      simt::set_seed(seed);
      const int64_t wrong = try_all(device) + try_unpackable(device) + try_as_many_edges(device) +
                            try_far_rows(device) + try_large_grids();
      if (seed == 1) first = digest;
      std::printf("simt, order %d: %lld wrong values%s\n", static_cast<int>(seed), static_cast<long long>(wrong),
                  digest == first ? "" : ", other bits than in order 1");
      if (wrong != 0 || digest != first) return 1;
    }
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
