#include "ops/cpu/last_cache.h"

#include <torch/csrc/stable/library.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace pyg_dist::cpu {
namespace {

constexpr int kMaxCaches = 16;  // index0, index1 ...: three to five on a processor

// "32768K", "32M" or plain bytes; 0: anything else.
int64_t read_size(std::ifstream file) {
  constexpr int64_t kMost = int64_t{1} << 40;
  int64_t size = 0;
  if (!(file >> size) || size <= 0 || size > kMost) return 0;
  char unit = ' ';
  file >> unit;
  const int shift = unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : unit == ' ' ? 0 : -1;
  return shift < 0 || size > kMost >> shift ? 0 : size << shift;
}

// 0: there is no such folder, as in some containers, or it names no cache of the third level.
int64_t third_level_in(const std::string& caches) {
  for (int k = 0; k < kMaxCaches; ++k) {
    const std::string cache = caches + "/index" + std::to_string(k);
    int level = 0;
    if (std::ifstream(cache + "/level") >> level && level == 3) return read_size(std::ifstream(cache + "/size"));
  }
  return 0;
}

int64_t op(std::string caches) { return last_cache_bytes(caches); }

}  // namespace

int64_t last_cache_bytes(const std::string& caches) {
  if (const int64_t bytes = third_level_in(caches); bytes > 0) return bytes;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
#else
  return 0;
#endif
}

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CompositeExplicitAutograd, m) { m.impl("last_cache_bytes", TORCH_BOX(&op)); }

}  // namespace pyg_dist::cpu
