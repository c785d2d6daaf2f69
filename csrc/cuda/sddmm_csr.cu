#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"
#include "problems/row_chunks.h"

namespace pyg_dist::gpu {
namespace {

// A group of lanes for each chunk of kEdges edges: dot products of vectors of the rows, whose lanes are added up in one
// order. kAhead edges are on their way at once. All groups of a warp make as many steps, with their last edge again
// where they have no more, so that all its lanes add up together.
template <class T, int kVec>
struct Dots {
  static constexpr int kThreads = 256, kThreadsAtOnce = sizeof(T) == 8 || kVec == 8 ? 512 : 1024;
  static constexpr int64_t kEdges = 32;
  static constexpr int kAhead = 2;
  using Shared = NoShared;
  using A = accumulator_t<T>;

  SddmmCsr p;
  int log_lanes;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t first = ((block_id() * kThreads + thread_id()) >> log_lanes) * kEdges;
    const int lane = thread_id() & ((1 << log_lanes) - 1);
    int64_t row = row_of_edge(p.rowptr, p.num_rows, first < p.num_edges ? first : p.num_edges - 1);
    int64_t end = p.rowptr[row + 1];
    for (int64_t e = first; e < first + kEdges; e += kAhead) {
      const T *a[kAhead], *b[kAhead];
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int64_t edge = e + k < p.num_edges ? e + k : p.num_edges - 1;
        while (end <= edge) end = p.rowptr[++row + 1];
        a[k] = static_cast<const T*>(p.a) + row * p.a_stride;
        b[k] = static_cast<const T*>(p.b) + p.col[edge] * p.b_stride;
      }
      A sum[kAhead][kVec] = {};
      for (int64_t c = lane * kVec; c < p.num_features; c += int64_t{kVec} << log_lanes) {
        PYG_DIST_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          A x[kVec], y[kVec];
          load_values<T, kVec>(a[k] + c, x);
          load_values<T, kVec>(b[k] + c, y);
          PYG_DIST_UNROLL
          for (int v = 0; v < kVec; ++v) sum[k][v] += x[v] * y[v];
        }
      }
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        PYG_DIST_UNROLL
        for (int v = 1; v < kVec; ++v) sum[k][0] += sum[k][v];
        const A dot = sum_lanes(sum[k][0], log_lanes, kAllLanes);
        if (lane == 0 && e + k < p.num_edges) static_cast<A*>(p.out)[e + k] = dot;
      }
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
