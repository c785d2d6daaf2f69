// Marks a function that kernels of every device and every instruction set call.
#pragma once

#if defined(__CUDACC__)
#  define PYG_DIST_HOST_DEVICE __host__ __device__
#else
#  define PYG_DIST_HOST_DEVICE
#endif

// Always inlined: of an inline function that is called, the linker keeps one object file's copy for all, perhaps the
// one with AVX-512 in it.
#define PYG_DIST_PORTABLE PYG_DIST_HOST_DEVICE inline __attribute__((always_inline))
