// Marks a function that kernels of every device and every instruction set call.
#pragma once

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#  error "expected IEEE arithmetic: leave out -ffast-math and -Ofast, which drop NaNs, zeros' signs and orders of sums"
#endif

#if defined(__CUDACC__)
#  define PYG_DIST_HOST_DEVICE __host__ __device__
#else
#  define PYG_DIST_HOST_DEVICE
#endif

// Always inlined: of an inline function that is called, the linker keeps one object file's copy for all, perhaps the
// one with AVX-512 in it.
#define PYG_DIST_PORTABLE PYG_DIST_HOST_DEVICE inline __attribute__((always_inline))
