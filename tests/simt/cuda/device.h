// csrc/cuda/device.h for the host's compiler: a GPU in one thread of a CPU, for tests. Blocks run one after another,
// and the threads of a block as fibers, each until it waits for others; who comes next is drawn (simt::set_seed).
//
// What a GPU would do wrongly, or never end, is a std::runtime_error that says where: a barrier that some threads of a
// block do not reach, or in two places of the source; lanes that meet at different shuffles; a shuffle from a lane that
// takes no part; a vector load that is not aligned. Shared memory holds NaNs until something is written there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <source_location>
#include <type_traits>

#include "cuda/queue.h"
#include "fibers.h"
#include "formats/narrow.h"

#define PYG_DIST_DEVICE inline __attribute__((always_inline))
#define PYG_DIST_UNROLL
#define PYG_DIST_UNROLL_BY(count)

namespace pyg_dist::gpu {

using Where = std::source_location;

constexpr int kWarp = simt::kWarp;
using Lanes = uint32_t;
constexpr Lanes kAllLanes = 0xffffffffu;

struct NoShared {};

inline simt::Site site(const char* word, Where where) {
  return {word, where.file_name(), where.line(), where.column()};
}

inline int thread_id() { return simt::thread(); }
inline int lane_id() { return simt::thread() % kWarp; }
inline int64_t block_id() { return simt::block(); }
inline int64_t block_slice() { return simt::slice(); }

inline void block_sync(Where where = Where::current()) { simt::block_sync(site("block_sync", where)); }

inline void warp_sync(Lanes lanes, Where where = Where::current()) { simt::warp_sync(site("warp_sync", where), lanes); }

template <class T>
T shuffle(Lanes lanes, T value, int from, Where where = Where::current()) {
  static_assert(sizeof(T) <= 8 && std::is_arithmetic_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = simt::exchange(site("shuffle", where), lanes, bits, from % kWarp);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle_xor(Lanes lanes, T value, int bits, Where where = Where::current()) {
  return shuffle(lanes, value, lane_id() ^ bits, where);
}

inline Lanes ballot(Lanes lanes, bool is_true, Where where = Where::current()) {
  return simt::ballot(site("ballot", where), lanes, is_true);
}

inline int count_bits(Lanes lanes) { return __builtin_popcount(lanes); }

inline float half_to_float(uint16_t bits) { return widen(Float16{bits}); }
inline uint16_t float_to_half(float value) { return narrow<Float16>(value).bits; }

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};
template <int N, class T>
inline Pack<T, N> load(const T* from) {
  static_assert(sizeof(T) * N <= 16);
  simt::check_aligned(from, sizeof(T) * N);
  Pack<T, N> pack;
  std::memcpy(&pack, from, sizeof(pack));
  return pack;
}
template <int N, class T>
inline void store(T* to, const Pack<T, N>& pack) {
  static_assert(sizeof(T) * N <= 16);
  simt::check_aligned(to, sizeof(T) * N);
  std::memcpy(to, &pack, sizeof(pack));
}

// Atomic to ThreadSanitizer (make racecheck); they order nothing else.
inline uint64_t atomic_min(uint64_t* to, uint64_t value) {
  uint64_t before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (value < before && !__atomic_compare_exchange_n(to, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
inline int32_t atomic_add(int32_t* to, int32_t value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline uint32_t atomic_swap(uint32_t* to, uint32_t value) { return __atomic_exchange_n(to, value, __ATOMIC_RELAXED); }
inline void system_fence() {}

inline void check(int error) {
  if (error != 0) throw std::runtime_error("simt: error " + std::to_string(error));
}

inline void copy_to_host(void* to, const void* from, size_t num_bytes, Stream) { std::memcpy(to, from, num_bytes); }

inline void* host_memory(size_t num_bytes) { return std::malloc(num_bytes); }
inline void* device_memory(size_t num_bytes) { return std::calloc(num_bytes, 1); }
inline void clear(void* memory, size_t num_bytes, Stream) { std::memset(memory, 0, num_bytes); }
inline bool is_captured(Stream) { return false; }

template <class Kernel>
void launch(const Kernel& kernel, int64_t num_blocks, Stream, int64_t num_slices = 1) {
  using Shared = typename Kernel::Shared;
  check_grid(num_blocks, num_slices);
  static_assert(std::is_trivially_copyable_v<Kernel> && std::is_trivially_default_constructible_v<Shared>);
  static_assert(sizeof(Kernel) <= 4096 && sizeof(Shared) <= 48 << 10, "more than a GPU passes, or shares");
  static_assert(Kernel::kThreads % kWarp == 0 && Kernel::kThreads <= 1024);
  const auto body = [](const void* kernel_, void* shared) {
    (*static_cast<const Kernel*>(kernel_))(*static_cast<Shared*>(shared));
  };
  simt::run({body, &kernel, sizeof(Shared), Kernel::kThreads, num_blocks, num_slices});
}

}  // namespace pyg_dist::gpu
