#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"
#include "kernels/row_chunks.h"

namespace pyg_dist::gpu {
namespace {

// A group of lanes for each chunk of kEdges edges: one dot product after the other, of vectors of the rows, whose lanes
// are added up in one order. Two edges are on their way at once.
template <class T, int kVec>
struct Dots {
  static constexpr int kThreads = 256;
  static constexpr int64_t kEdges = 32;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  SddmmCsr p;
  int log_lanes;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t first = ((block_id() * kThreads + thread_id()) >> log_lanes) * kEdges;
    const int lane = thread_id() & ((1 << log_lanes) - 1);
    const int64_t last = first + kEdges < p.num_edges ? first + kEdges : p.num_edges;
    const auto* const b = static_cast<const T*>(p.b);
    int64_t row = row_of_edge(p.rowptr, p.num_rows, first);
    for (int64_t e = first; e < last; ++e) {
      while (p.rowptr[row + 1] <= e) ++row;
      const T* const a = static_cast<const T*>(p.a) + row * p.a_stride;
      const T* const other = b + p.col[e] * p.b_stride;
      A sum[kVec] = {};
      for (int64_t c = lane * kVec; c < p.num_features; c += int64_t{kVec} << log_lanes) {
        A x[kVec], y[kVec];
        load_values<T, kVec>(a + c, x);
        load_values<T, kVec>(other + c, y);
        PYG_DIST_UNROLL
        for (int v = 0; v < kVec; ++v) sum[v] += x[v] * y[v];
      }
      PYG_DIST_UNROLL
      for (int v = 1; v < kVec; ++v) sum[0] += sum[v];
      const A dot = sum_lanes(sum[0], log_lanes);
      if (lane == 0) static_cast<A*>(p.out)[e] = dot;
    }
  }
};

}  // namespace

void sddmm_csr(const SddmmCsr& problem, const Queue& queue) {
  for_element(problem.element, [&]<class T>() {
    Alignment<T> alignment(problem.num_features);
    alignment.template rows<T>(problem.a, problem.a_stride).template rows<T>(problem.b, problem.b_stride);
    with_vectors<T>(alignment, [&]<int kVec, int>() {
      using Kernel = Dots<T, kVec>;
      const int log_lanes = log_lanes_for(problem.num_features, kVec);
      const int64_t threads = (problem.num_edges + Kernel::kEdges - 1) / Kernel::kEdges << log_lanes;
      launch(Kernel{problem, log_lanes}, blocks_for(threads, Kernel::kThreads), queue.stream);
    });
  });
}

}  // namespace pyg_dist::gpu
