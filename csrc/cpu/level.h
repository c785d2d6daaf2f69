// One source, one object file per instruction set ("level"), chosen when the library is first used.
//
// A .simd.cpp file is compiled once per level with PYG_DIST_LEVEL = baseline, avx2, avx512, sve256 or sve512, and puts
// everything it defines into namespace pyg_dist::PYG_DIST_LEVEL. Such files must not use functions of the standard
// library that are templates or inline: the linker keeps one copy of each, perhaps the one with AVX-512 code in it, for
// all callers. Of this library's own, those of csrc/formats/ are always inlined.
#pragma once

// X(level) for each level of this build.
#if defined(PYG_DIST_X86_LEVELS)
#  define PYG_DIST_FOR_EACH_LEVEL(X) X(baseline) X(avx2) X(avx512)
#elif defined(PYG_DIST_SVE_LEVELS)  // baseline is NEON; SVE by vector length, which the compiler must know
#  define PYG_DIST_FOR_EACH_LEVEL(X) X(baseline) X(sve256) X(sve512)
#else  // other systems: what their compiler takes for granted (NEON on Apple's AArch64)
#  define PYG_DIST_FOR_EACH_LEVEL(X) X(baseline)
#endif
