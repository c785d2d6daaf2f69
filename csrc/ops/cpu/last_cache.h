// The processor's third-level cache.
#pragma once

#include <cstdint>
#include <string>

namespace pyg_dist::cpu {

// Where Linux says what caches the first processor has.
inline constexpr const char* kCaches = "/sys/devices/system/cpu/cpu0/cache";

// Bytes of the third-level cache that a core reaches, as a folder like kCaches says, or else the C library; 0: neither
// says. The C library comes second: glibc counts the caches of all cores of some AMD processors (2.36: 320 MiB where
// there are 32).
int64_t last_cache_bytes(const std::string& caches = kCaches);

}  // namespace pyg_dist::cpu
