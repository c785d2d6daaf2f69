#include "kernels/cpu/table.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(PYG_DIST_SVE_LEVELS)
#  include <sys/auxv.h>
#  include <sys/prctl.h>
#endif

namespace pyg_dist {
namespace {

#define PYG_DIST_TABLE(level)                                                                                        \
  Kernels {                                                                                                          \
    .isa = #level, .spmm_rows = level::spmm_rows, .sddmm_edges = level::sddmm_edges,                                 \
    .extreme_rows = level::extreme_rows, .extreme_share_rows = level::extreme_share_rows,                            \
    .extreme_grad_rows = level::extreme_grad_rows, .scatter_add_owned = level::scatter_add_owned,                    \
    .dropout_rows = level::dropout_rows, .uniform_rows = level::uniform_rows, .epilogue_rows = level::epilogue_rows, \
    .epilogue_grad_rows = level::epilogue_grad_rows, .quantize_rows = level::quantize_rows,                          \
    .dequantize_add_rows = level::dequantize_add_rows                                                                \
  }

#if defined(PYG_DIST_SVE_LEVELS)
// The length of this process' SVE vectors in bits, 0 without SVE. Linux: asm/hwcap.h, linux/prctl.h.
int sve_bits() {
  constexpr unsigned long kHwcapSve = 1UL << 22;
  constexpr int kSveGetVl = 51, kLengthMask = 0xffff;
  if ((getauxval(AT_HWCAP) & kHwcapSve) == 0) return 0;
  const int answer = prctl(kSveGetVl);
  return answer < 0 ? 0 : (answer & kLengthMask) * 8;
}
#endif

struct Level {
  Kernels kernels;
  bool available;
};

Kernels choose() {
  const Level levels[] = {
  // best first
#if defined(PYG_DIST_X86_LEVELS)
      {PYG_DIST_TABLE(avx512), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {PYG_DIST_TABLE(avx2), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#elif defined(PYG_DIST_SVE_LEVELS)
      {PYG_DIST_TABLE(sve512), sve_bits() == 512},
      {PYG_DIST_TABLE(sve256), sve_bits() == 256},
#endif
      {PYG_DIST_TABLE(baseline), true},
  };
  const char* asked = std::getenv("PYG_DIST_ISA");
  std::string available;
  for (const Level& level : levels) {
    if (!level.available) continue;
    if (asked == nullptr || *asked == '\0' || std::string(asked) == level.kernels.isa) return level.kernels;
    available += (available.empty() ? "" : ", ") + std::string(level.kernels.isa);
  }
  throw std::runtime_error("PYG_DIST_ISA: expected an instruction set of this machine (" + available + "), got '" +
                           asked + "'; unset it to take the best one");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace pyg_dist
