// The kernels of the instruction set in use, behind one pointer each.
#pragma once

#include <cstdint>

#include "kernels/dequantize_csr.h"
#include "kernels/extreme_csr.h"
#include "kernels/keyed.h"
#include "kernels/quantize_rows.h"
#include "kernels/row_epilogue.h"
#include "kernels/scatter_add_rows.h"
#include "kernels/sddmm_csr.h"
#include "kernels/spmm_csr.h"

namespace pyg_dist {

struct Kernels {
  const char* isa;
  decltype(&baseline::spmm_rows) spmm_rows;
  decltype(&baseline::sddmm_edges) sddmm_edges;
  decltype(&baseline::extreme_rows) extreme_rows;
  decltype(&baseline::extreme_share_rows) extreme_share_rows;
  decltype(&baseline::extreme_grad_rows) extreme_grad_rows;
  decltype(&baseline::scatter_add_owned) scatter_add_owned;
  decltype(&baseline::dropout_rows) dropout_rows;
  decltype(&baseline::uniform_rows) uniform_rows;
  decltype(&baseline::epilogue_rows) epilogue_rows;
  decltype(&baseline::epilogue_grad_rows) epilogue_grad_rows;
  decltype(&baseline::quantize_rows) quantize_rows;
  decltype(&baseline::dequantize_add_rows) dequantize_add_rows;
};

// Chosen at the first call: PYG_DIST_ISA if set, else the best level of this machine. Throws std::runtime_error when
// the environment asks for a level that is unknown or that this machine lacks.
const Kernels& kernels();

}  // namespace pyg_dist
