// One source, one object file per instruction set ("level"), chosen when the library is first used.
//
// A .simd.cpp file is compiled once per level with PYG_DIST_LEVEL = baseline, avx2, avx512, sve256 or sve512, and puts
// everything it defines into namespace pyg_dist::PYG_DIST_LEVEL. Such files must not use functions of the standard
// library that are templates or inline: the linker keeps one copy of each, perhaps the one with AVX-512 code in it, for
// all callers.
#pragma once

#if defined(PYG_DIST_X86_LEVELS)
#  define PYG_DIST_AT_EVERY_LEVEL(declaration) \
    namespace baseline {                       \
    declaration;                               \
    }                                          \
    namespace avx2 {                           \
    declaration;                               \
    }                                          \
    namespace avx512 {                         \
    declaration;                               \
    }
#elif defined(PYG_DIST_SVE_LEVELS)  // baseline is NEON; SVE by vector length, which the compiler must know
#  define PYG_DIST_AT_EVERY_LEVEL(declaration) \
    namespace baseline {                       \
    declaration;                               \
    }                                          \
    namespace sve256 {                         \
    declaration;                               \
    }                                          \
    namespace sve512 {                         \
    declaration;                               \
    }
#else  // other systems: what their compiler takes for granted (NEON on Apple's AArch64)
#  define PYG_DIST_AT_EVERY_LEVEL(declaration) \
    namespace baseline {                       \
    declaration;                               \
    }
#endif
