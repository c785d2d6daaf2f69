#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/table.h"
#include "formats/narrow.h"

namespace pyg_dist {
namespace {

constexpr int64_t kFlags = 512;  // elements whose flags are bytes, in the first level of cache

template <class T>
accumulator_t<T> number(T value) {
  if constexpr (kIsNarrow<T>) {
    return widen(value);
  } else {
    return value;
  }
}

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

// The value, or zero; without a branch, which random signs would mislead half the time.
template <class T>
void keep_if(bool kept, const T* from, T* to) {
  Bits<T> bits;
  std::memcpy(&bits, from, sizeof bits);
  bits &= static_cast<Bits<T>>(-static_cast<Bits<T>>(kept));
  std::memcpy(to, &bits, sizeof bits);
}

template <class T>
void forward(const Relu& p, int64_t first, int64_t last) {
  const auto* from = static_cast<const T*>(p.x);
  auto* to = static_cast<T*>(p.y);
  uint8_t flags[kFlags];
  for (int64_t begin = first; begin < last; begin += kFlags) {
    const int64_t count = std::min(kFlags, last - begin);
    for (int64_t i = begin; i < begin + count; ++i) keep_if(!(number(from[i]) < 0), from + i, to + i);
    if (p.passed == nullptr) continue;
    for (int64_t i = 0; i < count; ++i) flags[i] = !(number(from[begin + i]) <= 0);
    pack(flags, count, p.passed + begin / 8);
  }
}

template <class T>
void backward(const ReluGrad& p, int64_t first, int64_t last) {
  const auto* from = static_cast<const T*>(p.grad);
  auto* to = static_cast<T*>(p.grad_x);
  uint8_t flags[kFlags];
  for (int64_t begin = first; begin < last; begin += kFlags) {
    const int64_t count = std::min(kFlags, last - begin);
    unpack(p.passed + begin / 8, count, flags);
    for (int64_t i = 0; i < count; ++i) keep_if(flags[i] != 0, from + begin + i, to + begin + i);
  }
}

}  // namespace

void relu_elements(const Relu& p, int64_t begin, int64_t end) {
  return for_element(p.element, [&]<class T>() { return forward<T>(p, begin, end); });
}

void relu_grad_elements(const ReluGrad& p, int64_t begin, int64_t end) {
  return for_element(p.element, [&]<class T>() { return backward<T>(p, begin, end); });
}

}  // namespace pyg_dist
