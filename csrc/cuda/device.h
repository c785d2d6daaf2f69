// The only words that kernels for GPUs use. tests/simt/cuda/device.h has the same ones for the host's compiler, so that
// the kernels' source runs, and is checked, where there is no GPU.
//
// A kernel is a struct: its members are what the launch passes, kThreads the threads of a block, Shared what a block's
// threads share (NoShared: nothing), and operator()(Shared&) what each thread does.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include "cuda/queue.h"

#define PYG_DIST_DEVICE __device__ __forceinline__
#define PYG_DIST_PRAGMA(text) _Pragma(#text)
#define PYG_DIST_UNROLL PYG_DIST_PRAGMA(unroll)
#define PYG_DIST_UNROLL_BY(count) PYG_DIST_PRAGMA(unroll count)

namespace pyg_dist::gpu {

constexpr int kWarp = 32;
using Lanes = uint32_t;  // of a warp, the lowest bit being lane 0
constexpr Lanes kAllLanes = 0xffffffffu;

struct NoShared {};

// ---- Who am I -----------------------------------------------------------------------------------------------------

PYG_DIST_DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
PYG_DIST_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) & (kWarp - 1); }
PYG_DIST_DEVICE int64_t block_id() { return blockIdx.x; }
PYG_DIST_DEVICE int64_t block_slice() { return blockIdx.y; }

// ---- Threads together ---------------------------------------------------------------------------------------------

// All threads of the block come here, or none.
PYG_DIST_DEVICE void block_sync() { __syncthreads(); }

// All lanes that are named come here, or none; each names the same ones, itself among them.
PYG_DIST_DEVICE void warp_sync(Lanes lanes) { __syncwarp(lanes); }
template <class T>
PYG_DIST_DEVICE T shuffle(Lanes lanes, T value, int from) {
  return __shfl_sync(lanes, value, from);
}
template <class T>
PYG_DIST_DEVICE T shuffle_xor(Lanes lanes, T value, int bits) {
  return __shfl_xor_sync(lanes, value, bits);
}
PYG_DIST_DEVICE Lanes ballot(Lanes lanes, bool is_true) { return __ballot_sync(lanes, is_true); }
PYG_DIST_DEVICE int count_bits(Lanes lanes) { return __popc(lanes); }

// ---- Numbers ------------------------------------------------------------------------------------------------------

// Of float16, whose bits these are; to nearest even.
PYG_DIST_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
PYG_DIST_DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// ---- Memory -------------------------------------------------------------------------------------------------------

// N values side by side, which one instruction loads: at most 16 bytes, aligned to their number.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};
template <int N, class T>
PYG_DIST_DEVICE Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, class T>
PYG_DIST_DEVICE void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Integers alone: sums of floats would depend on who comes first. Each returns what was there before.
PYG_DIST_DEVICE uint64_t atomic_min(uint64_t* to, uint64_t value) {
  return atomicMin(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}
PYG_DIST_DEVICE int32_t atomic_add(int32_t* to, int32_t value) { return atomicAdd(to, value); }
PYG_DIST_DEVICE uint32_t atomic_swap(uint32_t* to, uint32_t value) { return atomicExch(to, value); }
// What this thread has written is seen by the host before what it writes next.
PYG_DIST_DEVICE void system_fence() { __threadfence_system(); }

// ---- Launch -------------------------------------------------------------------------------------------------------

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("cuda: ") + cudaGetErrorString(error));
}

// Waits for the stream: the one word that does.
inline void copy_to_host(void* to, const void* from, size_t num_bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
}

// Memory that host and device both see, for good. It may be asked for while a CUDA graph is captured, of which it is no
// part: CUDA refuses that unless the thread says so.
inline void* host_memory(size_t num_bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  check(error);
  return memory;
}

// Zeros in memory of the current device, for good; likewise.
inline void* device_memory(size_t num_bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  cudaStream_t own = nullptr;  // the default one may not be used while others are captured
  cudaError_t error = cudaMalloc(&memory, num_bytes);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, num_bytes, own);
  if (error == cudaSuccess) error = cudaStreamSynchronize(own);
  if (error == cudaSuccess) error = cudaStreamDestroy(own);
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  check(error);
  return memory;
}

inline void clear(void* memory, size_t num_bytes, Stream stream) {
  check(cudaMemsetAsync(memory, 0, num_bytes, stream));
}

// Whether what is launched becomes part of a CUDA graph.
inline bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Threads of a kernel that a multiprocessor has at once, at least: 512 where the kernel does not say, so each has up to
// 128 registers; left to itself, the compiler spills one or two of 80.
template <class Kernel>
constexpr int threads_at_once() {
  if constexpr (requires { Kernel::kThreadsAtOnce; }) {
    return Kernel::kThreadsAtOnce;
  } else {
    return 512;
  }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, threads_at_once<Kernel>() / Kernel::kThreads)
    run(const __grid_constant__ Kernel kernel) {
  __shared__ typename Kernel::Shared shared;
  kernel(shared);
}

// num_blocks of each slice, the blocks of slice 0 first; none at all is no error.
template <class Kernel>
void launch(const Kernel& kernel, int64_t num_blocks, Stream stream, int64_t num_slices = 1) {
  if (num_blocks == 0 || num_slices == 0) return;
  check_grid(num_blocks, num_slices);
  const dim3 grid(static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_slices));
  run<<<grid, Kernel::kThreads, 0, stream>>>(kernel);
  check(cudaGetLastError());
}

}  // namespace pyg_dist::gpu
