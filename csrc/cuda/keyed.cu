#include "cuda/kernels.h"
#include "cuda/keyed.cuh"
#include "cuda/warp.cuh"

namespace pyg_dist::gpu {
namespace {

// Of one word the fraction in [0, 1) that T holds exactly.
template <class T>
PYG_DIST_DEVICE accumulator_t<T> fraction(const uint32_t* words) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<double>((uint64_t{words[1]} << 32 | words[0]) >> 11) * 0x1p-53;
  } else {
    constexpr int kBits = UniformBits<T>::value;
    return static_cast<float>(words[0] >> (32 - kBits)) * (1.0f / (1 << kBits));
  }
}

// A thread for each counter of each row. Use has T, kColumns, kStream and operator()(words, values).
template <class Use>
struct ForCounters {
  static constexpr int kThreads = 256;
  static constexpr int kColumns = Use::kColumns;
  using Shared = NoShared;
  using T = typename Use::T;

  Keyed keyed;
  const T* x;  // or null
  T* y;
  Use use;
  int64_t counters;  // of a row
  bool is_aligned;

  PYG_DIST_DEVICE void operator()(Shared&) const {
    const int64_t at = block_id() * kThreads + thread_id(), row = at / counters;
    if (row >= keyed.num_rows) return;
    const auto columns = columns_of_counter<kColumns>(keyed, row, at % counters);
    const Words words = philox(keyed.seed, static_cast<uint64_t>(keyed.key[row]), columns.block, Use::kStream);
    accumulator_t<T> values[kColumns] = {};
    if (x != nullptr) load_columns<T, kColumns>(x + row * keyed.num_columns, columns, is_aligned, values);
    use(words, values);
    store_columns<T, kColumns>(y + row * keyed.num_columns, columns, is_aligned, values);
  }
};

template <class T_>
struct Drop {
  using T = T_;
  using A = accumulator_t<T>;
  static constexpr int kColumns = 4;
  static constexpr pyg_dist::Stream kStream = pyg_dist::Stream::dropout;

  uint32_t threshold;
  A scale;

  PYG_DIST_DEVICE void operator()(const Words& words, A (&values)[kColumns]) const {
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) values[k] *= words.word[k] >= threshold ? scale : A{0};
  }
};

template <class T_>
struct Uniform {
  using T = T_;
  static constexpr int kColumns = sizeof(T) == 8 ? 2 : 4;
  static constexpr pyg_dist::Stream kStream = pyg_dist::Stream::uniform;

  PYG_DIST_DEVICE void operator()(const Words& words, accumulator_t<T> (&values)[kColumns]) const {
    PYG_DIST_UNROLL
    for (int k = 0; k < kColumns; ++k) values[k] = fraction<T>(words.word + k * (4 / kColumns));
  }
};

template <class T_>
struct Normal {
  using T = T_;
  using A = accumulator_t<T>;
  static constexpr int kColumns = sizeof(T) == 8 ? 2 : 4;
  static constexpr pyg_dist::Stream kStream = pyg_dist::Stream::normal;

  PYG_DIST_DEVICE void operator()(const Words& words, A (&values)[kColumns]) const {
    PYG_DIST_UNROLL
    for (int pair = 0; pair < kColumns / 2; ++pair) {
      const NormalPair numbers = normal_pair<T>(words, pair);
      values[2 * pair] = static_cast<A>(numbers.even);
      values[2 * pair + 1] = static_cast<A>(numbers.odd);
    }
  }
};

template <class Use>
void for_counters(const Keyed& keyed, const void* x, void* y, const Use& use, const Queue& queue) {
  using Kernel = ForCounters<Use>;
  using T = typename Use::T;
  Alignment<T> alignment(keyed.num_columns);
  alignment.template rows<T>(x, keyed.num_columns).template rows<T>(y, keyed.num_columns);
  const int64_t counters = counters_of_row<Use::kColumns>(keyed);
  const bool is_aligned = are_aligned<T, Use::kColumns>(keyed, alignment);
  launch(Kernel{keyed, static_cast<const T*>(x), static_cast<T*>(y), use, counters, is_aligned},
         blocks_for(keyed.num_rows * counters, Kernel::kThreads), queue.stream);
}

}  // namespace

void keyed_dropout(const KeyedDropout& problem, const Queue& queue) {
  for_element(problem.element, [&]<class T>() {
    const Drop<T> drop{problem.threshold, static_cast<accumulator_t<T>>(problem.scale)};
    for_counters(problem.keyed, problem.x, problem.y, drop, queue);
  });
}

void keyed_uniform(const KeyedNumbers& problem, const Queue& queue) {
  for_element(problem.element,
              [&]<class T>() { for_counters(problem.keyed, nullptr, problem.y, Uniform<T>{}, queue); });
}

void keyed_normal(const KeyedNumbers& problem, const Queue& queue) {
  for_element(problem.element, [&]<class T>() { for_counters(problem.keyed, nullptr, problem.y, Normal<T>{}, queue); });
}

}  // namespace pyg_dist::gpu
