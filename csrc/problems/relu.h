// y = 0 where x < 0, else x: a NaN is kept, and so is -0.0, as in torch; and for the backward, bit by bit, whether each
// value passes: is positive or NaN. The gradient is what comes in where it passed, zero elsewhere.
#pragma once

#include <cstdint>

#include "formats/element.h"

namespace pyg_dist {

struct Relu {
  const void* x;  // [num_elements]
  void* y;
  uint8_t* passed;  // [ceil(num_elements / 8)], the first element's bit the lowest; or null
  int64_t num_elements;
  Element element;
};

struct ReluGrad {
  const void* grad;
  const uint8_t* passed;
  void* grad_x;
  int64_t num_elements;
  Element element;
};

}  // namespace pyg_dist
