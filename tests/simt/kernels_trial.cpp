// Every kernel for GPUs in the emulator, by three orders of blocks and threads, whose results have the same bits:
// `make simt` runs it under sanitizers.

#include "cross/kernels_trial.h"

#include <cstdio>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

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
  // With one row more, which goes nowhere.
  void scatter_add_rows(ScatterAddRows p) const {
    std::vector<int64_t> index(p.index, p.index + p.num_rows);
    index.push_back(p.num_out_rows);
    p.index = index.data();
    ++p.num_rows;
    gpu::scatter_add_rows(p, check_, queue());
    if (!takes_bad()) throw std::runtime_error("scatter_add_rows: expected an index out of range to be found");
  }
  bool gather_rows(const GatherRows& p) const {
    gpu::gather_rows(p, check_, queue());
    return !takes_bad();
  }
  void extreme_csr(const ExtremeCsr& p) const { gpu::extreme_csr(p, queue()); }
  void extreme_csr_shares(const ExtremeCsr& p) const { gpu::extreme_csr_shares(p, queue()); }
  void extreme_csr_grad(const ExtremeCsr& p) const { gpu::extreme_csr_grad(p, queue()); }
  void keyed_dropout(const KeyedDropout& p) const { gpu::keyed_dropout(p, queue()); }
  void keyed_uniform(const KeyedNumbers& p) const { gpu::keyed_uniform(p, queue()); }
  void keyed_normal(const KeyedNumbers& p) const { gpu::keyed_normal(p, queue()); }
  void keyed_permutation(const KeyedPermutation& p) const { gpu::keyed_permutation(p, check_, queue()); }
  void row_epilogue(const RowEpilogue& p) const { gpu::row_epilogue(p, queue()); }
  void row_epilogue_grad(const RowEpilogueGrad& p) const { gpu::row_epilogue_grad(p, queue()); }
  void transpose_csr(const TransposeCsr& p) const { gpu::transpose_csr(p, check_, queue()); }
  void quantize_csr(const QuantizeCsr& p) const { gpu::quantize_csr(p, queue()); }
  void dequantize_csr_add(const DequantizeCsr& p) const { gpu::dequantize_csr_add(p, queue()); }

 private:
  // Whether an index out of range has been found since.
  bool takes_bad() const { return std::exchange(*cell_, {}).ready != 0; }

  gpu::Queue queue() const {
    scratch_.clear();
    return {nullptr, [this](int64_t num_bytes) {
              scratch_.push_back(std::make_unique_for_overwrite<char[]>(static_cast<size_t>(num_bytes)));
              std::memset(scratch_.back().get(), 0xff, static_cast<size_t>(num_bytes));
              return static_cast<void*>(scratch_.back().get());
            }};
  }

  mutable std::vector<std::unique_ptr<char[]>> scratch_;
  std::unique_ptr<gpu::BadIndexCell> cell_ = std::make_unique<gpu::BadIndexCell>();
  gpu::IndexCheck check_{"trial", "index", cell_.get()};
};

}  // namespace
}  // namespace pyg_dist

int main() {
  using namespace pyg_dist;
  try {
    const Simulated device;
    uint64_t first = 0;
    for (const uint64_t seed : {1, 2, 3}) {
      digest = 0;
      simt::set_seed(seed);
      const int64_t wrong = try_all(device);
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
