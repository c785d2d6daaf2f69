// For rows with fewer columns than a vector has lanes; only for .simd.cpp files.
#pragma once

#include "cpu/vec.h"

namespace pyg_dist::PYG_DIST_LEVEL {

// The next shorter vector to try. GCC 12 compares vectors that fill an SVE register in part wrongly (`make cross` shows
// it), so there the next shorter one is NEON's.
template <int L, class A>
constexpr int kShorter =
    kVectorBytes > 16 && PYG_DIST_HAS_SVE ? (L == kLanes<A> ? 16 / static_cast<int>(sizeof(A)) : L / 2) : L / 2;

}  // namespace pyg_dist::PYG_DIST_LEVEL
