// problems/gather_rows.h on a GPU: a group of 1 to 32 lanes copies a row, four vectors in flight. A row of which the
// index is out of range becomes NaN.
#include "cuda/bad_index.cuh"
#include "cuda/element.cuh"
#include "cuda/kernels.h"
#include "cuda/warp.cuh"

namespace pyg_dist::gpu {
namespace {

// Bytes are moved in vectors of Word, an unsigned integer, or of 16 bytes.
template <class Word, int kVec>
struct GatherRowsKernel {
  static constexpr int kThreads = 256;
  static constexpr int kAhead = 4;
  static constexpr int64_t kBytes = sizeof(Word) * kVec;
  using Shared = NoShared;

  GatherRows p;
  int log_lanes;
  IndexCheck check;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t row = (block_id() * kThreads + thread_id()) >> log_lanes;
    if (row >= p.num_rows) return;
    const int lanes = 1 << log_lanes, lane = thread_id() & (lanes - 1);
    const int64_t source = p.index[row];
    char* const to = p.out + row * p.out_stride;
    const int64_t step = lanes * kBytes;
    if (!is_in_range(source, p.num_source_rows, row, check)) {
      Pack<Word, kVec> ones;  // which is NaN in every format of floats
      for (Word& word : ones.value) word = static_cast<Word>(~Word{0});
      for (int64_t at = lane * kBytes; at < p.row_bytes; at += step)
        store<kVec>(reinterpret_cast<Word*>(to + at), ones);
      return;
    }
    const char* const from = p.x + source * p.x_stride;
    for (int64_t first = lane * kBytes; first < p.row_bytes; first += kAhead * step) {
      Pack<Word, kVec> moved[kAhead] = {};
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int64_t at = first + k * step;
        if (at < p.row_bytes) moved[k] = load<kVec>(reinterpret_cast<const Word*>(from + at));
      }
      PYG_DIST_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int64_t at = first + k * step;
        if (at < p.row_bytes) store<kVec>(reinterpret_cast<Word*>(to + at), moved[k]);
      }
    }
  }
};

}  // namespace

void gather_rows(const GatherRows& problem, const IndexCheck& check, const Queue& queue) {
  Alignment<char> alignment(problem.row_bytes);
  alignment.rows<char>(problem.x, problem.x_stride).rows<char>(problem.out, problem.out_stride);
  const auto move = [&]<class Word, int kVec>() {
    using Kernel = GatherRowsKernel<Word, kVec>;
    const int log_lanes = log_lanes_for(problem.row_bytes, Kernel::kBytes);
    const int64_t threads = problem.num_rows << log_lanes;
    launch(Kernel{problem, log_lanes, check}, blocks_for(threads, Kernel::kThreads), queue.stream);
  };
  if (problem.row_bytes == 0 || alignment.allows(16)) {
    move.template operator()<uint32_t, 4>();
  } else if (alignment.allows(8)) {
    move.template operator()<uint32_t, 2>();
  } else if (alignment.allows(4)) {
    move.template operator()<uint32_t, 1>();
  } else if (alignment.allows(2)) {
    move.template operator()<uint16_t, 1>();
  } else {
    move.template operator()<uint8_t, 1>();
  }
}

}  // namespace pyg_dist::gpu
