#include "cpu/table.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(PYG_DIST_SVE_LEVELS)
#  include <sys/auxv.h>
#  include <sys/prctl.h>
#endif

namespace pyg_dist {

#define PYG_DIST_ENTRY(result, kernel, problem) .kernel = kernel,
#define PYG_DIST_TABLE(level)                                                           \
  namespace level {                                                                     \
  constexpr Kernels kTable = {.isa = #level, PYG_DIST_FOR_EACH_KERNEL(PYG_DIST_ENTRY)}; \
  }
PYG_DIST_FOR_EACH_LEVEL(PYG_DIST_TABLE)

namespace {

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
      {avx512::kTable, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {avx2::kTable, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#elif defined(PYG_DIST_SVE_LEVELS)
      {sve512::kTable, sve_bits() == 512},
      {sve256::kTable, sve_bits() == 256},
#endif
      {baseline::kTable, true},
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
