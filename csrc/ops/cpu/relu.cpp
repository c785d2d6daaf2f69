#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "formats/bfloat16.h"
#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/cpu/parallel.h"

namespace pyg_dist {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 16;
constexpr int64_t kBlock = 512;  // elements whose flags are bytes, in the first level of cache

template <class T>
bool is_positive_or_nan(T value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return !(widen(value) <= 0);
  } else {
    return !(value <= 0);
  }
}

int64_t num_bytes(int64_t num_bits) { return (num_bits + 7) / 8; }

// Eight flags of 0 or 1 to a byte, the first one lowest: flag i is shifted by 56 - 7 i, to bit 56 + i.
void pack(uint8_t* flags, int64_t count, uint8_t* bits) {
  for (int64_t i = count; i % 8 != 0; ++i) flags[i] = 0;
  for (int64_t i = 0; i < count; i += 8) {
    uint64_t word;
    std::memcpy(&word, flags + i, 8);
    bits[i / 8] = static_cast<uint8_t>((word * 0x0102040810204080) >> 56);
  }
}

// A byte of zero where the bit is, of another value elsewhere.
void unpack(const uint8_t* bits, int64_t count, uint8_t* flags) {
  for (int64_t i = 0; i < count; i += 8) {
    const uint64_t word = (bits[i / 8] * uint64_t{0x0101010101010101}) & uint64_t{0x8040201008040201};
    std::memcpy(flags + i, &word, 8);
  }
}

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

// to = from where there is a flag, zero elsewhere; without a branch, which random signs would mislead half the time.
template <class T>
void select(const T* from, const uint8_t* flags, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    Bits<T> bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bits &= static_cast<Bits<T>>(-static_cast<Bits<T>>(flags[i] != 0));
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// Memory sets the pace: plain loops, which compilers turn into vectors of the baseline, are as fast as wider ones.
template <class T>
void forward(const Tensor& x, const Tensor& y, const Tensor& passed) {
  const auto* from = static_cast<const T*>(x.const_data_ptr());
  auto* to = static_cast<T*>(y.mutable_data_ptr());
  auto* bits = passed.numel() == 0 ? nullptr : static_cast<uint8_t*>(passed.mutable_data_ptr());
  for_each_range(x.numel(), kElementsPerChunk, [&](int64_t first, int64_t last) {
    uint8_t flags[kBlock];
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t count = std::min(kBlock, last - begin);
      for (int64_t i = 0; i < count; ++i) flags[i] = is_positive_or_nan(from[begin + i]);
      select(from + begin, flags, count, to + begin);
      if (bits != nullptr) pack(flags, count, bits + begin / 8);
    }
  });
}

template <class T>
void backward(const Tensor& grad, const Tensor& passed, const Tensor& out) {
  const auto* from = static_cast<const T*>(grad.const_data_ptr());
  const auto* bits = static_cast<const uint8_t*>(passed.const_data_ptr());
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  for_each_range(grad.numel(), kElementsPerChunk, [&](int64_t first, int64_t last) {
    uint8_t flags[kBlock];
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t count = std::min(kBlock, last - begin);
      unpack(bits + begin / 8, count, flags);
      select(from + begin, flags, count, to + begin);
    }
  });
}

void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  PYG_DIST_CHECK(tensor.is_contiguous(), op, ": expected '", name, "' to be contiguous, got shape ", shape_of(tensor),
                 " with gaps");
}

std::tuple<Tensor, Tensor> relu(Tensor x, bool keeps_mask) {
  check_contiguous("relu", "x", x);
  const Element element = element_of("relu", "x", x.scalar_type());
  const Tensor y = new_output_like(x);
  const Tensor passed = new_output(x, {keeps_mask ? num_bytes(x.numel()) : 0}, ScalarType::Byte);
  switch (element) {
    case Element::f32:
      forward<float>(x, y, passed);
      break;
    case Element::f64:
      forward<double>(x, y, passed);
      break;
    case Element::bf16:
      forward<BFloat16>(x, y, passed);
      break;
  }
  return {y, passed};
}

Tensor relu_grad(Tensor grad, Tensor passed) {
  check_contiguous("relu_grad", "grad", grad);
  check_vector("relu_grad", "passed", passed, ScalarType::Byte, num_bytes(grad.numel()));
  const Element element = element_of("relu_grad", "grad", grad.scalar_type());
  const Tensor out = new_output_like(grad);
  switch (element) {
    case Element::f32:
      backward<float>(grad, passed, out);
      break;
    case Element::f64:
      backward<double>(grad, passed, out);
      break;
    case Element::bf16:
      backward<BFloat16>(grad, passed, out);
      break;
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_grad", TORCH_BOX(&relu_grad));
}

}  // namespace pyg_dist
