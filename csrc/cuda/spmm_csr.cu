#include "cuda/kernels.h"
#include "cuda/sum_edges.cuh"

namespace pyg_dist::gpu {

void spmm_csr(const SpmmCsr& problem, const Queue& queue) {
  const auto of_types = [&]<class X, class Out>() {
    Alignment<X> alignment(problem.num_features);
    alignment.template rows<X>(problem.x, problem.x_stride).template rows<Out>(problem.out, problem.out_stride);
    with_vectors<X>(alignment, [&]<int kVec, int kCount>() {
      with_scales(problem, [&]<bool kDivide>() {
        reduce_rows(SumEdges<X, Out, kVec, kCount, kDivide>{problem}, problem.num_features, queue);
      });
    });
  };
  for_element(problem.x_element, [&]<class X>() {
    if (problem.out_element == problem.x_element) {
      of_types.template operator()<X, X>();
    } else {
      of_types.template operator()<X, accumulator_t<X>>();
    }
  });
}

}  // namespace pyg_dist::gpu
