#include <torch/csrc/stable/library.h>

#include <string>

#include "kernels/cpu/table.h"

namespace pyg_dist {
namespace {

std::string isa() { return kernels().isa; }

// "key=value" pairs with "; " between them.
std::string build_info() {
  return "version=" PYG_DIST_VERSION "; torch=" TORCH_VERSION "; compiler=" PYG_DIST_COMPILER
         "; levels=" PYG_DIST_LEVELS;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("build_info", TORCH_BOX(&build_info));
}

}  // namespace pyg_dist
